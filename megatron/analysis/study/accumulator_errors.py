"""Multiply the operands of a dump as matrix units do, and measure the errors of the sums.

Each GEMM is computed three times: from the saved operands (X), exactly from the quantized operands
(Q, in float64), and from the quantized operands by the simulated unit (Y). The error of the
accumulator is Y - Q, that of the format is Q - X, and that of both is Y - X. No result is rounded
to the dtype of the tensors, which would hide the errors of most accumulators.

    relative_error, gain         error of the accumulator: ||Y - Q|| / ||Q||, sum(Q Y) / sum(Q²) - 1
    toward_zero                  share of the wrong values of Y that are smaller in magnitude than Q
    p01, p05, ..., p99           quantiles of Y - Q over all positions, divided by the rms of Q
    rows_1, ..., rows_4          relative errors of the first to the last quarter of the rows
    columns_1, ..., columns_4    the same for the columns
    format_error, format_gain    relative error and gain of Q against X
    total_error, total_gain      relative error and gain of Y against X
    nonfinite                    positions where Y or Q is NaN or Inf, which no other column counts

The rows of linear layers and of attention are tokens in fprop and dgrad (`grad_query`,
`grad_probs`); the columns of `grad_value` and the rows of `grad_key` are tokens, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from megatron.analysis.dump.tensor_files import Problem, UnreadableTensorError
from megatron.analysis.progress import with_progress
from megatron.analysis.store import TensorStore
from megatron.analysis.study.candidates import HIGH_PRECISION, Candidate, fitting_pairs
from megatron.analysis.study.gemm_errors import Row
from megatron.analysis.study.gemm_results import SIDES, references
from megatron.analysis.study.operands import Matmul, matmuls
from megatron.analysis.study.passes import Pass, beyond_memory, counted, find_passes
from megatron.analysis.verification.recorded_formats import NotCheckedError
from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.product import accumulated_product
from megatron.fake_quant.accumulate.unit_matrix import UnitMatrix, unit_matrix
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.gemm_formats import GEMM_SLOTS, GemmFormats
from megatron.fake_quant.quant_type import gemm_formats
from megatron.fake_quant.quantize import fake_quantize
from megatron.fake_quant.random_bits import derive_seed
from megatron.fake_quant.recipe.operands import GEMMS

#: Quantiles of the errors over the positions of a result.
QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
QUARTERS = 4  #: number of parts into which the rows and the columns are divided


@dataclass
class AccumulatorStudy:
    """Result of a study of accumulators."""

    rows: pd.DataFrame  #: one row per GEMM, format and accumulator
    problems: list[Problem] = field(default_factory=list)  #: files that could not be read
    left_out: Counter[str] = field(
        default_factory=Counter
    )  #: count of passes or pairs without results, by reason


def study_accumulators(
    store: TensorStore,
    candidates: Sequence[Candidate],
    accumulators: Sequence[str],
    *,
    select: pd.DataFrame | None = None,
    max_memory: int | None = None,
    progress: bool = False,
) -> AccumulatorStudy:
    """Study the errors of accumulators in the matmuls of a dump.

    Passes are measured one after the other, because the kernels use all processors.

    Args:
        candidates: formats of the operands; other candidates have no rows.
        accumulators: names of accumulators, each measured with all formats that the unit
            multiplies.
        select: subset of `store.records`; None selects all records.
        max_memory: passes that need more bytes are left out; None means no limit.
        progress: whether to report the progress on stderr.

    Raises:
        ValueError: if an accumulator is unknown or multiplies none of the formats, or if the
            selection contains no pass through a matmul.
    """
    result = AccumulatorStudy(pd.DataFrame())
    bare = {
        each.format: each for each in candidates if each.recipe is None and each.accumulator is None
    }
    fitting, misfits = fitting_pairs(list(bare), accumulators)
    pairs = [(bare[fmt], accumulator) for fmt, accumulator in fitting]
    result.left_out.update(f"pairs of a format and an accumulator: {reason}" for reason in misfits)
    found = find_passes(store, store.records if select is None else select)
    if not found.passes:
        raise ValueError(f"no operands of a matmul in {store.folder}")
    result.left_out.update(found.left_out)
    rows: list[Row] = []
    failures: list[tuple[str, str]] = []
    shown_passes = with_progress(found.passes, "Studying accumulators", "pass", shown=progress)
    for of_pass in shown_passes:
        if max_memory is not None and of_pass.nbytes > max_memory:
            result.left_out[beyond_memory(max_memory)] += 1
            continue
        try:
            rows += _rows_of_pass(of_pass, store, pairs, result)
        except (NotCheckedError, ValueError) as error:
            failures.append((str(error).partition("\n")[0], of_pass.place))
    result.left_out.update(counted(failures))
    result.rows = pd.DataFrame(rows)
    return result


def _formats(operation: str, fmt: Format | None) -> GemmFormats:
    return HIGH_PRECISION if fmt is None else gemm_formats(operation, fmt)


def _rows_of_pass(
    of_pass: Pass,
    store: TensorStore,
    pairs: Sequence[tuple[Candidate, Accumulator]],
    result: AccumulatorStudy,
) -> list[Row]:
    """Return the rows of a pass; note in `result` which files cannot be read.

    Raises:
        NotCheckedError, ValueError: if the matmuls of the pass cannot be computed.
    """
    rows: list[Row] = []
    try:
        for matmul in matmuls(of_pass, store.load):
            rows += accumulator_rows(matmul, pairs)
    except UnreadableTensorError as error:
        result.problems.append(Problem(Path(str(error).partition(": ")[0]), error.why))
    except FileNotFoundError as error:
        result.problems.append(Problem(Path(str(error.filename)), "removed while the study ran"))
    return rows


def accumulator_rows(
    matmul: Matmul, pairs: Sequence[tuple[Candidate, Accumulator]]
) -> Iterator[Row]:
    """Yield one row for each GEMM of a matmul and each pair of candidate and accumulator."""
    row = matmul.row
    place = {
        "iteration": int(row.iteration),
        "layer_idx": int(row.layer_idx),
        "module": row.module,
        "operation": matmul.operation,
    }
    of_run = {
        "run_id": row.run_id,
        "micro_batch": int(row.micro_batch),
        "rank": int(row.rank),
    }
    seed = derive_seed("study", row.module, matmul.operation, int(row.iteration), row.micro_batch)
    products = references(matmul)
    for index, (gemm, reference) in enumerate(zip(GEMMS[matmul.operation], products, strict=False)):
        for candidate, accumulator in pairs:
            summed, exact, terms = _products(matmul, index, candidate, accumulator, seed)
            names = {"gemm": gemm, "format": candidate.name, "accumulator": accumulator.name}
            yield place | names | {"terms": terms} | errors(summed, exact, reference) | of_run


def _products(
    matmul: Matmul, index: int, candidate: Candidate, accumulator: Accumulator, seed: int
) -> tuple[Tensor, Tensor, int]:
    """Return a GEMM's accumulated result, its exact result, and the reduction length."""
    formats = _formats(matmul.operation, candidate.format)
    slots = list(GEMM_SLOTS.values())[index]
    tensors = {"a": matmul.a, "b": matmul.b, "c": matmul.c}
    sides: list[UnitMatrix] = []
    for slot, (name, axis) in zip(slots, SIDES[index], strict=True):
        x, fmt = tensors[name], getattr(formats, slot).format
        assert x is not None
        drawn = derive_seed(seed, slot)
        if accumulator.simulated:
            sides.append(unit_matrix(x, fmt, axis, accumulator, seed=drawn))
            continue
        values = x.detach().float()
        if fmt is not None:
            values = fake_quantize(values, fmt, axis=axis, seed=drawn)
        sides.append(UnitMatrix(values.movedim(axis, -1), None, None, "float32"))
    left, right = (dense(side, accumulator) for side in sides)
    exact = torch.matmul(left, right.mT) * matmul.alpha
    if accumulator.simulated:
        summed = accumulated_product(sides[0], sides[1], accumulator, matmul.alpha)
    else:
        summed = torch.matmul(left.float(), right.float().mT) * matmul.alpha
    return summed, exact, left.shape[-1]


def dense(matrix: UnitMatrix, accumulator: Accumulator) -> Tensor:
    """Return the values that a matrix unit multiplies, in float64, with all scales applied."""
    values = matrix.elements.double()
    if matrix.scales is not None:
        assert accumulator.scale_block is not None
        scales = matrix.scales.double().repeat_interleave(accumulator.scale_block, -1)
        values = values * scales[..., : values.shape[-1]]
    return values if matrix.after is None else values * matrix.after.double()


def errors(summed: Tensor, exact: Tensor, reference: Tensor) -> dict[str, Any]:
    """Return the columns with the errors of a result; see the module's docstring.

    Args:
        summed: result in the unit.
        exact: exact product of the same operands, in float64.
        reference: product of the operands in high precision.
    """
    y, q, x = (t.double() for t in (summed, exact, reference))
    finite = y.isfinite() & q.isfinite()
    lost = int((~finite).sum())
    if lost:
        y, q, x = (torch.where(finite, t, 0.0) for t in (y, q, x))
    error = y - q
    wrong = error != 0
    shrunk = float((y.abs() < q.abs()).sum() / wrong.sum()) if wrong.any() else float("nan")
    rms = float((q.square().sum() / finite.sum()).sqrt()) if finite.any() else 0.0
    kept = (error[finite] if lost else error.flatten()).numpy()
    spread = np.quantile(kept, QUANTILES) / rms if kept.size and rms else [np.nan] * len(QUANTILES)
    columns: dict[str, Any] = {
        "relative_error": _relative(error, q),
        "gain": _gain(error, q),
        "toward_zero": shrunk,
    }
    columns |= {f"p{round(100 * p):02}": float(v) for p, v in zip(QUANTILES, spread, strict=True)}
    for name, axis in (("rows", -2), ("columns", -1)):
        parts = np.array_split(np.arange(y.shape[axis]), QUARTERS)
        for number, part in enumerate(parts, 1):
            chosen = torch.from_numpy(part)
            of_part = error.index_select(axis, chosen), q.index_select(axis, chosen)
            columns[f"{name}_{number}"] = _relative(*of_part)
    return columns | {
        "format_error": _relative(q - x, x),
        "format_gain": _gain(q - x, x),
        "total_error": _relative(y - x, x),
        "total_gain": _gain(y - x, x),
        "nonfinite": lost,
    }


def summary(rows: pd.DataFrame) -> list[str]:
    """Return one line per format and accumulator with the median errors of all GEMMs."""
    lines: list[str] = []
    if rows.empty:
        return lines
    for (fmt, accumulator), part in rows.groupby(["format", "accumulator"], sort=False):
        part = part[part["relative_error"].notna()]
        if part.empty:
            lines.append(f"{accumulator} with {fmt}: all results are zero, so no error is defined")
            continue
        of_sum, of_format = part["relative_error"].median(), part["format_error"].median()
        worst = part.loc[part["relative_error"].idxmax()]
        lines.append(
            f"{accumulator} with {fmt}: median relative error of the sums {of_sum:.2g} (of the "
            f"format {of_format:.2g}), median gain {part['gain'].median():+.2g}; largest error "
            f"{worst['relative_error']:.2g} in {worst['gemm']} of {worst['module']}"
        )
    return lines


def _relative(error: Tensor, of: Tensor) -> float:
    size = float(of.norm())
    return float(error.norm()) / size if size else float("nan")


def _gain(error: Tensor, of: Tensor) -> float:
    size = float(of.square().sum())
    return float((of * error).sum()) / size if size else float("nan")
