"""Recompute a linear layer's three GEMMs from its saved operands.

A result is first recomputed as in the run, in the dtype of the operands. On the same machine, it is
bit-identical. Another machine may sum in a different order. In this case, the difference between
each value and the exact sum of its products must stay within a bound that holds for every order of
summation:

    |saved - exact| <= gamma_K * sum |a||b| + u * |exact|,    gamma_K = K v / (1 - K v)

(Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Matmuls of bf16, fp16 and
float32 tensors accumulate in float32, so v = 2^-24, half a unit in the last place. The sum is
rounded once to the dtype of the saved result, and u is half a unit in the last place of this dtype.
A GPU that reduces in bf16 or TF32 deviates more; in this case, `slack` increases the bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron import cpu_matmul
from megatron.analysis.dump.reassembly import bits
from megatron.analysis.verification.recorded_formats import NotCheckedError
from megatron.fake_quant.accumulate.product import accumulated_product
from megatron.fake_quant.accumulate.unit_matrix import unit_matrix, unit_matrix_of_codes
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.gemm_formats import AXES, GEMM_SLOTS, OF_FORWARD, GemmFormats
from megatron.fake_quant.matmul.mean_split import SplitMatrix, with_means
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.matmul.products import multiply
from megatron.fake_quant.matmul.unrounded import unpacked_parts
from megatron.fake_quant.packing import QuantizedTensor

#: Operands from which each result of a linear layer is computed.
LINEAR = {
    "output": ("input", "weight"),
    "grad_input": ("grad_output", "weight"),
    "grad_weight": ("grad_output", "input"),
}
GEMM_OF = {"output": "fprop", "grad_input": "dgrad", "grad_weight": "wgrad"}
_ROWS = 1024  #: number of result rows that are recomputed in float64 at a time
_FLOAT32 = torch.finfo(torch.float32).eps / 2  #: unit roundoff of float32, 2^-24


@dataclass(frozen=True, slots=True)
class Recomputation:
    """Comparison of a saved result with its recomputation."""

    exact: bool  #: True if the saved and recomputed results are bit-identical
    excess: float = 0.0  #: largest ratio of deviation to allowed deviation
    text: str = ""  #: description of the deviation; empty if the result is exact

    @property
    def wrong(self) -> bool:
        """True if the deviation is NaN or exceeds the allowed deviation."""
        return not self.exact and not self.excess <= 1


#: Comparison of a result with its recomputation, or the reason why it was not checked.
Outcome = Recomputation | NotCheckedError


def linear(
    tensors: Mapping[str, Tensor],
    formats: GemmFormats,
    slack: float,
    *,
    codes: Mapping[str, QuantizedTensor] | None = None,
    amaxes: Mapping[str, float] | None = None,
) -> Iterator[tuple[str, Outcome]]:
    """Check each saved result of a linear layer, and yield its name and outcome.

    Args:
        tensors: operands and results by name.
        formats: formats of the operands in the run.
        slack: factor by which the allowed deviation is multiplied.
        codes: operands whose codes were saved, by slot.
        amaxes: recorded amaxes of the operands; see `amax_of`.
    """
    for name, operands in LINEAR.items():
        if name not in tensors:
            continue
        try:
            if lost := [operand for operand in operands if operand not in tensors]:
                raise NotCheckedError(f"no {' and no '.join(lost)} to recompute the result from")
            first, second = (tensors[operand].flatten(0, -2) for operand in operands)
            saved = tensors[name].flatten(0, -2)
            if not first.dtype == second.dtype == saved.dtype:
                raise NotCheckedError("operands and result have different dtypes")
            recorded = _Recorded(formats, codes or {}, amaxes or {}, saved.dtype)
            if formats.simulated_accumulator(GEMM_OF[name]) is not None:
                yield name, _accumulated(saved, name, (first, second), recorded)
                continue
            a, b = _operands(name, first, second, recorded)
            yield name, _compare(saved, a, b, formats if name != "output" else None, slack)
        except (NotCheckedError, RuntimeError, ValueError) as error:
            yield name, as_outcome(error)


def as_outcome(error: Exception) -> Outcome:
    """Return the outcome for a matmul whose recomputation raised `error`.

    The outcome is `error` itself if it is a `NotCheckedError`. Otherwise, it is a `Recomputation`
    that reports operands that do not fit together.
    """
    if isinstance(error, NotCheckedError):
        return error
    line = str(error).splitlines()[0]
    return Recomputation(exact=False, excess=torch.inf, text=f"its operands do not fit: {line}")


@dataclass(frozen=True, slots=True)
class _Recorded:
    """Recorded properties of the operands of a linear layer; see `linear`."""

    formats: GemmFormats
    codes: Mapping[str, QuantizedTensor]
    amaxes: Mapping[str, float]
    dtype: torch.dtype

    def prepared(self, slot: str, x: Tensor, axis: int, *, fill: bool = False) -> Tensor:
        """Return the tensor that is quantized as operand `slot`, given the saved tensor `x`."""
        operand: Operand = getattr(self.formats, slot)
        if operand.source == "dequantized":
            forward = OF_FORWARD[slot]
            copy = self.quantized(forward, x, -1).dense()
            x = getattr(self.formats, forward).rotated_back(copy)
        return operand.prepared(x, axis=axis, fill=fill).values

    def quantized(self, slot: str, x: Tensor, axis: int, *, fill: bool = False) -> SplitMatrix:
        """Return the quantized values of the operand `slot`, given the saved tensor `x`."""
        operand: Operand = getattr(self.formats, slot)
        if operand.source == "dequantized":
            forward = OF_FORWARD[slot]
            copy, transform = self.quantized(forward, x, -1), getattr(self.formats, forward)
            if not (operand.changes_values or transform.hadamard is not None):
                return copy.joined()
            x = transform.rotated_back(copy.dense())
        amax, stored = amax_of(operand.format, self.amaxes, f"linear_{slot}"), self.codes.get(slot)
        return quantized(operand, x, axis, fill=fill, stored=stored, amax=amax, dtype=self.dtype)


def _accumulated(
    saved: Tensor, name: str, operands: tuple[Tensor, Tensor], recorded: _Recorded
) -> Recomputation:
    """Compare a saved result with the product that is recomputed with the accumulator of its GEMM.

    The accumulator defines the order of summation, so results are bit-identical on every machine.
    """
    gemm = GEMM_OF[name]
    accumulator, parts = recorded.formats.accumulators[gemm], []
    for slot, x, axis in zip(GEMM_SLOTS[gemm], operands, AXES[gemm], strict=True):
        operand: Operand = getattr(recorded.formats, slot)
        # This call also compares the saved codes, if any, with `x`. An operand that is a copy of a
        # forward operand may have no format of its own, and thus no codes.
        matrix = recorded.quantized(slot, x, axis, fill=gemm == "wgrad")
        stored = recorded.codes.get(slot)
        if stored is not None:
            parts.append(unit_matrix_of_codes(stored, accumulator))
        elif operand.format is None:
            parts.append(unit_matrix(matrix.values, None, axis, accumulator))
        else:
            x = recorded.prepared(slot, x, axis, fill=gemm == "wgrad")
            amax = amax_of(operand.format, recorded.amaxes, f"linear_{slot}")
            parts.append(unit_matrix(x, operand.format, axis, accumulator, amax=amax))
    again = accumulated_product(parts[0], parts[1], accumulator, 1.0).to(saved.dtype)
    if torch.equal(bits(again), bits(saved)):
        return Recomputation(exact=True)
    differ = int((bits(again) != bits(saved)).sum()) if again.shape == saved.shape else "all"
    text = f"{differ} values differ from the sums of products in {accumulator.name}"
    return Recomputation(exact=False, excess=torch.inf, text=text)


def _operands(
    name: str, first: Tensor, second: Tensor, recorded: _Recorded
) -> tuple[SplitMatrix, SplitMatrix]:
    """Return the two quantized operands of the GEMM that computes a result.

    Args:
        name: name of the result.
        first: the first operand of the result in `LINEAR`.
        second: the second operand of the result in `LINEAR`.
        recorded: formats, codes and amaxes of the operands in the run.
    """
    formats, of = recorded.formats, recorded.quantized
    straight = formats.straight_through
    if name == "output":
        return of("fprop_a", first, -1), of("fprop_b", second, -1).t()
    gradient = (
        of("dgrad_c", first, -1)
        if name == "grad_input"
        else of("wgrad_c", first, -2, fill=True).t()
    )
    # a straight-through backward pass multiplies the gradient by a quantized operand of the forward
    # pass; if the mean of the operand's rows was split off, it is added back first
    if straight:
        slot = "fprop_b" if name == "grad_input" else "fprop_a"
        return gradient, of(slot, second, -1).joined()
    if name == "grad_input":
        return gradient, of("dgrad_b", second, -2)
    return gradient, of("wgrad_a", second, -2, fill=True)


def amax_of(fmt: Format | None, amaxes: Mapping[str, float], name: str) -> Tensor | None:
    """Return the recorded amax of an operand; None if the scale follows from the operand's values.

    Args:
        fmt: format of the operand.
        amaxes: the field `amax` of the records.
        name: operation and slot of the operand, as in `linear_fprop_a`.

    Raises:
        NotCheckedError: if the scale follows from another amax, which was not recorded.
    """
    if fmt is None or fmt.amax_source == "own":
        return None
    if name not in amaxes:
        raise NotCheckedError(f"a scale from a {fmt.amax_source} amax that was not recorded")
    return torch.tensor(amaxes[name], dtype=torch.float32)


def quantized(
    operand: Operand,
    x: Tensor,
    axis: int,
    *,
    fill: bool = False,
    stored: QuantizedTensor | None = None,
    amax: Tensor | None = None,
    dtype: torch.dtype,
) -> SplitMatrix:
    """Return the quantized values of an operand, as the GEMM of the run used them.

    Args:
        operand: format and transform of the operand.
        x: the saved tensor.
        axis: reduction axis.
        fill: whether to pad the axis for the transform; see `Operand.quantized`.
        stored: saved codes, if any. If the operand was rounded stochastically, their values are
            returned. Otherwise, the values must equal the quantized `x`.
        amax: number from which the scale of the whole tensor was computed, as from `amax_of`.
        dtype: dtype of the tensors that the GEMM multiplied.

    Raises:
        NotCheckedError: if the operand was rounded stochastically and no codes were saved, or if
            the random signs of its transform are not recorded.
        ValueError: if the codes do not belong to the tensor.
    """
    if stored is None:
        check_not_random(operand)
        return operand.quantized(x, axis=axis, fill=fill, amax=amax, dtype=dtype)
    values = unpacked_parts(stored, dtype)
    if is_random(operand):
        parts = operand.prepared(x, axis=axis, fill=fill)
        if stored.shape != parts.values.shape:
            raise ValueError(f"codes of shape {list(stored.shape)} for {list(parts.values.shape)}")
        return parts._replace(values=values.values, scale=values.scale, dtype=dtype)
    again = operand.quantized(x, axis=axis, fill=fill, amax=amax, dtype=dtype)
    if not torch.equal(bits(again._replace(column=None).dense()), bits(values.dense())):
        raise ValueError("the saved codes of an operand are not those of the saved tensor")
    return again


def is_random(operand: Operand) -> bool:
    """Return whether an operand is rounded stochastically."""
    return operand.format is not None and operand.format.stochastic


def check_not_random(
    *operands: Operand, why: str = "no codes were saved (--collect-tensors codes)"
) -> None:
    """Raise `NotCheckedError`, with the reason `why`, if rounding or Hadamard signs are random."""
    if any(map(is_random, operands)):
        raise NotCheckedError(f"stochastic rounding: {why}")
    if any(operand.hadamard is not None and operand.hadamard.random for operand in operands):
        raise NotCheckedError(f"random Hadamard signs: {why}")


def _compare(
    saved: Tensor, a: SplitMatrix, b: SplitMatrix, formats: GemmFormats | None, slack: float
) -> Recomputation:
    """Compare a saved result with the product of its two operands.

    Args:
        saved: the saved result.
        a: the first operand, as returned by `_operands`.
        b: the second operand, as returned by `_operands`.
        formats: formats of the matmul if the result is a gradient, otherwise None. In a
            straight-through pass with a Hadamard transform, the inverse transform is applied to
            the product.
        slack: factor by which the allowed deviation is multiplied.
    """
    shape = [a.values.shape[0], b.values.shape[1]]
    if list(saved.shape) != shape:
        text = f"its shape is {list(saved.shape)}, but that of its recomputation is {shape}"
        return Recomputation(exact=False, excess=torch.inf, text=text)
    hadamard = None
    if formats is not None and formats.straight_through:
        hadamard = formats.fprop_a.hadamard
    product = multiply(a, b, 1.0, lambda left, right, _: cpu_matmul.matmul(left, right))
    again = with_means(product, a, b, 1.0)
    if hadamard is not None:
        again = hadamard.invert(again, -1)
    if torch.equal(bits(again), bits(saved)):
        return Recomputation(exact=True)
    worst = Recomputation(exact=False, excess=-1.0)
    wide_b, size_b = _wide(b, slice(None))
    length = a.values.shape[1]
    gamma = length * _FLOAT32 / (1 - length * _FLOAT32)
    # if the mean of an operand's rows was split off, the product without the mean is rounded before
    # the terms with the mean are added
    if a.row is not None or b.row is not None:
        gamma += torch.finfo(saved.dtype).eps / 2
    for start in range(0, len(saved), _ROWS):
        rows = slice(start, start + _ROWS)
        wide_a, size_a = _wide(a, rows)
        exact, allowed = wide_a @ wide_b, gamma * (size_a @ size_b)
        if hadamard is not None:
            # the inverse Hadamard transform adds `hadamard.size` values, each rounded to the saved
            # dtype
            allowed += torch.finfo(saved.dtype).eps * exact.abs()
            root = torch.tensor(float(hadamard.size)).sqrt().double()
            turn = hadamard.matrix().double().t() / root
            exact = (torch.unflatten(exact, -1, (-1, hadamard.size)) @ turn).flatten(-2)
            spread = torch.unflatten(allowed, -1, (-1, hadamard.size)).sum(-1, keepdim=True) / root
            allowed = spread.expand(-1, -1, hadamard.size).flatten(-2)
        worst_of_rows = worst_of(saved[rows], exact, slack * allowed, start)
        worst = max(worst, worst_of_rows, key=lambda comparison: comparison.excess)
    return worst


def _wide(matrix: SplitMatrix, rows: slice) -> tuple[Tensor, Tensor]:
    """Return rows of an operand in float64, and upper bounds on their magnitudes.

    If the mean of its rows was split off, an operand is the sum of two terms, and the bounds are
    the sums of the magnitudes of both terms. Otherwise, the bounds are the magnitudes themselves.
    """
    scale = 1.0 if matrix.scale is None else matrix.scale.double()
    if isinstance(scale, Tensor) and scale.dim() and scale.shape[0] > 1:
        scale = scale[rows]
    values = matrix.values[rows].double() * scale
    if matrix.column is None or matrix.row is None:
        return values, values.abs()
    mean = matrix.column[rows].double() * matrix.row.double()
    return values + mean, values.abs() + mean.abs()


def worst_of(saved: Tensor, exact: Tensor, allowed: Tensor, start: int = 0) -> Recomputation:
    """Find and describe the value with the largest ratio of deviation to allowed deviation.

    One rounding to the saved dtype is allowed in addition to `allowed`. Values that are not finite
    must be the same in `saved` and `exact`.

    Args:
        saved: saved values.
        exact: exact values in float64.
        allowed: allowed deviations in float64.
        start: index of the first row in the whole result, for the message.
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
        f"the value at {place} is {value:.6g} instead of {should:.6g}, an error of "
        f"{error.flatten()[at].item():.3g} times what rounding allows"
    )
    return Recomputation(exact=False, excess=error.flatten()[at].item(), text=text)
