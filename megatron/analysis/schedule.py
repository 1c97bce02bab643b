"""Which tensors a run must have left, and which of them are not there.

A run passes through its layers once for each micro-batch of an iteration, and in each pass every
matmul on every rank of its pipeline stage leaves the tensors of `TENSOR_NAMES`. Passes, modules and
ranks are those that the run's records show anywhere, and those that the run card's arguments tell
of. So one lost tensor is found, and a whole rank, layer or micro-batch.

What a module never has, in any pass and on any rank, the run may never have made: a frozen weight
has no gradient. The records' numbers decide: each rank counts its records without a gap, so where
no number is missing nothing was lost, and a name that never comes is a note; else it is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from megatron.tensor_record import ON_REQUEST, TENSOR_NAMES

_PASS = ["iteration", "micro_batch"]
#: Arguments that leave some of the schedule out on purpose, and their values that leave out none.
#: What they chose, the card's text says; here the records themselves say which passes there were.
_ITERATIONS = {"collect_iterations": (None,), "collect_start": (None,), "collect_every": (None,)}
_PLACES = {
    "collect_modules": (None,), "collect_tensors": (None,), "collect_operations": (None,),
    "collect_ranks": (None, "all"), "collect_slice": (None,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be; a note is none that makes a dump wrong."""

    what: str  #: the kind, one word or two
    where: str  #: a file, or a place in the run
    text: str
    note: bool = False

    def __str__(self) -> str:
        return f"{'note' if self.note else 'ERROR'}  {self.what}: {self.where}: {self.text}"


def check_run(records: pd.DataFrame, card: Mapping[str, Any]) -> Iterator[Finding]:
    """What one run lacks. `records` are all that it has and that its indexes name."""
    run_id = str(records["run_id"].iloc[0])
    status = card.get("status")
    if not card:
        yield Finding(
            "run card", run_id, "there is none: arguments and formats are taken from the records",
            note=True,
        )  # fmt: skip
    elif status != "finished":
        text = f"the run ended as {status!r}: {card.get('error') or 'its last pass may be cut'}"
        yield Finding("run card", run_id, text, note=status != "failed")
    chosen = _chosen(card, _ITERATIONS) + _chosen(card, _PLACES)
    if chosen:
        text = f"{', '.join(chosen)}: what was left out everywhere is not missed"
        yield Finding("selection", f"run {run_id}", text, note=True)
    yield from _against_card(records, card, run_id)
    if not _chosen(card, _PLACES):
        yield from _ranks(records, run_id)
    gaps = _number_gaps(records)
    for rank, lost in gaps.items():
        text = f"{len(lost)} of its records' numbers are in no index and no file: {_ranges(lost)}"
        yield Finding("numbers", f"run {run_id}, rank {rank}", text)
    yield from _missing(records, run_id, lost_some=bool(gaps), cut=status != "finished")


def _chosen(card: Mapping[str, Any], harmless: Mapping[str, tuple[Any, ...]]) -> list[str]:
    """Those of the arguments that left something out, as flags."""
    args = card.get("arguments") or {}
    return [
        f"--{name.replace('_', '-')} {args[name]}"
        for name, values in harmless.items()
        if args.get(name) not in (None, [], *values)
    ]


def _number_gaps(records: pd.DataFrame) -> dict[int, list[int]]:
    """By rank the numbers that no record has."""
    gaps = {}
    for rank, numbers in records.groupby("rank")["counter"]:
        if lost := sorted(set(range(1, int(numbers.max()) + 1)) - set(numbers)):
            gaps[int(str(rank))] = lost
    return gaps


def _against_card(records: pd.DataFrame, card: Mapping[str, Any], run_id: str) -> Iterator[Finding]:
    """Iterations, micro-batches and layers that the arguments tell of."""
    args = card.get("arguments") or {}
    where = f"run {run_id}"
    limit, done = args.get("control_iter"), card.get("iterations")
    whole = limit is not None and not _chosen(card, _ITERATIONS)
    if whole and done is not None and card.get("status") == "finished":
        wanted, found = min(limit or done, done), records["iteration"].nunique()
        if found < wanted:
            text = f"{wanted} were collected by the run card, but records are of {found}"
            yield Finding("iterations", where, text)
    batch, sizes = args.get("global_batch_size"), args.get("micro_batch_size")
    if batch and sizes and not args.get("rampup_batch_size"):
        dp = int(records["dp_size"].max())
        each = batch // (sizes * dp)
        wanted = min(args.get("collect_micro_batches") or each, each)
        found = records["micro_batch"].nunique()
        if found < wanted:
            text = f"{wanted} of each iteration by the run card, but records are of {found}"
            yield Finding("micro-batches", where, text)
    all_layers = args.get("collect_layers", "all") == "all" and not _chosen(card, _PLACES)
    if args.get("num_layers") and all_layers:
        lost = sorted(set(range(args["num_layers"])) - set(records["layer_idx"]))
        if lost:
            yield Finding("layers", where, f"no record of layer {_ranges(lost)}")


def _ranks(records: pd.DataFrame, run_id: str) -> Iterator[Finding]:
    """Ranks of a stage, some of whose ranks have records, without any."""
    first = records.iloc[0]
    if pd.isna(first["world_size"]) or pd.isna(first["pp_size"]):
        return
    stage = int(first["world_size"]) // int(first["pp_size"])
    present = {int(rank) for rank in records["rank"].unique()}
    for pp in sorted({rank // stage for rank in present}):
        for rank in sorted(set(range(pp * stage, (pp + 1) * stage)) - present):
            text = f"no record, but other ranks of pipeline stage {pp} have some"
            yield Finding("rank", f"run {run_id}, rank {rank}", text)


def _missing(
    records: pd.DataFrame, run_id: str, *, lost_some: bool, cut: bool
) -> Iterator[Finding]:
    """Each tensor of each pass that is not there."""
    keys = ["rank", *_PASS, "module", "tensor_name"]
    have = set(records[keys].itertuples(index=False, name=None))
    passes = sorted(set(records[_PASS].itertuples(index=False, name=None)))
    if not records["micro_batch"].groupby(records["iteration"]).nunique().nunique() > 1:
        iterations, batches = ({each[i] for each in passes} for i in (0, 1))
        passes = sorted((i, b) for i in iterations for b in batches)
    ranks = _ranks_of_modules(records)
    known = records.groupby("module")["tensor_name"].agg(set).to_dict()
    types = dict(zip(records["module"], records["layer_type"], strict=True))
    for module in ranks:
        expected = [name for name in TENSOR_NAMES[types[module]] if name not in ON_REQUEST]
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
                    last = cut and iteration == passes[-1][0]
                    yield Finding("missing", where, ", ".join(lost), note=last)


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


def _ranges(numbers: list[int], most: int = 8) -> str:
    """1,2,3,7 as 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(texts[:most]) + (", ..." if len(texts) > most else "")
