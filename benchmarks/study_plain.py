"""A study of matmuls in plain torch, with the quantizers of another package.

This is the study that a user of torch and torchao would write: load the operands, quantize each one
once per format and GEMM, multiply them with torch.matmul, and compare the results with a float32
reference. It contains no code of megatron.analysis and uses the dump's files only.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
#: Function that quantizes a contiguous matrix along the last axis and dequantizes it.
Quantizer = Callable[[Tensor], Tensor]
#: Error metrics by module, GEMM and format.
Errors = dict[tuple[str, str, str], dict[str, float]]
GEMMS = {
    "linear": ("fprop", "dgrad", "wgrad"),
    "qk": ("fprop", "grad_query", "grad_key"),
    "pv": ("fprop", "grad_probs", "grad_value"),
}


@dataclass
class Product:
    """Matmul C = alpha A B^T; `c` is the gradient of C. All tensors are `[..., rows, columns]`."""

    name: str  #: module and operation
    operation: str
    a: Tensor
    b: Tensor
    c: Tensor
    alpha: float = 1.0

    def gemms(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each GEMM, and both operands with the reduction axis last."""
        at, bt, ct = (x.mT.contiguous() for x in (self.a, self.b, self.c))
        pairs = ((self.a, self.b), (self.c, bt), (ct, at))
        for name, (left, right) in zip(GEMMS[self.operation], pairs, strict=True):
            yield name, left.contiguous(), right.contiguous()


def products(folder: Path, passes: Mapping[str, list[str]], name: str) -> list[Product]:
    """Load the operands of a pass, and return its matmuls.

    Args:
        folder: folder of the dump.
        passes: files of each pass: input, weight and grad_output of a linear layer; query, key,
            value and grad_output of attention.
        name: module of the pass.
    """
    tensors = [torch.load(folder / f, weights_only=True, mmap=True)["tensor"] for f in passes[name]]
    if len(tensors) == 3:
        x, w, dy = tensors
        return [Product(f"{name} linear", "linear", x.flatten(0, -2), w, dy.flatten(0, -2))]
    return attention(name, tensors)


def attention(name: str, tensors: list[Tensor]) -> list[Product]:
    """Return QK^T and PV of causal attention.

    Args:
        name: module of the pass.
        tensors: query, key and value, `[s, b, heads, head_dim]`, and the gradient of the output.
    """
    shape = tensors[0].shape
    q, k, v, do = (x.reshape(shape[0], -1, shape[-1]).transpose(0, 1).contiguous() for x in tensors)
    scale = 1 / math.sqrt(q.shape[-1])
    scores = torch.baddbmm(q.new_empty(1), q, k.mT, beta=0, alpha=scale)
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    p = scores.float().masked_fill(hidden, -torch.inf).softmax(-1)
    dp = torch.bmm(do, v.mT).float()
    ds = (p * (dp - (p * dp).sum(-1, keepdim=True))).to(q.dtype)
    return [
        Product(f"{name} qk", "qk", q, k, ds, scale),
        Product(f"{name} pv", "pv", p.to(q.dtype), v.mT, do),
    ]


def study_pass(
    matmuls: list[Product], quantizers: Mapping[str, Quantizer], *, budget: bool = True
) -> Errors:
    """Return each GEMM's errors by format; `budget` adds those with only one operand quantized."""
    errors: Errors = {}
    for matmul in matmuls:
        for gemm, left, right in matmul.gemms():
            reference = torch.matmul(left.float(), right.float().mT).mul_(matmul.alpha).double()
            size = torch.dot(reference.view(-1), reference.view(-1))
            for name, quantizer in quantizers.items():
                q_left, q_right = quantized(left, quantizer), quantized(right, quantizer)
                pairs = {"": (q_left, q_right)}
                if budget:
                    pairs |= {" left": (q_left, right), " right": (left, q_right)}
                for kind, (one, other) in pairs.items():
                    result = torch.matmul(one, other.mT)
                    result = result if matmul.alpha == 1 else result * matmul.alpha
                    key = (matmul.name, gemm + kind, name)
                    errors[key] = numbers(result, reference, float(size))
    return errors


def multiply_pass(matmuls: list[Product], formats: int, *, budget: bool) -> None:
    """Compute as many products as `study_pass` with `formats` formats, and nothing else."""
    for matmul in matmuls:
        for _, left, right in matmul.gemms():
            torch.matmul(left.float(), right.float().mT)
            for _ in range((3 if budget else 1) * formats):
                torch.matmul(left, right.mT)


def quantized(x: Tensor, quantizer: Quantizer) -> Tensor:
    """Return `x` quantized and dequantized along its last axis."""
    return quantizer(x.view(-1, x.shape[-1])).view(x.shape)


def numbers(result: Tensor, reference: Tensor, size: float) -> dict[str, float]:
    """Return the error metrics of a result; `size` is the sum of squares of `reference`."""
    x = reference.view(-1)
    e = result.double().view(-1).sub_(x)
    xe, ee, total = float(torch.dot(x, e)), float(torch.dot(e, e)), float(e.sum())
    return {
        "relative_error": math.sqrt(ee / size),
        "gain": xe / size,
        "cosine": (size + xe) / math.sqrt(size * (size + 2 * xe + ee)),
        "mean_error": total / len(x) / math.sqrt(size / len(x)),
    }


def study(
    folder: Path,
    passes: Mapping[str, list[str]],
    quantizers: Mapping[str, Quantizer],
    *,
    workers: int = 1,
    budget: bool = True,
) -> Errors:
    """Return the errors of all passes.

    Args:
        folder: folder of the dump.
        passes: files of each pass; see `products`.
        quantizers: quantizer of each format.
        workers: number of passes that are studied at the same time.
        budget: True to also measure the errors of quantizing only one operand.
    """

    def run(name: str) -> Errors:
        return study_pass(products(folder, passes, name), quantizers, budget=budget)

    parts = on_threads(run, list(passes), workers)
    return {key: value for part in parts for key, value in part.items()}


def multiply(
    folder: Path, passes: Mapping[str, list[str]], formats: int, *, workers: int, budget: bool
) -> None:
    """Compute only the products of a study; see `study` for the arguments."""

    def run(name: str) -> None:
        multiply_pass(products(folder, passes, name), formats, budget=budget)

    on_threads(run, passes, workers)


def on_threads(
    function: Callable[[str], Result], names: Iterable[str], workers: int
) -> list[Result]:
    """Return the results of a function for all names, computed on `workers` threads."""
    if workers == 1:
        return [function(name) for name in names]
    with ThreadPoolExecutor(workers) as threads:
        return list(threads.map(function, names))
