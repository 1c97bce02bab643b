"""A small dump for the tests of the study, and its operands read without the project's readers."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from tests.analysis.fake_dump import write_dump

GEMMS = {
    "linear": ("fprop", "dgrad", "wgrad"),
    "qk": ("fprop", "grad_query", "grad_key"),
    "pv": ("fprop", "grad_probs", "grad_value"),
}


def write(folder: Path, **size: int) -> Path:
    """Write a bf16 run of 2 layers and return the folder."""
    write_dump(folder, quant_type="bf16", **size)
    return folder


@functools.cache
def operands(folder: Path, layer: int = 0) -> dict[str, tuple[Tensor, Tensor, Tensor, float]]:
    """Return A, B, the gradient of C and alpha of each matmul of a layer, by operation."""
    saved = {}
    for path in sorted(folder.glob(f"*_L{layer}_*.pt")):
        content = torch.load(path, weights_only=True)
        if content["metadata"]["iteration"] == 1:
            saved[content["metadata"]["layer_type"], content["metadata"]["tensor_name"]] = content[
                "tensor"
            ]
    x, w, dy = (saved["linear", name] for name in ("input", "weight", "grad_output"))
    q, k, v = (
        x.permute(1, 2, 0, 3).expand(-1, 2, -1, -1).reshape(-1, *x.shape[::3])
        for x in (saved["attention", name] for name in ("query", "key", "value"))
    )
    s, b, h, d = saved["attention", "query"].shape
    do = saved["attention", "grad_output"].view(s, b, h, d).permute(1, 2, 0, 3).reshape(-1, s, d)
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
    alpha = 1 / math.sqrt(d)
    scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=alpha)
    exact_p = scores.float().masked_fill(hidden, -torch.inf).softmax(-1)
    p = exact_p.bfloat16()
    dp = torch.bmm(do, v.transpose(1, 2)).float()
    ds = (exact_p * (dp - (exact_p * dp).sum(-1, keepdim=True))).bfloat16()
    return {
        "linear": (x.flatten(0, 1), w, dy.flatten(0, 1), 1.0),
        "qk": (q, k, ds, alpha),
        "pv": (p, v.transpose(1, 2), do, 1.0),
    }


def exact(operands: tuple[Tensor, Tensor, Tensor, float]) -> list[Tensor]:
    """Return the three products of a matmul in float64."""
    a, b, c = (x.double() for x in operands[:3])
    products = [a @ b.mT, c @ b, c.mT @ a]
    return [operands[3] * x for x in products]
