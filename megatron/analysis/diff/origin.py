"""Split the difference of a matmul's result into an inherited part and a local part.

Let y = f(x, w) be the exact product of the operands. The results of the two runs are
`y_A = f(x_A, w_A) + e_A` and `y_B = f(x_B, w_B) + e_B`, where e is the error of the operation:
rounding, a number format, or a fault. The difference is a sum of two parts,

    y_B - y_A = [f(x_B, w_B) - f(x_A, w_A)] + [e_B - e_A],

the inherited one, which the operands bring in, and the local one, which the operation adds. The
first part is computed from the saved operands in float32. For a product it is
`(x_B - x_A) w_B + x_A (w_B - w_A)`, in which nothing large cancels. The second part is the rest.

Attention is one operation here: from query, key and value to the output, and back to the three
gradients. Its exact function is that of run A, with the mask and scale of its run card.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.analysis.diff.difference import square_of_norm
from megatron.analysis.verification.recompute_attention import (
    RESULTS,
    AttentionFormats,
    recompute,
)
from megatron.analysis.verification.recompute_linear import LINEAR
from megatron.analysis.verification.recorded_formats import Softmax
from megatron.tensor_record import PAIRWISE

_ROWS = 1024  #: number of result rows that are recomputed at a time
_FORWARD = ("query", "key", "value")
#: Operands from which each result of an operation is computed, by layer type.
OPERANDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "linear": LINEAR,
    "attention": {
        name: (*_FORWARD, "grad_output") if name.startswith("grad_") else _FORWARD
        for name in RESULTS
        if name not in PAIRWISE
    },
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Norms of the parts of a result's difference, divided by the norm of the result in A."""

    inherited: float = math.nan  #: part that follows from the operands
    local: float = math.nan  #: part that the operation adds
    unknown: str = ""  #: reason why the parts are unknown; otherwise empty

    @property
    def word(self) -> str:
        """Name of the larger part, or "" if the parts are unknown or there is no difference."""
        if self.unknown or not (self.inherited or self.local):
            return ""
        return "local" if self.local > self.inherited else "inherited"


class UnknownOriginError(Exception):
    """Error raised if the parts of a difference cannot be computed, with the reason as message."""


#: The operands or results of an operation in the runs A and B, by name.
Tensors = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


def of_linear(name: str, operands: Tensors, results: tuple[Tensor, Tensor]) -> Origin:
    """Return the origin of the difference of a linear layer's result.

    Args:
        name: name of the result, a key of `LINEAR`.
        operands: operands of the result in A and B.
        results: the result in A and in B.
    """
    (first_a, second_a), (first_b, second_b) = (
        [_matrix(tensors[operand]) for operand in LINEAR[name]] for tensors in operands
    )
    if name == "output":
        second_a, second_b = second_a.t(), second_b.t()
    if name == "grad_weight":
        first_a, first_b = first_a.t(), first_b.t()
    result_a, result_b = map(_matrix, results)
    shape = (first_a.shape[0], second_a.shape[1])
    if any(x.shape != shape for x in (result_a, result_b)) or first_a.shape != first_b.shape:
        raise UnknownOriginError("the operands do not fit the result")
    second_a, second_b = second_a.float(), second_b.float()
    second_delta = second_b - second_a
    parts = _Parts()
    for start in range(0, shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        a, b = first_a[rows].float(), first_b[rows].float()
        inherited = (b - a) @ second_b + a @ second_delta
        parts.add(result_a[rows], result_b[rows], inherited)
    return parts.origin()


def inherited_by_attention(
    operands: Tensors, softmax: Softmax, *, backward: bool
) -> dict[str, Tensor]:
    """Return the inherited differences of attention's results, in float32, by name.

    Heads and sequences are processed one group at a time, because the scores of all heads may not
    fit into memory.

    Args:
        operands: query, key, value and, for the gradients, grad_output in A and B.
        softmax: mask and scale.
        backward: whether to compute the gradients instead of the output.
    """
    formats = AttentionFormats(None, None, softmax)
    names = ("grad_query", "grad_key", "grad_value") if backward else ("output",)
    differences: dict[str, Tensor] = {}
    for tensors, sign in zip(operands, (-1.0, 1.0), strict=True):
        heads, groups = tensors["query"].shape[2], tensors["key"].shape[2]
        for batch, group, part in _groups(tensors):
            with torch.set_grad_enabled(backward):
                [results] = recompute([part], formats, [{}], backward=backward)
            queries = slice(group * heads // groups, (group + 1) * heads // groups)
            for name in names:
                of_query = name in ("output", "grad_query")
                value = results[name].detach()
                if name == "output":
                    value = torch.unflatten(value, -1, (heads // groups, -1))
                whole = (*value.shape[:1], tensors["query"].shape[1])
                size = (*whole, heads if of_query else groups, value.shape[-1])
                difference = differences.setdefault(name, torch.zeros(size))
                at = queries if of_query else slice(group, group + 1)
                difference[:, batch : batch + 1, at] += sign * value
    if "output" in differences:
        differences["output"] = differences["output"].flatten(-2)
    return differences


def _groups(tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """Yield the indices and float32 operands of each pair of a sequence and a group of heads."""
    query, key, value = (tensors[name] for name in _FORWARD)
    heads, groups = query.shape[2], key.shape[2]
    if heads % groups:
        raise UnknownOriginError(f"{heads} query heads do not fit {groups} key heads")
    each = heads // groups
    grad = tensors.get("grad_output")
    if grad is not None:
        grad = torch.unflatten(grad, -1, (heads, -1))
    for batch in range(query.shape[1]):
        for group in range(groups):
            of_heads = slice(group * each, (group + 1) * each)
            own = slice(group, group + 1)
            part = {
                "query": query[:, batch : batch + 1, of_heads].float(),
                "key": key[:, batch : batch + 1, own].float(),
                "value": value[:, batch : batch + 1, own].float(),
            }
            if grad is not None:
                part["grad_output"] = grad[:, batch : batch + 1, of_heads].flatten(-2).float()
            else:
                part["output"] = part["query"]  # placeholder: absent results are not recomputed
            yield batch, group, part


def of_attention(inherited: Tensor, results: tuple[Tensor, Tensor]) -> Origin:
    """Return the origin of the difference of a result of attention, given the inherited part."""
    if any(x.shape != inherited.shape for x in results):
        raise UnknownOriginError("the operands do not fit the result")
    parts = _Parts()
    for a, b, part in zip(*results, inherited, strict=True):
        parts.add(a, b, part)
    return parts.origin()


class _Parts:
    """Sums of squares of a result in A, and of the two parts of its difference."""

    def __init__(self) -> None:
        self._squares = [0.0, 0.0, 0.0]

    def add(self, a: Tensor, b: Tensor, inherited: Tensor) -> None:
        local = (b.double() - a.double()) - inherited.double()
        for number, x in enumerate((a, inherited, local)):
            self._squares[number] += square_of_norm(x)

    def origin(self) -> Origin:
        """Return the parts relative to the result in A.

        Raises:
            UnknownOriginError: if a value is NaN or Inf, or the result in A is zero.
        """
        if not all(map(math.isfinite, self._squares)):
            raise UnknownOriginError("NaN or Inf in an operand or result")
        norm, inherited, local = map(math.sqrt, self._squares)
        if not norm:
            raise UnknownOriginError("the result in A is zero")
        return Origin(inherited / norm, local / norm)


def _matrix(x: Tensor) -> Tensor:
    return x.flatten(0, -2)
