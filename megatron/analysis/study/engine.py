"""Run a study: measure the errors of all candidates in all passes of a dump."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from megatron.analysis.dump.tensor_files import Problem, UnreadableTensorError
from megatron.analysis.progress import Progress
from megatron.analysis.stats.executors import processors, run_on_threads
from megatron.analysis.store import TensorStore
from megatron.analysis.study.candidates import Candidate
from megatron.analysis.study.gemm_errors import Settings, errors_of
from megatron.analysis.study.kept_results import KeptResults, Rows
from megatron.analysis.study.operands import matmuls
from megatron.analysis.study.passes import OPERANDS, Pass, beyond_memory, counted, find_passes
from megatron.analysis.verification.recorded_formats import NotCheckedError

#: Columns at the beginning of the table of errors; others follow.
COLUMNS = (
    "iteration",
    "layer_idx",
    "module",
    "operation",
    "gemm",
    "format",
    "recipe",
    "sqnr_db",
    "gain",
    "relative_error",
    "bias",
    "variance",
)
#: Columns that identify a GEMM result, whatever its candidate.
_RESULT = ["run_id", "iteration", "micro_batch", "rank", "module", "operation", "gemm"]
SHARE_OF_MEMORY = 0.5  #: default limit for the operands in memory, as a share of physical memory


@dataclass
class Study:
    """Result of a study."""

    rows: pd.DataFrame  #: one row per GEMM and candidate, with `COLUMNS` first
    budgets: pd.DataFrame  #: one row per operand of a GEMM and candidate; see `gemm_errors`
    candidates: list[Candidate]
    problems: list[Problem]  #: files that could not be read
    left_out: Counter[str] = field(default_factory=Counter)  #: number of passes left out, by reason


@dataclass
class _Outcome:
    """Result of the study of one pass."""

    counter: int  #: number of the pass's first record, in the order of the run
    rows: list[Rows] = field(default_factory=list)  #: rows of each candidate
    problem: Problem | None = None
    reasons: list[str] = field(default_factory=list)  #: why parts of the pass were left out
    failure: tuple[str, str] | None = None  #: why the pass was left out, and its description


class _Gate:
    """Limit on the memory of all passes that are studied at the same time."""

    def __init__(self, limit: int):
        self._limit, self._used = limit, 0
        self._changed = threading.Condition()

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Wait until `size` bytes are free, and reserve them for the `with` block."""
        size = min(size, self._limit)
        with self._changed:
            self._changed.wait_for(lambda: self._used + size <= self._limit)
            self._used += size
        try:
            yield
        finally:
            with self._changed:
                self._used -= size
                self._changed.notify_all()


def study(
    store: TensorStore,
    candidates: Sequence[Candidate],
    *,
    select: pd.DataFrame | None = None,
    workers: int | None = None,
    max_memory: int | None = None,
    folder: Path | None = None,
    draws: int = 4,
    budget: bool = True,
    progress: bool = False,
) -> Study:
    """Study the errors of the candidates in the matmuls of a dump.

    Args:
        select: subset of `store.records`; None selects all records.
        workers: number of threads; None means one per processor.
        max_memory: limit of the memory for operands and products, in bytes; None means half of the
            machine's memory. A pass that needs more is left out.
        folder: folder in which the results are kept for later calls; None keeps nothing.
        draws: number of draws for formats with random numbers, 2 or more.
        budget: whether to measure each operand alone.
        progress: whether to report the progress on stderr.

    Raises:
        ValueError: if the selection contains no pass through a matmul.
    """
    found = find_passes(store, store.records if select is None else select)
    limit = _memory() if max_memory is None else max_memory
    left_out, passes = found.left_out, []
    for of_pass in sorted(found.passes, key=lambda each: -each.nbytes):
        if of_pass.nbytes > limit:
            left_out[beyond_memory(limit)] += 1
        else:
            passes.append(of_pass)
    if not found.passes:
        reasons = "".join(f"; {reason}: {count}" for reason, count in left_out.items())
        raise ValueError(
            f"no operands of a matmul in {store.folder}{reasons}; collect input, weight and "
            "grad_output of linear layers, or query, key, value and grad_output of attention"
        )
    if len(store.missing):
        left_out["files that an index lists but that do not exist"] = len(store.missing)
    kept, gate = KeptResults(folder), _Gate(limit)

    def measure(of_pass: Pass) -> _Outcome:
        settings = Settings(of_pass.num_layers, draws, budget)
        with gate.holding(of_pass.nbytes):
            return _measure(of_pass, candidates, settings, store, kept)

    outcomes: list[_Outcome] = []
    with Progress(len(passes), "Studying", "pass", shown=progress) as bar:
        for outcome in run_on_threads(measure, passes, workers or processors()):
            outcomes.append(outcome)
            bar.update()
    outcomes.sort(key=lambda outcome: outcome.counter)
    problems = [*store.problems, *(each.problem for each in outcomes if each.problem)]
    left_out.update(reason for each in outcomes for reason in each.reasons)
    left_out.update(counted(each.failure for each in outcomes if each.failure))
    tables = [rows for outcome in outcomes for rows in outcome.rows]
    rows = _table([row for rows, _ in tables for row in rows])
    if count := _zero_results(rows):
        left_out["GEMM results that are zero in high precision, which have no relative error"] = (
            count
        )
    if count := _nonfinite_results(rows):
        reason = "GEMM results with NaN or Inf in high precision, because saved operands have them"
        left_out[reason] = count
    return Study(
        rows,
        _table([row for _, budgets in tables for row in budgets]),
        list(candidates),
        problems,
        left_out,
    )


def _measure(
    of_pass: Pass,
    candidates: Sequence[Candidate],
    settings: Settings,
    store: TensorStore,
    kept: KeptResults,
) -> _Outcome:
    """Measure the candidates in one pass; reuse the results that are in `kept`."""
    outcome = _Outcome(int(of_pass.first.counter))
    try:
        keys = kept.keys(of_pass, candidates, settings)
        known = {name: rows for name, key in keys.items() if (rows := kept.get(key))}
        outcome.reasons += [*_in_tiles(of_pass, candidates), *_forward_only(of_pass)]
        outcome.rows += known.values()
        rest = [each for each in candidates if each.name not in known]
        if not rest:
            return outcome
        new: dict[str, Rows] = {each.name: ([], []) for each in rest}
        for matmul in matmuls(of_pass, store.load):
            for candidate, errors, budgets in errors_of(matmul, rest, settings):
                new[candidate.name][0].extend(errors)
                new[candidate.name][1].extend(budgets)
        for name, rows_of in new.items():
            kept.put(keys[name], rows_of)
        outcome.rows += new.values()
    except UnreadableTensorError as error:
        path = Path(str(error).partition(": ")[0])
        outcome.problem = Problem(path, error.why)
        outcome.reasons += ["passes with a file that cannot be read"]
    except FileNotFoundError as error:
        outcome.problem = Problem(Path(str(error.filename)), "removed while the study ran")
        outcome.reasons += ["passes with a file that cannot be read"]
    except (NotCheckedError, ValueError) as error:
        outcome.failure = str(error).partition("\n")[0], of_pass.place
    return outcome


def _in_tiles(of_pass: Pass, candidates: Sequence[Candidate]) -> list[str]:
    """Return, for each candidate that computes PV in tiles, the reason why PV is left out."""
    if of_pass.layer_type != "attention" or any("value" not in each for each in of_pass.ranks):
        return []
    first = of_pass.first
    return [
        f"passes whose PV {candidate.name} computes in tiles"
        for candidate in candidates
        if candidate.formats(
            "pv",
            first.module,
            int(first.layer_idx),
            num_layers=of_pass.num_layers,
            iteration=int(first.iteration),
        ).tiling
        is not None
    ]


def _forward_only(of_pass: Pass) -> list[str]:
    """Return the reason why the gradient GEMMs of a pass are left out, in a list; else nothing."""
    needed = OPERANDS[of_pass.layer_type][2:]
    names = set.intersection(*(set(by_name) for by_name in of_pass.ranks))
    if lost := [name for name in needed if name not in names]:
        return [f"gradients of passes without {' and '.join(lost)}"]
    return []


def _zero_results(rows: pd.DataFrame) -> int:
    """Return the number of GEMM results that are zero both with and without quantized operands."""
    if rows.empty:
        return 0
    zero = rows[rows["relative_error"].isna() & (rows["nonfinite"] == 0)]
    return len(zero.drop_duplicates(_RESULT))


def _nonfinite_results(rows: pd.DataFrame) -> int:
    """Return the number of GEMM results with NaN or Inf without quantized operands."""
    if rows.empty:
        return 0
    return len(rows[rows["reference_nonfinite"] > 0].drop_duplicates(_RESULT))


def _table(rows: list[dict[str, object]]) -> pd.DataFrame:
    """Return rows as a table, sorted by run, iteration, micro-batch, rank and layer."""
    table = pd.DataFrame(rows)
    if table.empty:
        return pd.DataFrame(columns=list(COLUMNS))
    keys = ["run_id", "iteration", "micro_batch", "rank", "layer_idx"]
    return table.sort_values(keys, kind="stable", ignore_index=True)


def _memory() -> int:
    """Return the default limit on the memory of a study, in bytes."""
    return int(SHARE_OF_MEMORY * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
