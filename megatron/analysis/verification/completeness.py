"""Check whether a run saved every tensor that it should have saved.

A pass is the processing of one micro-batch by all layers. In each pass, every rank of a pipeline
stage saves the tensors listed in `TENSOR_NAMES` for every matmul of the stage. All passes of an
iteration share the same weights, so a weight may be saved in only one of them. The expected passes,
modules and ranks are derived from all records of the run and from the arguments in the run card.
The check therefore finds a single missing tensor as well as a missing rank, layer or micro-batch.

If a tensor of a module is missing in all passes and on all ranks, the run may never have saved it.
For example, a frozen weight has no gradient. The counters of the records decide such cases (see
`counter_gaps`). Each rank numbers its records without gaps, so no record was lost if no number is
missing. The tensor is then reported in a note; otherwise, it is reported as missing.

If collection on a rank ended early (because of a limit, a full disk or a killed run), all later
records of the rank are missing, which is also reported in a note. The same applies to the first
part of an iteration that was dropped from a ring buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.verification import counter_gaps
from megatron.analysis.verification.counter_gaps import in_words
from megatron.analysis.verification.results import Finding
from megatron.tensor_record import OF_ITERATION, ON_REQUEST, TENSOR_NAMES

_PASS = ["iteration", "micro_batch"]  #: columns that identify a pass (one micro-batch)
#: Command-line arguments in the run card that must be integers or None; other values are ignored.
_NUMBERS = (
    "control_iter",
    "global_batch_size",
    "micro_batch_size",
    "collect_micro_batches",
    "num_layers",
)
NAMED = 16  #: maximum number of missing ranks reported one by one per pipeline stage
#: Limits for detecting records of different runs. One run has records for most combinations of
#: pass, module and rank. If there are more than `DENSE` * (number of records) + `SMALL`
#: combinations, the records come from different runs.
DENSE, SMALL = 50, 100_000
_ENDS = ("limited", "failed", "dropped")  #: kinds of events that explain missing records of a rank
#: Command-line arguments that select iterations, each with the values that select all iterations.
#: If an argument has another value, only the records show which iterations were selected.
_ITERATIONS = {
    "collect_iterations": (None,),
    "collect_start": (None,),
    "collect_every": (None,),
    "collect_ring": (None,),
    "collect_flag_file": (None,),
}
#: Command-line arguments that select tensors within an iteration, each with the values that select
#: all tensors.
_TENSORS = {
    "collect_modules": (None,),
    "collect_tensors": (None,),
    "collect_operations": (None,),
    "collect_ranks": (None, "all"),
    "collect_slice": (None,),
}


@dataclass(frozen=True)
class _Run:
    """Records, run card and events of one run."""

    records: pd.DataFrame  #: all records, from tensor files and indexes
    card: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]  #: events listed in the indexes

    @property
    def where(self) -> str:
        """Name of the run in the messages of findings."""
        return f"run {self.records['run_id'].iloc[0]}"

    @property
    def finished(self) -> bool:
        """True if the run ended as planned."""
        return self.card.get("status") == "finished"

    @cached_property
    def last_iterations(self) -> dict[int, int]:
        """Last iteration, possibly incomplete, of each rank that ended early, keyed by rank."""
        if self.finished:
            ended = set(rank for rank, _ in self.ends)
        else:
            ended = {int(rank) for rank in self.records["rank"].unique()}
            if self.card.get("status") in ("limited", "failed"):
                reported = {rank for rank, _ in self.ends}
                reported |= {
                    rank["rank"]
                    for rank in self.card.get("ranks") or []
                    if type(rank.get("rank")) is int and (rank.get("limit") or rank.get("error"))
                }
                ended = reported or ended
        last = self.records.groupby("rank")["iteration"].max()
        return {rank: int(last[rank]) for rank in ended if rank in last.index}

    @property
    def ends(self) -> list[tuple[int, str]]:
        """Ranks that reported one of the events `_ENDS`, each with a description of the event."""
        return [
            (
                _rank_of(event),
                f"{event['event']}: {event.get('why')}",
            )
            for event in self.events
            if isinstance(event["event"], str) and event["event"] in _ENDS
        ]

    @cached_property
    def partial(self) -> set[tuple[int, int]]:
        """Pairs (rank, iteration) for which the rank reported skipped tensors."""
        return {
            (_rank_of(event), event["iteration"])
            for event in self.events
            if event["event"] == "left_out" and isinstance(event.get("iteration"), int)
        }

    @property
    def early(self) -> bool:
        """True if a rank ended early in a run that has records of only one iteration."""
        return bool(self.last_iterations) and self.records["iteration"].nunique() == 1


def _rank_of(event: Mapping[str, Any]) -> int:
    """Return the rank that wrote an event, or 0 if the event does not contain a rank."""
    coordinates = event.get("rank")
    rank = coordinates.get("world", 0) if isinstance(coordinates, dict) else 0
    return rank if type(rank) is int else 0


def check_run(
    records: pd.DataFrame,
    card: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]] = (),
) -> Iterator[Finding]:
    """Check the completeness of one run, and yield the findings.

    Args:
        records: all records of the run, from files and indexes.
        card: run card of the run; empty if it has none.
        events: events in the indexes of the run.
    """
    run = _Run(records, card, events)
    yield from _how_it_ended(run)
    selection = _selection(card, _ITERATIONS) + _selection(card, _TENSORS)
    if selection:
        text = f"{', '.join(selection)}: tensors that no rank collected do not count as missing"
        yield Finding("selection", run.where, text, note=True)
    yield from _against_card(run)
    if not _selection(card, _TENSORS):
        yield from _ranks(run)
    lost_some = False
    gaps_of_ranks = counter_gaps.gaps(records)
    for finding in _lost_ends(run, gaps_of_ranks):
        lost_some = True
        yield finding
    for rank, gaps in gaps_of_ranks.items():
        last = run.last_iterations.get(rank)
        late = last is not None and counter_gaps.within(records, rank, gaps, last)
        lost_some |= not late
        count = sum(high - low + 1 for low, high in gaps)
        text = f"{count} of its records' numbers are in no index and no file: {in_words(gaps)}"
        yield Finding("numbers", f"{run.where}, rank {rank}", text, note=late)
    yield from _missing(run, lost_some=lost_some)


def _lost_ends(run: _Run, gaps: Mapping[int, Sequence[counter_gaps.Range]]) -> Iterator[Finding]:
    """Report ranks whose last records are missing, given the tensor counts in the run card.

    Args:
        run: the run to check.
        gaps: missing numbers before each rank's last record, from `counter_gaps.gaps`.
    """
    if run.card.get("status") == "running":  # killed; a limit or an error changes the status
        return
    present = run.records.groupby("rank")["counter"].nunique()
    for outcome in run.card.get("ranks") or []:
        rank, saved = (outcome.get(name) for name in ("rank", "tensors"))
        if type(rank) is not int or type(saved) is not int or rank not in present.index:
            continue
        before = sum(high - low + 1 for low, high in gaps.get(rank, ()))
        if (lost := saved - int(present[rank]) - before) > 0:
            text = f"its last {lost} of {saved} records (run card) are in no index and no file"
            yield Finding("numbers", f"{run.where}, rank {rank}", text)


def _how_it_ended(run: _Run) -> Iterator[Finding]:
    """Report a missing run card, a run that did not finish, and ranks that ended early."""
    status = run.card.get("status")
    if not run.card:
        text = "missing: arguments and formats are taken from the records"
        yield Finding("run card", run.where, text, note=True)
    elif status != "finished":
        why = run.card.get("error") or run.card.get("limit") or run.card.get("reason")
        text = f"the run ended as {status!r}: {why or 'its last pass may be incomplete'}"
        yield Finding("run card", run.where, text, note=status != "failed")
    for rank, text in run.ends:
        yield Finding("not all", f"{run.where}, rank {rank}", text, note=True)


def _selection(card: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Return the command-line flags that limited which tensors the run collected.

    Args:
        card: run card.
        harmless: names of arguments, with the values that do not limit the collection.
    """
    args = card.get("arguments") or {}
    return [
        f"--{name.replace('_', '-')} {args[name]}"
        for name, values in harmless.items()
        if args.get(name) not in (None, [], *values)
    ]


def _against_card(run: _Run) -> Iterator[Finding]:
    """Report iterations, micro-batches and layers that the run card implies but no record has."""
    records = run.records
    args = {
        name: value
        for name, value in (run.card.get("arguments") or {}).items()
        if name not in _NUMBERS or type(value) in (int, type(None))
    }
    limit, done = args.get("control_iter"), run.card.get("iterations")
    selects_all = limit is not None and not _selection(run.card, _ITERATIONS)
    if selects_all and done is not None and run.finished:
        expected, present = min(limit or done, done), records["iteration"].nunique()
        if present < expected:
            text = f"the run card implies {expected}, but there are records of only {present}"
            yield Finding("iterations", run.where, text)
    batch, sizes, dp = args.get("global_batch_size"), args.get("micro_batch_size"), None
    if records["dp_size"].notna().any():
        dp = int(records["dp_size"].max())
    if batch and sizes and dp and not args.get("rampup_batch_size"):
        per_iteration = batch // (sizes * dp)
        expected = min(_micro_batches(run.card, args) or per_iteration, per_iteration)
        present = records["micro_batch"].nunique()
        if present < expected:
            text = (
                f"the run card implies {expected} per iteration, but there are records of only "
                f"{present}"
            )
            yield Finding("micro-batches", run.where, text, note=run.early)
    all_layers = args.get("collect_layers", "all") == "all" and not _selection(run.card, _TENSORS)
    if args.get("num_layers") and all_layers:
        lost = _without(args["num_layers"], records["layer_idx"].unique())
        if lost:
            text = f"no record of layer {in_words(lost)}"
            yield Finding("layers", run.where, text, note=run.early)


def _micro_batches(card: Mapping[str, Any], args: Mapping[str, Any]) -> int:
    """Return the number of micro-batches to collect per iteration; 0 for all.

    Another trainer's arguments do not contain the number, but the collection's own settings do.
    """
    chosen = args.get("collect_micro_batches", (card.get("selection") or {}).get("micro_batches"))
    return chosen if type(chosen) is int else 0


def _without(count: int, present: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the numbers in `range(count)` that are missing from `present`, as inclusive ranges.

    Ranges need little memory even if a damaged file claims a huge number of layers or ranks.
    """
    gaps, low = [], 0
    for number in sorted({int(each) for each in present if 0 <= int(each) < count}):
        if number > low:
            gaps.append((low, number - 1))
        low = number + 1
    return [*gaps, (low, count - 1)] if low < count else gaps


def _ranks(run: _Run) -> Iterator[Finding]:
    """Report ranks that have no records although other ranks of their pipeline stage do."""
    first = run.records.iloc[0]
    if pd.isna(first["world_size"]) or pd.isna(first["pp_size"]):
        return
    stage = int(first["world_size"]) // int(first["pp_size"])
    present = {int(rank) for rank in run.records["rank"].unique()}
    if stage < 1:
        ranks, stages = first["world_size"], first["pp_size"]
        text = f"its records claim {ranks} ranks in {stages} pipeline stages"
        yield Finding("rank", run.where, text)
        return
    for pp in sorted({rank // stage for rank in present}):
        text = f"no record, but other ranks of pipeline stage {pp} have some"
        gaps = _without(stage, [rank - pp * stage for rank in present])
        gaps = [(low + pp * stage, high + pp * stage) for low, high in gaps]
        lost = list(islice((rank for low, high in gaps for rank in range(low, high + 1)), NAMED))
        for rank in lost:
            yield Finding("rank", f"{run.where}, rank {rank}", text, note=run.early)
        if more := sum(high - low + 1 for low, high in gaps) - len(lost):
            where = f"{run.where}, {more} more ranks up to rank {gaps[-1][1]}"
            yield Finding("rank", where, text, note=run.early)


def _missing(run: _Run, *, lost_some: bool) -> Iterator[Finding]:
    """Report each tensor that is missing from a pass (one micro-batch of an iteration).

    Args:
        run: the run to check.
        lost_some: whether gaps in the counters of a rank show that records were lost.
    """
    records = run.records
    present = _passes_of_tensors(records) | _codes_of_empty_operands(records)
    passes = sorted(set(records[_PASS].itertuples(index=False, name=None)))
    if not records["micro_batch"].groupby(records["iteration"]).nunique().nunique() > 1:
        iterations, batches = ({each[i] for each in passes} for i in (0, 1))
        if len(iterations) * len(batches) <= DENSE * len(passes):
            passes = sorted((i, b) for i in iterations for b in batches)
    ranks = _ranks_of_modules(records)
    expected_places = len(passes) * sum(map(len, ranks.values()))
    if expected_places > DENSE * len(records) + SMALL:
        text = (
            f"{len(records)} records belong to {len(passes)} passes and {len(ranks)} modules, too "
            "many for one run: missing records are not listed"
        )
        yield Finding("missing", run.where, text)
        return
    known = records.groupby("module")["tensor_name"].agg(set).to_dict()
    types = dict(zip(records["module"], records["layer_type"], strict=True))
    for module in ranks:
        names = TENSOR_NAMES.get(types[module], ())
        expected = [name for name in names if name not in ON_REQUEST]
        expected += [name for name in ON_REQUEST if name in known[module]]
        never = [name for name in expected if name not in known[module]]
        if never and not lost_some:
            cause = "frozen, or cut by the limit" if run.last_iterations else "frozen"
            text = (
                f"{', '.join(never)}: not computed ({cause}) or not collected, because no record "
                "number is missing"
            )
            yield Finding("never there", module, text, note=True)
            expected = [name for name in expected if name in known[module]]
        for iteration, batch in passes:
            for rank in ranks[module]:
                lost = [n for n in expected if (rank, iteration, batch, module, n) not in present]
                if lost:
                    where = f"iteration {iteration}, micro-batch {batch}, rank {rank}, {module}"
                    explained = (rank, iteration) in run.partial
                    last = run.last_iterations.get(rank)
                    explained |= last is not None and iteration >= last
                    yield Finding("missing", where, ", ".join(lost), note=explained)


def _passes_of_tensors(records: pd.DataFrame) -> set[tuple[int, int, int, str, str]]:
    """Return the rank, iteration, micro-batch, module and name of each tensor with a record.

    A tensor that may be saved only once per iteration (`OF_ITERATION`, such as a weight) counts as
    present in all passes of the iteration, unless its module saved several in any
    iteration, as with delayed scaling.
    """
    names = ["rank", *_PASS, "module", "tensor_name"]
    present = set(records[names].itertuples(index=False, name=None))
    batches = records["micro_batch"].unique().tolist()
    for name in OF_ITERATION:
        once = records.loc[records["tensor_name"] == name, names].drop_duplicates()
        again = once[once.duplicated(["rank", "iteration", "module"])]
        modules = pd.MultiIndex.from_frame(once[["rank", "module"]])
        once = once[~modules.isin(pd.MultiIndex.from_frame(again[["rank", "module"]]))]
        for rank, iteration, _, module, _ in once.itertuples(index=False, name=None):
            present |= {(rank, iteration, batch, module, name) for batch in batches}
    return present


def _codes_of_empty_operands(records: pd.DataFrame) -> set[tuple[int, int, int, str, str]]:
    """Return the codes that a run does not save, because their operands have no values.

    An expert that received no tokens has such operands. The result has the same form as that of
    `_passes_of_tensors`.
    """
    empty = np.array([isinstance(shape, list) and 0 in shape for shape in records["shape"]], bool)
    found = set()
    for row in records[empty].itertuples():
        of_operand = f"_{row.tensor_name}_codes"
        place = (int(row.rank), int(row.iteration), int(row.micro_batch), str(row.module))
        found |= {(*place, name) for name in ON_REQUEST if name.endswith(of_operand)}
    return found


def _ranks_of_modules(records: pd.DataFrame) -> dict[str, list[int]]:
    """Return the ranks that should have records of each module, keyed by module.

    These are all ranks of the module's pipeline stage. For an expert, only the ranks of the stage
    with the same expert-parallel rank are included.
    """
    coordinates = records.drop_duplicates("rank")[["rank", "pp", "ep"]].fillna(0)
    ranks: dict[str, list[int]] = {}
    for (module, pp), of_stage in records.groupby(["module", records["pp"].fillna(0)], sort=False):
        holders = coordinates[coordinates["pp"] == pp]
        if ".local_experts." in str(module):
            holders = holders[holders["ep"].isin(of_stage["ep"].fillna(0))]
        numbers = sorted(int(rank) for rank in holders["rank"])
        ranks[str(module)] = ranks.get(str(module), []) + numbers
    return ranks
