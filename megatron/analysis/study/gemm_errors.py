"""Quantize the operands of a matmul, multiply them, and measure the errors of the products.

The products are those of `quantized_matmul`, so they are bit for bit those of a run that multiplies
the same operands in the same formats. The reference is the product of the saved operands,
accumulated and stored in float32; the sums over its values are accumulated in float64. For a result
Y with the reference X and the error E = Y - X, with norms over all values:

    relative_error   ||E|| / ||X||
    sqnr_db          -20 log10(relative_error)
    gain             sum(X Y) / sum(X²) - 1
    cosine           sum(X Y) / (||X|| ||Y||)
    mean_error       mean(E) / rms(X)
    gradient_to_noise  ||X|| / ||E|| of the results that are gradients; see `gradients.py`
    bias, variance   relative_error² = bias² + variance

If X is zero, all of them are NaN if E is zero too; otherwise, the relative error is infinite.

The bias is the relative error of the mean result over all draws of the random numbers, and the
variance is the expected squared distance from this mean, divided by ||X||². If rounding is
deterministic, every draw is the same: the variance is 0, and the bias is the relative error. If it
is stochastic, R draws estimate the variance without bias by S² = sum ||Y_r - mean||² / (R - 1) /
||X||², and bias² by relative_error² - S², which is set to 0 if the estimate is negative.

The budget of a GEMM quantizes one operand and leaves the other one as it is. A GEMM has two
operands, so "all but one" is the error of the other operand alone. All errors of the budget are
squared relative errors:

    alone            only this operand is quantized
    others           all operands but this one are quantized
    together         both operands are quantized
    interaction      together minus the sum of both errors alone
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron.analysis.stats.errors import decibels
from megatron.analysis.stats.kernels.product_errors import (
    COUNT,
    EE,
    NONFINITE,
    XE,
    XX,
    E,
    product_error_sums,
)
from megatron.analysis.study.candidates import Candidate, describe, operand_bits
from megatron.analysis.study.gemm_results import (
    SIDES,
    SeparateGemm,
    independent,
    only,
    references,
    results,
)
from megatron.analysis.study.operands import Matmul
from megatron.fake_quant.gradient_rule import gradient_to_noise
from megatron.fake_quant.matmul.gemm_formats import SLOTS, GemmFormats
from megatron.fake_quant.quant_type import DEFAULT_TYPE
from megatron.fake_quant.random_bits import derive_seed
from megatron.fake_quant.recipe.operands import GEMMS

Row = dict[str, Any]
Numbers = dict[str, float]  #: error metrics by column
#: Last columns of the table of errors and of the table of budgets.
_SHARED = ("accumulator", "run_id", "quant_type", "micro_batch", "rank")
#: To measure operands alone, one of these sets of slots is quantized at a time. The numbers are the
#: positions (0 or 1) of the quantized operand in each GEMM. Both slots of a forward operand are in
#: the same set, because some formats of the backward pass require that the forward pass quantizes
#: the same tensor.
_ALONE = (
    (("fprop_a", "dgrad_c", "wgrad_a"), (0, 0, 1)),
    (("fprop_b", "dgrad_b", "wgrad_c"), (1, 1, 0)),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a study that apply to all matmuls."""

    num_layers: int
    draws: int = 4  #: number of random draws for formats that use random numbers
    budget: bool = True  #: True to measure the error of each operand alone


def errors_of(
    matmul: Matmul, candidates: Sequence[Candidate], settings: Settings
) -> Iterator[tuple[Candidate, list[Row], list[Row]]]:
    """Yield each candidate with its rows in the table of errors and in the table of budgets.

    There is one row per GEMM in the first table, and one per operand of a GEMM in the second. The
    PV matmul of a candidate that computes attention in tiles has no rows, because its operands
    depend on the tiles before them.
    """
    reference = references(matmul)
    for candidate in candidates:
        formats = candidate.formats(
            matmul.operation,
            matmul.row.module,
            int(matmul.row.layer_idx),
            num_layers=settings.num_layers,
            iteration=int(matmul.row.iteration),
        )
        if formats.tiling is not None:
            yield candidate, [], []
            continue
        yield candidate, *_of_formats(matmul, candidate, formats, reference, settings=settings)


def _of_formats(
    matmul: Matmul,
    candidate: Candidate,
    formats: GemmFormats,
    reference: Sequence[Tensor],
    *,
    settings: Settings,
) -> tuple[list[Row], list[Row]]:
    """Return the rows of one candidate; see `errors_of`."""
    row = matmul.row
    seed = derive_seed("study", row.module, matmul.operation, int(row.iteration), row.micro_batch)
    measured, alone = _measured(matmul, formats, reference, seed, settings=settings)
    place = {
        "iteration": int(row.iteration),
        "layer_idx": int(row.layer_idx),
        "module": row.module,
        "operation": matmul.operation,
    }
    more = {
        "accumulator": candidate.accumulator.name if candidate.accumulator else None,
        "run_id": row.run_id,
        "quant_type": row.quant_type,
        "micro_batch": int(row.micro_batch),
        "rank": int(row.rank),
    }
    gemms = list(GEMMS[matmul.operation].items())[: len(reference)]
    sizes = [_size(matmul, formats, index) for index in range(len(SIDES))]
    whole = _Size(sum(each.values for each in sizes), sum(each.bits for each in sizes))
    rows = []
    for index, ((gemm, _), numbers) in enumerate(zip(gemms, measured, strict=True)):
        of_format = {
            "gemm": gemm,
            "format": _format_name(candidate, formats, index),
            "recipe": None if candidate.recipe is None else candidate.name,
        }
        error = numbers["relative_error"] if not numbers["nonfinite"] else math.nan
        spoiled = int((~reference[index].isfinite()).sum()) if numbers["nonfinite"] else 0
        sizes_and_rule = {
            "bits": sizes[index].bits / sizes[index].values,
            "values": sizes[index].values,
            "matmul_bits": whole.bits / whole.values,
            "matmul_values": whole.values,
            "reference_nonfinite": spoiled,
            "gradient_to_noise": gradient_to_noise(error) if index else math.nan,
        }
        rows.append(place | of_format | numbers | sizes_and_rule | more)
    budgets = [
        budget
        for row_of_gemm, (_, names), of_operands in zip(rows, gemms, alone, strict=False)
        for budget in _budgets(row_of_gemm, names, of_operands)
    ]
    return rows, budgets


def _format_name(candidate: Candidate, formats: GemmFormats, index: int) -> str:
    """Return the text that the table shows as the format of a GEMM's operands."""
    if candidate.recipe is not None:
        return describe(formats, index)
    return DEFAULT_TYPE if candidate.format is None else candidate.format.name


def _measured(
    matmul: Matmul,
    formats: GemmFormats,
    reference: Sequence[Tensor],
    seed: int,
    *,
    settings: Settings,
) -> tuple[list[Numbers], list[list[float]]]:
    """Return the error metrics of each GEMM, and its errors if only one operand is quantized.

    The former are columns of the table; the latter are squared relative errors, one per operand.
    """
    draws = settings.draws if formats.random else 1
    if not independent(formats):
        return _measured_by_run(matmul, formats, reference, seed, draws, budget=settings.budget)
    numbers, alone = [], []
    for index, exact in enumerate(reference):
        gemm = SeparateGemm(matmul, formats, index)
        total = _Draws(exact)
        for draw in range(draws):
            budget = settings.budget and draw == 0  # operands alone: one draw
            products = gemm.products(derive_seed(seed, draw), budget=budget)
            whole = next(products)
            of_whole = product_error_sums(whole, exact)
            if budget:
                sums = (of_whole if y is whole else product_error_sums(y, exact) for y in products)
                alone.append([_squared(each) for each in sums])
            total.add(whole, of_whole, keep=draws > 1)
        numbers.append(total.numbers())
    return numbers, alone


def _measured_by_run(
    matmul: Matmul,
    formats: GemmFormats,
    reference: Sequence[Tensor],
    seed: int,
    draws: int,
    *,
    budget: bool,
) -> tuple[list[Numbers], list[list[float]]]:
    """Return what `_measured` returns, but compute it in whole forward and backward passes."""
    totals = [_Draws(exact) for exact in reference]
    for draw in range(draws):
        drawn = results(matmul, formats, seed=derive_seed(seed, draw))
        for total, y, exact in zip(totals, drawn, reference, strict=True):
            total.add(y, product_error_sums(y, exact), keep=draws > 1)
        del drawn
    numbers = [total.numbers() for total in totals]
    alone = _alone(matmul, formats, reference, seed) if budget else []
    return numbers, alone


class _Draws:
    """Sums of the errors of a GEMM's results over all draws, and the sum of the results."""

    def __init__(self, exact: Tensor):
        self._exact = exact
        self._count = 0
        self._sums = np.zeros(0)
        self._total: Tensor | None = None

    def add(self, result: Tensor, sums: NDArray[np.float64], *, keep: bool) -> None:
        """Add the result of one draw; `keep` is true if there are several draws."""
        self._count += 1
        self._sums = sums if self._count == 1 else self._sums + sums
        if keep:
            wide = result.float()
            self._total = wide if self._total is None else self._total.add_(wide)

    def numbers(self) -> Numbers:
        """Return the error metrics over all draws."""
        if self._total is None:
            return numbers_of(self._sums)
        of_mean = product_error_sums(self._total.div_(self._count), self._exact)
        return numbers_of(self._sums / self._count, of_mean=of_mean, draws=self._count)


def _squared(sums: NDArray[np.float64]) -> float:
    """Return the squared relative error of a GEMM result, or Inf if the result has NaN or Inf."""
    xx, ee = float(sums[XX]), float(sums[EE])
    if sums[NONFINITE]:
        return math.inf
    return ee / xx if xx else math.inf if ee else math.nan


def numbers_of(
    sums: NDArray[np.float64], *, of_mean: NDArray[np.float64] | None = None, draws: int = 1
) -> Numbers:
    """Return the error metrics for sums from `product_error_sums`; see the module's docstring.

    Args:
        sums: sums of one draw, or the mean of the sums of all draws.
        of_mean: sums of the mean result over all draws; None if there is only one draw.
        draws: number of draws.
    """
    count, xx, xe, ee, e, lost = (float(sums[i]) for i in (COUNT, XX, XE, EE, E, NONFINITE))
    squared = ee / xx if xx else math.inf if ee else math.nan
    variance = 0.0 if not math.isnan(squared) else math.nan
    if of_mean is not None and xx:
        variance = max(ee - float(of_mean[EE]), 0.0) / xx * draws / (draws - 1)
    yy = xx + 2 * xe + ee
    return {
        "sqnr_db": decibels(xx, ee) if xx or ee else math.nan,
        "gain": xe / xx if xx else math.nan,
        "relative_error": math.sqrt(squared),
        "bias": math.nan if math.isnan(squared) else math.sqrt(max(squared - variance, 0.0)),
        "variance": variance,
        "cosine": (xx + xe) / math.sqrt(xx * yy) if xx * yy > 0 else math.nan,
        "mean_error": e / count / math.sqrt(xx / count) if xx else math.nan,
        "nonfinite": math.ceil(lost),
    }


def _alone(
    matmul: Matmul, formats: GemmFormats, reference: Sequence[Tensor], seed: int
) -> list[list[float]]:
    """Return the squared relative error of each GEMM if only one of its operands is quantized."""
    alone = [[math.nan, math.nan] for _ in reference]
    for slots, operands in _ALONE:
        part = only(formats, slots)
        drawn = results(matmul, part, seed=derive_seed(seed, 0))
        for index, (y, x) in enumerate(zip(drawn, reference, strict=True)):
            alone[index][operands[index]] = _squared(product_error_sums(y, x))
    return alone


def _budgets(row: Mapping[str, Any], names: Sequence[str], alone: Sequence[float]) -> list[Row]:
    """Return a GEMM's rows in the table of budgets; `row` is its row in the table of errors."""
    place = dict(itertools.islice(row.items(), 5))
    together = math.inf if row["nonfinite"] else row["relative_error"] ** 2
    if row["reference_nonfinite"]:  # the saved operands are the cause, not the format
        together, alone = math.nan, [math.nan] * len(alone)
    rest = {name: row[name] for name in _SHARED}
    return [
        place
        | {
            "operand": name,
            "format": row["format"],
            "recipe": row["recipe"],
            "alone": alone[index],
            "others": alone[1 - index],
            "together": together,
            "interaction": together - alone[0] - alone[1],
        }
        | rest
        for index, name in enumerate(names)
    ]


@dataclass(frozen=True, slots=True)
class _Size:
    """Size of the operands of a GEMM, or of all GEMMs of a matmul."""

    values: int
    bits: float  #: number of bits of all values, scales included


def _size(matmul: Matmul, formats: GemmFormats, index: int) -> _Size:
    """Return the size of both operands of GEMM `index`, whether or not its operands were saved."""
    batch = math.prod(matmul.a.shape[:-2])
    axes = {"M": matmul.a.shape[-2], "N": matmul.b.shape[-2], "K": matmul.a.shape[-1]}
    shapes = {"a": ("M", "K"), "b": ("N", "K"), "c": ("M", "N")}
    total = _Size(0, 0.0)
    for (name, axis), slot in zip(SIDES[index], SLOTS[2 * index : 2 * index + 2], strict=True):
        columns, rows = (axes[shapes[name][each]] for each in (axis, -3 - axis))
        values = batch * rows * columns
        bits = operand_bits(formats.effective(slot), rows, columns, matmul.a.dtype)
        total = _Size(total.values + values, total.bits + values * bits)
    return total
