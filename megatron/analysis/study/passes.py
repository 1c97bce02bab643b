"""Find the passes through matmuls whose operands a dump contains."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.store import IDENTITY, TensorStore
from megatron.analysis.verification.results import ATTENTION_PASS, LINEAR_PASS
from megatron.tensor_record import OF_ITERATION

#: Saved tensors that a pass through a layer multiplies, by layer type.
OPERANDS = {
    "linear": ("input", "weight", "grad_output"),
    "attention": ("query", "key", "value", "grad_output"),
}
#: Operands without which a pass is left out, by layer type.
_NEEDED = {"linear": ("weight",), "attention": ("query", "key")}
_FROM_FORWARD = "attention_probs"  #: operand that is recomputed if it was not saved
#: Bytes that a pass needs per value of its operands and results, and per attention score.
_BYTES_A_VALUE, _BYTES_A_SCORE = 24, 44


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass through a linear layer or through attention.

    A pass through attention covers all ranks that share its sequences.
    """

    layer_type: str
    ranks: tuple[Mapping[str, Any], ...]  #: records of each rank, by tensor name
    card: Mapping[str, Any]
    num_layers: int

    @property
    def first(self) -> Any:
        """Record that describes the pass."""
        return next(iter(self.ranks[0].values()))

    @property
    def place(self) -> str:
        """Description of the pass for messages."""
        row = self.first
        return (
            f"{row.module}, iteration {row.iteration}, micro-batch {row.micro_batch}, "
            f"rank {row.rank}"
        )

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the study of the pass needs, in bytes."""
        values = scores = 0
        for by_name in self.ranks:
            sizes = {name: row.shape or [] for name, row in by_name.items()}
            values += sum(int(np.prod(size)) for size in sizes.values())
            if self.layer_type == "linear" and "input" in sizes and "weight" in sizes:
                tokens = int(np.prod(sizes["input"][:-1]))
                values += tokens * sizes["weight"][0]
            if self.layer_type == "attention" and len(sizes.get("query", ())) == 4:
                s, b, heads, _ = sizes["query"]
                scores += b * heads * s * s * len(self.ranks)
        return values * _BYTES_A_VALUE + scores * _BYTES_A_SCORE

    @property
    def products(self) -> int:
        """Number of multiplications in the pass, without those that recompute operands."""
        total = 0
        for by_name in self.ranks:
            sizes = {name: [int(size) for size in row.shape or ()] for name, row in by_name.items()}
            if self.layer_type == "linear" and "weight" in sizes:
                rows = sizes.get("input") or sizes.get("grad_output") or [0]
                total += math.prod(rows[:-1]) * math.prod(sizes["weight"])
            elif self.layer_type == "attention" and len(sizes.get("query", ())) == 4:
                s, b, heads, width = sizes["query"]
                total += 2 * b * heads * s * s * len(self.ranks) * width  # QK^T and PV
        return 3 * total


@dataclass
class Passes:
    """The passes of a dump, and the number of passes that cannot be studied, by reason."""

    passes: list[Pass] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def find_passes(store: TensorStore, records: pd.DataFrame) -> Passes:
    """Find all passes for which `records` contains operands.

    If activation recomputation repeated a forward pass, the tensors of the first one are used.

    Args:
        records: the records of the store, or some of them.
    """
    found = Passes()
    known = records[records[[*IDENTITY, "rank"]].notna().all(axis=1)]
    if bare := len(records) - len(known):
        found.left_out["tensors that their metadata do not identify"] += bare
    known = known[np.array([not isinstance(codes, dict) for codes in known["codes"]], bool)]
    known = known.sort_values("counter", kind="stable")
    known = known[~known.duplicated([*IDENTITY, "rank"])].sort_index()
    for run_id, of_run in known.groupby("run_id", sort=False):
        card = store.run_card(str(run_id))
        layers = (card.get("arguments") or {}).get("num_layers")
        if not isinstance(layers, int):
            layers = int(of_run["layer_idx"].max()) + 1
        for layer_type, ranks in _of_run(of_run):
            names = set.intersection(*(set(by_name) for by_name in ranks))
            if lost := [name for name in _NEEDED[layer_type] if name not in names]:
                found.left_out[f"passes without {' and '.join(lost)}"] += 1
            elif any(row.slice is not None for by_name in ranks for row in by_name.values()):
                found.left_out["passes collected with --collect-slice"] += 1
            else:
                found.passes.append(Pass(layer_type, ranks, card, layers))
    return found


def counted(failures: Iterable[tuple[str, str]]) -> Counter[str]:
    """Count the passes left out for each reason; each key also describes the first such pass.

    Args:
        failures: reason and description of each pass that was left out.
    """
    first: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for reason, place in failures:
        first.setdefault(reason, place)
        counts[reason] += 1
    return Counter(
        {
            f"passes with {reason} ({'first: ' * (count > 1)}{first[reason]})": count
            for reason, count in counts.items()
        }
    )


def beyond_memory(limit: int) -> str:
    """Return the reason why passes that need more than `limit` bytes are left out."""
    return f"passes that need more than {limit >> 20} MiB of memory (--max-memory)"


def _of_run(records: pd.DataFrame) -> Iterator[tuple[str, tuple[dict[str, Any], ...]]]:
    """Yield the layer type and the operands' records of each pass of a run."""
    wanted = {kind: {*names} for kind, names in OPERANDS.items()}
    wanted["attention"].add(_FROM_FORWARD)
    keys = {"linear": LINEAR_PASS, "attention": ATTENTION_PASS}
    once: dict[tuple[Any, ...], dict[str, Any]] = {}
    passes: dict[tuple[Any, ...], dict[int, dict[str, Any]]] = {}
    # loop over the records once, because pandas takes a millisecond for each group of a `groupby`
    for row in records.itertuples():
        if row.tensor_name in OF_ITERATION:
            once.setdefault((row.iteration, row.module, row.rank), {})[row.tensor_name] = row
        if row.tensor_name in wanted.get(row.layer_type, ()):
            values = (getattr(row, name) for name in keys[row.layer_type])
            key = (row.layer_type, *(None if pd.isna(value) else value for value in values))
            passes.setdefault(key, {}).setdefault(row.rank, {})[row.tensor_name] = row
    for kind in OPERANDS:
        for ranks in (ranks for key, ranks in passes.items() if key[0] == kind):
            of_pass = []
            for _, by_name in sorted(ranks.items()):
                first = next(iter(by_name.values()))
                shared = once.get((first.iteration, first.module, first.rank), {})
                # records of the pass itself come first: the first record describes the pass
                of_pass.append(by_name | {n: r for n, r in shared.items() if n not in by_name})
            if any(set(by_name) - {*OF_ITERATION} for by_name in of_pass):
                yield kind, tuple(of_pass)
