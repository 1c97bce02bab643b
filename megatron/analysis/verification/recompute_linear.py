"""Recomputes a linear layer's three GEMMs from its saved operands.

A result is first computed as the run computed it, in the operands' dtype: on the same machine it is
the same bit for bit. Another machine adds in another order. Then each value may differ from the
exact sum of its products by what any order can do to it,

    |saved - exact| <= gamma_K * sum |a||b| + u * |exact|,    gamma_K = K v / (1 - K v)

(Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), with v = 2^-24, half a unit
in the last place of the float32 that bf16, fp16 and float32 matmuls accumulate in, and u that of
the saved dtype, to which the sum is rounded once. A GPU that may reduce in bf16, or in TF32, needs
more: `slack` multiplies the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.analysis.dump.reassembly import bits
from megatron.analysis.verification.recorded_formats import NotCheckedError
from megatron.fake_quant.gemm import GemmFormats, Operand

#: Which operands each result of a linear layer follows from.
LINEAR = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
_ROWS = 1024  #: of a result at a time, in float64
_FLOAT32 = torch.finfo(torch.float32).eps / 2


@dataclass(frozen=True, slots=True)
class Recomputation:
    """How a saved result stands to the recomputed one."""

    exact: bool  #: the same in every bit
    excess: float = 0.0  #: the largest error as a multiple of what is allowed
    text: str = ""  #: the largest error in words, where it is not exact

    @property
    def wrong(self) -> bool:
        """Whether the error is beyond what is allowed; a NaN is."""
        return not self.exact and not self.excess <= 1


def linear(
    tensors: Mapping[str, Tensor],
    formats: GemmFormats,
    slack: float,
    codes: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Recomputation | NotCheckedError]]:
    """Each result that is there, checked; why not, where it cannot be.

    Args:
        tensors: by name.
        formats: what the operands went through.
        slack: see the module's docstring.
        codes: of each slot whose codes were saved, the values that they stand for.
    """
    for name, operands in LINEAR.items():
        if name not in tensors:
            continue
        try:
            if lost := [operand for operand in operands if operand not in tensors]:
                raise NotCheckedError(f"no {' and no '.join(lost)} to recompute it from")
            one, other = (tensors[operand].flatten(0, -2) for operand in operands)
            saved = tensors[name].flatten(0, -2)
            if not one.dtype == other.dtype == saved.dtype:
                raise NotCheckedError("operands and result have different dtypes")
            a, bt = _operands(name, one, other, formats, codes or {})
            yield name, _compare(saved, a, bt, formats if name != "output" else None, slack)
        except (NotCheckedError, RuntimeError, ValueError) as error:
            yield name, as_outcome(error)


def as_outcome(error: Exception) -> Recomputation | NotCheckedError:
    """A matmul that failed: why it was not checked, or operands whose shapes do not fit."""
    if isinstance(error, NotCheckedError):
        return error
    line = str(error).splitlines()[0]
    return Recomputation(exact=False, excess=torch.inf, text=f"its operands do not fit: {line}")


def _operands(
    name: str, one: Tensor, other: Tensor, formats: GemmFormats, codes: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The two factors of a result's GEMM, quantized: tokens T, input K, output N features."""

    def of(slot: str, x: Tensor, axis: int, *, fill: bool = False) -> Tensor:
        operand: Operand = getattr(formats, slot)
        return quantized(operand, x, axis, fill=fill, stored=codes.get(slot))

    straight = formats.straight_through
    if name == "output":
        return of("fprop_a", one, -1), of("fprop_b", other, -1).t()
    if name == "grad_input":
        slot, axis = ("fprop_b", -1) if straight else ("dgrad_b", -2)
        return of("dgrad_c", one, -1), of(slot, other, axis)
    slot, axis = ("fprop_a", -1) if straight else ("wgrad_a", -2)
    return of("wgrad_c", one, -2, fill=True).t(), of(slot, other, axis, fill=not straight)


def quantized(
    operand: Operand, x: Tensor, axis: int, *, fill: bool = False, stored: Tensor | None = None
) -> Tensor:
    """The operand as the GEMM saw it.

    Args:
        operand: what it went through.
        x: the saved tensor.
        axis: the reduction axis.
        fill: see `Operand.quantized`.
        stored: the values that its saved codes stand for. They are taken where the rounding was
            random, and must be those of `x` where it was not.

    Raises:
        NotCheckedError: it was rounded with random bits, and has no codes.
        ValueError: codes that are not those of the tensor.
    """
    if stored is None:
        check_not_random(operand)
        return operand.quantized(x, axis=axis, fill=fill)
    if is_random(operand):
        rotated = operand.rotated(x, axis=axis, fill=fill)
        if stored.shape != rotated.shape:
            raise ValueError(f"codes of shape {list(stored.shape)} for {list(rotated.shape)}")
        return stored
    again = operand.quantized(x, axis=axis, fill=fill)
    if not torch.equal(bits(again), bits(stored)):
        raise ValueError("the saved codes of an operand are not those of the saved tensor")
    return again


def is_random(operand: Operand) -> bool:
    """Whether it is rounded stochastically."""
    return operand.format is not None and operand.format.rounding == "stochastic"


def check_not_random(*operands: Operand) -> None:
    """Refuse stochastic rounding."""
    if any(map(is_random, operands)):
        raise NotCheckedError("stochastic rounding: no codes were saved (--collect-tensors codes)")


def _compare(
    saved: Tensor, a: Tensor, b: Tensor, formats: GemmFormats | None, slack: float
) -> Recomputation:
    """A saved result against A B; `formats` of a gradient, which may have to be rotated back."""
    if saved.shape != (a.shape[0], b.shape[1]):
        text = f"its operands give shape {[a.shape[0], b.shape[1]]}, but it has {list(saved.shape)}"
        return Recomputation(exact=False, excess=torch.inf, text=text)
    hadamard = None
    if formats is not None and formats.straight_through:
        hadamard = formats.fprop_a.hadamard
    again = torch.matmul(a, b)
    if hadamard is not None:
        again = hadamard.invert(again, -1)
    if torch.equal(bits(again), bits(saved)):
        return Recomputation(exact=True)
    worst = Recomputation(exact=False, excess=-1.0)
    wide_b = b.double()
    size_b = wide_b.abs()
    for start in range(0, len(saved), _ROWS):
        rows = slice(start, start + _ROWS)
        wide_a = a[rows].double()
        exact, size = wide_a @ wide_b, wide_a.abs() @ size_b
        gamma = a.shape[1] * _FLOAT32 / (1 - a.shape[1] * _FLOAT32)
        allowed = gamma * size
        if hadamard is not None:  # d terms more, after a rounding to the dtype
            allowed += torch.finfo(saved.dtype).eps * exact.abs()
            root = torch.tensor(float(hadamard.size)).sqrt().double()
            turn = hadamard.matrix().double().t() / root
            exact = (torch.unflatten(exact, -1, (-1, hadamard.size)) @ turn).flatten(-2)
            spread = torch.unflatten(allowed, -1, (-1, hadamard.size)).sum(-1, keepdim=True) / root
            allowed = spread.expand(-1, -1, hadamard.size).flatten(-2)
        found = worst_of(saved[rows], exact, slack * allowed, start)
        worst = max(worst, found, key=lambda each: each.excess)
    return worst


def worst_of(saved: Tensor, exact: Tensor, allowed: Tensor, start: int = 0) -> Recomputation:
    """The value farthest beyond what is allowed, besides one rounding to the saved dtype. Both
    float64; values that are not finite must be so on both sides.
    """
    info = torch.finfo(saved.dtype)
    allowed = allowed + info.eps / 2 * exact.abs() * 1.001 + info.tiny * info.eps
    error = (saved.double() - exact).abs() / allowed
    rounded = exact.to(saved.dtype)
    alike = (rounded.isnan() & saved.isnan()) | (rounded == saved)
    error = torch.where(alike, 0.0, error).nan_to_num(nan=torch.inf)
    if not error.numel():
        return Recomputation(exact=False)
    at = int(error.argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(at), error.shape)]
    place[0] += start
    value, should = saved.flatten()[at].item(), exact.flatten()[at].item()
    text = (
        f"at {place} it is {value:.6g}, recomputed {should:.6g}, "
        f"{error.flatten()[at].item():.3g} times what rounding allows"
    )
    return Recomputation(exact=False, excess=error.flatten()[at].item(), text=text)
