"""Which tensors a run must have left, and which of them are not there.

A run passes through its layers once for each micro-batch of an iteration, and in each pass every
matmul on every rank of its pipeline stage leaves the tensors of `TENSOR_NAMES`; a weight, which is
the same in all passes of an iteration, may stand in one of them for all. Passes, modules and ranks
are those that the run's records show anywhere, and those that the run card's arguments tell of. So
one lost tensor is found, and a whole rank, layer or micro-batch.

What a module never has, in any pass and on any rank, the run may never have made: a frozen weight
has no gradient. The records' numbers decide (`record_numbers`): each rank counts its records
without a gap, so where no number is missing nothing was lost, and a name that never comes is a
note; else it is missing.

A rank whose collection ended early (a limit, a full disk, a killed run) lacks what would have come
later, which is a note too, as is what an iteration lacks of which a ring held the first part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import pandas as pd

from megatron.analysis.verification import counter_gaps
from megatron.analysis.verification.counter_gaps import in_words
from megatron.analysis.verification.finding import Finding
from megatron.tensor_record import OF_ITERATION, ON_REQUEST, TENSOR_NAMES

_PASS = ["iteration", "micro_batch"]
_NUMBERS = (
    "control_iter",
    "global_batch_size",
    "micro_batch_size",
    "collect_micro_batches",
    "num_layers",
)
NAMED = 16  #: missing ranks that are listed one by one
#: A run has records for most combinations of its passes, modules and ranks. If far more of these
#: combinations are missing than present, the records do not come from one run.
DENSE, SMALL = 50, 100_000
_ENDS = ("limited", "failed", "dropped")  #: events after which a rank wrote no more
#: Arguments that leave some of the schedule out on purpose, and their values that leave out none.
#: What they chose, the card's text says; here the records themselves say which passes there were.
_ITERATIONS = {
    "collect_iterations": (None,),
    "collect_start": (None,),
    "collect_every": (None,),
    "collect_ring": (None,),
    "collect_flag_file": (None,),
}
_PLACES = {
    "collect_modules": (None,),
    "collect_tensors": (None,),
    "collect_operations": (None,),
    "collect_ranks": (None, "all"),
    "collect_slice": (None,),
}


@dataclass(frozen=True)
class _Run:
    """What is known of one run."""

    records: pd.DataFrame  #: all that it has and that its indexes name
    card: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]  #: of its indexes

    @property
    def where(self) -> str:
        return f"run {self.records['run_id'].iloc[0]}"

    @property
    def finished(self) -> bool:
        return self.card.get("status") == "finished"

    @cached_property
    def cut(self) -> dict[int, int]:
        """The iteration from which on a rank may lack tensors, of those that ended early."""
        if self.finished:
            ended = set(rank for rank, _ in self.ends)
        else:
            ended = {int(rank) for rank in self.records["rank"].unique()}
            if self.card.get("status") in ("limited", "failed"):
                told = {rank for rank, _ in self.ends}
                told |= {
                    rank["rank"]
                    for rank in self.card.get("ranks") or []
                    if type(rank.get("rank")) is int and (rank.get("limit") or rank.get("error"))
                }
                ended = told or ended
        last = self.records.groupby("rank")["iteration"].max()
        return {rank: int(last[rank]) for rank in ended if rank in last.index}

    @property
    def ends(self) -> list[tuple[int, str]]:
        """Ranks that say that they did not write everything, and why."""
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
        """Rank and iteration where a rank says that it left something out."""
        return {
            (_rank_of(event), event["iteration"])
            for event in self.events
            if event["event"] == "left_out" and isinstance(event.get("iteration"), int)
        }

    @property
    def early(self) -> bool:
        """Return whether the run ended in its first iteration, whose records may be incomplete."""
        return bool(self.cut) and self.records["iteration"].nunique() == 1


def _rank_of(event: Mapping[str, Any]) -> int:
    """Return the rank that wrote an event; 0 if the event does not name one."""
    place = event.get("rank")
    rank = place.get("world", 0) if isinstance(place, dict) else 0
    return rank if type(rank) is int else 0


def check_run(
    records: pd.DataFrame,
    card: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]] = (),
    others: pd.DataFrame | None = None,
) -> Iterator[Finding]:
    """What one run lacks.

    Args:
        records: all that it has and that its indexes name.
        card: its run card.
        events: what its indexes say besides.
        others: records of other runs that may lie in its folder.
    """
    run = _Run(records, card, events)
    yield from _how_it_ended(run)
    chosen = _chosen(card, _ITERATIONS) + _chosen(card, _PLACES)
    if chosen:
        text = f"{', '.join(chosen)}: what was left out everywhere is not missed"
        yield Finding("selection", run.where, text, note=True)
    yield from _against_card(run)
    if not _chosen(card, _PLACES):
        yield from _ranks(run)
    lost_some = False
    for rank, gaps in counter_gaps.gaps(records, others).items():
        late = rank in run.cut and counter_gaps.within(records, rank, gaps, run.cut[rank])
        lost_some |= not late
        count = sum(high - low + 1 for low, high in gaps)
        text = f"{count} of its records' numbers are in no index and no file: {in_words(gaps)}"
        yield Finding("numbers", f"{run.where}, rank {rank}", text, note=late)
    yield from _missing(run, lost_some=lost_some)


def _how_it_ended(run: _Run) -> Iterator[Finding]:
    status = run.card.get("status")
    if not run.card:
        text = "there is none: arguments and formats are taken from the records"
        yield Finding("run card", run.where, text, note=True)
    elif status != "finished":
        why = run.card.get("error") or run.card.get("limit") or run.card.get("reason")
        text = f"the run ended as {status!r}: {why or 'its last pass may be cut'}"
        yield Finding("run card", run.where, text, note=status != "failed")
    for rank, text in run.ends:
        yield Finding("not all", f"{run.where}, rank {rank}", text, note=True)


def _chosen(card: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Those of the arguments that left something out, as flags."""
    args = card.get("arguments") or {}
    return [
        f"--{name.replace('_', '-')} {args[name]}"
        for name, values in harmless.items()
        if args.get(name) not in (None, [], *values)
    ]


def _against_card(run: _Run) -> Iterator[Finding]:
    """Iterations, micro-batches and layers that the arguments tell of."""
    records = run.records
    args = {
        name: value
        for name, value in (run.card.get("arguments") or {}).items()
        if name not in _NUMBERS or type(value) in (int, type(None))
    }
    limit, done = args.get("control_iter"), run.card.get("iterations")
    whole = limit is not None and not _chosen(run.card, _ITERATIONS)
    if whole and done is not None and run.finished:
        wanted, found = min(limit or done, done), records["iteration"].nunique()
        if found < wanted:
            text = f"{wanted} were collected by the run card, but records are of {found}"
            yield Finding("iterations", run.where, text)
    batch, sizes, dp = args.get("global_batch_size"), args.get("micro_batch_size"), None
    if records["dp_size"].notna().any():
        dp = int(records["dp_size"].max())
    if batch and sizes and dp and not args.get("rampup_batch_size"):
        each = batch // (sizes * dp)
        wanted = min(args.get("collect_micro_batches") or each, each)
        found = records["micro_batch"].nunique()
        if found < wanted:
            text = f"{wanted} of each iteration by the run card, but records are of {found}"
            yield Finding("micro-batches", run.where, text, note=run.early)
    all_layers = args.get("collect_layers", "all") == "all" and not _chosen(run.card, _PLACES)
    if args.get("num_layers") and all_layers:
        lost = _without(args["num_layers"], records["layer_idx"].unique())
        if lost:
            text = f"no record of layer {in_words(lost)}"
            yield Finding("layers", run.where, text, note=run.early)


def _without(count: int, present: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the numbers below `count` that are not present, as ranges (first, last).

    Ranges stay short even if a damaged file claims a huge number of layers or ranks.
    """
    gaps, low = [], 0
    for number in sorted({int(each) for each in present if 0 <= int(each) < count}):
        if number > low:
            gaps.append((low, number - 1))
        low = number + 1
    return [*gaps, (low, count - 1)] if low < count else gaps


def _ranks(run: _Run) -> Iterator[Finding]:
    """Ranks of a stage, some of whose ranks have records, without any."""
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
    """Each tensor of each pass that is not there."""
    records = run.records
    have = _passes_of_tensors(records)
    passes = sorted(set(records[_PASS].itertuples(index=False, name=None)))
    if not records["micro_batch"].groupby(records["iteration"]).nunique().nunique() > 1:
        iterations, batches = ({each[i] for each in passes} for i in (0, 1))
        if len(iterations) * len(batches) <= DENSE * len(passes):
            passes = sorted((i, b) for i in iterations for b in batches)
    ranks = _ranks_of_modules(records)
    expected_places = len(passes) * sum(map(len, ranks.values()))
    if expected_places > DENSE * len(records) + SMALL:
        text = (
            f"{len(records)} records name {len(passes)} passes and {len(ranks)} modules, too many "
            "for one run: missing records are not listed"
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
            text = f"{', '.join(never)}: no number is missing, so never made (frozen) or collected"
            yield Finding("never there", module, text, note=True)
            expected = [name for name in expected if name in known[module]]
        for iteration, batch in passes:
            for rank in ranks[module]:
                lost = [n for n in expected if (rank, iteration, batch, module, n) not in have]
                if lost:
                    where = f"iteration {iteration}, micro-batch {batch}, rank {rank}, {module}"
                    told = (rank, iteration) in run.partial
                    told |= rank in run.cut and iteration >= run.cut[rank]
                    yield Finding("missing", where, ", ".join(lost), note=told)


def _passes_of_tensors(records: pd.DataFrame) -> set[tuple[int, int, int, str, str]]:
    """Rank, pass, module and name of each tensor that is there; one of those that an iteration may
    have once (a weight) is in all of its passes.
    """
    names = ["rank", *_PASS, "module", "tensor_name"]
    have = set(records[names].itertuples(index=False, name=None))
    batches = records["micro_batch"].unique().tolist()
    for name in OF_ITERATION:
        once = records.loc[records["tensor_name"] == name, names].drop_duplicates()
        if once.duplicated(["rank", "iteration", "module"]).any():
            continue
        for rank, iteration, _, module, _ in once.itertuples(index=False, name=None):
            have |= {(rank, iteration, batch, module, name) for batch in batches}
    return have


def _ranks_of_modules(records: pd.DataFrame) -> dict[str, list[int]]:
    """The ranks that have each module: all of its stage, of an expert those of its group."""
    places = records.drop_duplicates("rank")[["rank", "pp", "ep"]].fillna(0)
    ranks: dict[str, list[int]] = {}
    for (module, pp), of_stage in records.groupby(["module", records["pp"].fillna(0)], sort=False):
        near = places[places["pp"] == pp]
        if ".local_experts." in str(module):
            near = near[near["ep"].isin(of_stage["ep"].fillna(0))]
        ranks[str(module)] = ranks.get(str(module), []) + sorted(int(rank) for rank in near["rank"])
    return ranks
