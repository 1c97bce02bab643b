"""Prepare the comparison of two dumps: choose their runs, and decide how tensors are paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.analysis.diff.comparison import Comparison, Rules
from megatron.analysis.diff.sides import Side, TensorKey
from megatron.analysis.dump.query import is_module
from megatron.analysis.store import TensorStore


def open_run(folder: Path, name: str, run: str | None) -> TensorStore:
    """Return the tensors of one run in a folder.

    Args:
        folder: folder of the dump.
        name: "a" or "b", for error messages.
        run: ID of the run, `latest`, or None if the folder has a single run.

    Raises:
        ValueError: if the folder has several runs and none is chosen, or the chosen one is missing.
    """
    store = TensorStore(folder)
    if run is not None:
        return store.only(run)
    runs = [known for known in store.runs() if known]
    if len(runs) > 1:
        raise ValueError(
            f"{folder} has {len(runs)} runs; choose one with --run-{name}: latest, "
            f"{', '.join(runs)}"
        )
    return store


def prepare(
    stores: tuple[TensorStore, TensorStore], rules: Rules, *, with_origins: bool = True
) -> tuple[Comparison, list[TensorKey]]:
    """Return the comparison of two runs, and the keys of their tensors in execution order.

    Micro-batches are paired by their number and data-parallel rank. If the runs have different
    numbers of data-parallel ranks, micro-batches are paired by their first sample, provided that
    all records contain it.

    Raises:
        ValueError: if no tensor of a run can be read, the runs have no tensor in common, or a
            pattern matches no tensor.
    """
    by_sample = _by_sample(stores)
    a, b = (Side(store, by_sample) for store in stores)
    scale = _gradient_scale(a.card, b.card, stores)
    comparison = Comparison(a, b, rules, gradient_scale=scale, with_origins=with_origins)
    common = a.tensors.keys() & b.tensors.keys()
    for side in (a, b):
        if not side.tensors and side.store.problems:
            raise ValueError(
                f"{side.store.folder} has no readable tensor; {len(side.store.problems)} file(s) "
                f"cannot be read: {side.store.problems[0]}"
            )
    if not common:
        raise ValueError(
            f"no tensor of A has a counterpart in B: {_extent(a)} in A, {_extent(b)} in B; compare "
            "runs of the same model that collected the same iterations, layers and tensors"
        )
    for pattern, _ in rules.relative:
        if not any(is_module(key.name, pattern) for key in common):
            raise ValueError(
                f"--max-relative-error {pattern}=...: no tensor matches {pattern!r}; the first is "
                f"{next(key.name for key in a.tensors if key in common)!r}"
            )
    return comparison, comparison.keys()


def _by_sample(stores: Sequence[TensorStore]) -> bool:
    sizes = [set(store.records["dp_size"].dropna().astype(int)) for store in stores]
    known = all(store.records["sample_idx"].notna().all() for store in stores)
    return sizes[0] != sizes[1] and all(sizes) and known


def _gradient_scale(
    a: Mapping[str, Any], b: Mapping[str, Any], stores: Sequence[TensorStore]
) -> float:
    """Return the factor by which Megatron-LM scales the loss in A, divided by the factor in B.

    Megatron-LM divides the loss of each micro-batch by the number of micro-batches per iteration,
    and by the number of tokens on the rank, which context parallelism divides. With
    `--calculate-per-token-loss`, it divides by neither. The result is 1 if a run card does not
    contain these numbers, or if only one of the runs has this flag.
    """
    numbers = []
    for card, store in zip((a, b), stores, strict=True):
        arguments = card.get("arguments") or {}
        batch, size = (arguments.get(name) for name in ("global_batch_size", "micro_batch_size"))
        if not (type(batch) is int and type(size) is int and batch > 0 and size > 0):
            return 1.0
        if arguments.get("calculate_per_token_loss"):
            return 1.0
        data, context = (_size(store, group) for group in ("dp", "cp"))
        numbers.append(batch / (size * data * context))
    return numbers[1] / numbers[0]


def _size(store: TensorStore, group: str) -> int:
    """Return the size of a parallel group; 1 if no record states it."""
    sizes = store.records[f"{group}_size"].dropna()
    return int(sizes.max()) if len(sizes) else 1


def _extent(side: Side) -> str:
    """Return the iterations and the number of modules of a run as text."""
    iterations = sorted({key.iteration for key in side.tensors if key.iteration is not None})
    modules = {key.module for key in side.tensors}
    text = f"{len(modules)} modules"
    if not iterations:
        return text
    last = f" to {iterations[-1]}" if len(iterations) > 1 else ""
    return f"{text} in iteration {iterations[0]}{last}"
