"""Group the records of one run by tensor, so that the tensors of two runs can be paired.

A `TensorKey` identifies a tensor within a run. It contains neither the run, the quantization type,
the seed nor the machine, and runs of different layouts share it: the layer number counts over all
pipeline stages, and the name of a module contains the global number of its expert.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from megatron.analysis.dump.reassembly import Cut, data_ranks, parse_dims, reassemble
from megatron.analysis.store import TensorStore
from megatron.fake_quant import dequantize


class TensorKey(NamedTuple):
    """Identity of a tensor within a run. Fields that a record lacks are None."""

    iteration: int | None
    #: number of the micro-batch, or of its first sample in the run's order; None for a weight
    batch: int | None
    data_rank: int
    layer_type: str | None
    layer_idx: int | None
    module: str | None
    operation: str | None
    phase: str | None
    tensor_name: str | None
    #: position, from 0, among the tensors of one rank whose other fields are all equal
    occurrence: int

    @property
    def name(self) -> str:
        """Name of the tensor as the user reads it, such as `decoder.layers.0.mlp.fc1.input`."""
        place = self.module or f"{self.layer_type} L{self.layer_idx}"
        return f"{place}.{self.tensor_name}"


#: Position of a tensor in the order of execution; see `Side.order`.
Position = tuple[float, ...]
#: Part of a tensor: the rank in each group that shards the tensor, or the global rank if the
#: sharding is unknown.
Cell = tuple[int, ...]

_OUTSIDE = -1  #: layer number of a module outside of the transformer layers


@dataclass
class Side:
    """The records of one of the two compared runs.

    Args:
        store: tensors of a single run.
        by_sample: whether keys contain the sample number instead of micro-batch and data rank.
    """

    store: TensorStore
    by_sample: bool = False
    rows: list[Any] = field(init=False)  #: records as named tuples, in the order of the store
    frame: pd.DataFrame = field(init=False)  #: the same records as a table
    #: indices of each tensor's records in `rows`, sorted by rank
    tensors: dict[TensorKey, list[int]] = field(init=False, default_factory=dict)
    repeats: int = field(init=False)  #: number of records left out because of recomputation
    _layers: dict[int, float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        frame = self.store.records
        frame = frame.assign(data_rank=data_ranks(frame))
        keys = _keys(frame, by_sample=self.by_sample)
        again = _recomputed_again(frame, keys)
        self.repeats = int(again.sum())
        self.frame = frame[~again].reset_index(drop=True)
        keys = keys[~again].reset_index(drop=True)
        ranks = self.frame["rank"].fillna(0).astype("int64")
        columns = [*keys.columns]
        keys["occurrence"] = (
            keys.assign(rank=ranks).groupby([*columns, "rank"], dropna=False).cumcount()
        )
        objects = keys.astype(object).where(keys.notna(), None)
        self.rows = list(self.frame.itertuples())
        by_rank = ranks.argsort(kind="stable").tolist()
        fields_of_keys = list(objects.itertuples(index=False, name=None))
        for number in by_rank:
            self.tensors.setdefault(TensorKey(*fields_of_keys[number]), []).append(number)
        self._layers = self._layer_positions()

    def order(self, key: TensorKey) -> Position:
        """Return a sort key that arranges tensors in the order of execution.

        Micro-batches come one after the other, the forward pass of each before its backward pass.
        Within a pass, the counters of the records decide. Pipeline stages have counters of their
        own, so the layers of several stages are sorted by their number first.
        """
        numbers = self.tensors[key]
        first = self.rows[numbers[0]]
        batch = first.sample_idx if self.by_sample else first.micro_batch
        counters = [self.rows[number].counter for number in numbers]
        known = [int(counter) for counter in counters if not pd.isna(counter)]
        return (
            *(-1 if pd.isna(value) else int(value) for value in (first.iteration, batch)),
            int(key.operation == "backward"),
            self._layers.get(numbers[0], 0.0),
            min(known) if known else numbers[0],
            key.data_rank,
        )

    def _layer_positions(self) -> dict[int, float]:
        """Return the position of each record's layer within a pass; empty with one pipeline stage.

        A module outside of the layers comes after the layers that precede it on its rank.
        """
        if not (self.frame["pp_size"].fillna(1) > 1).any():
            return {}
        positions: dict[int, float] = {}
        keys = ["iteration", "micro_batch", "operation", "rank"]
        for names, part in self.frame.groupby(keys, dropna=False, sort=False):
            backward = names[2] == "backward"
            reached = -math.inf
            for row in part.sort_values("counter", kind="stable").itertuples():
                layer = _OUTSIDE if pd.isna(row.layer_idx) else int(row.layer_idx)
                if layer == _OUTSIDE:
                    positions[row.Index] = reached + 0.5
                    continue
                positions[row.Index] = float(-layer if backward else layer)
                reached = max(reached, positions[row.Index])
        return positions

    def cells(self, key: TensorKey, *, by_rank: bool) -> dict[Cell, list[Any]]:
        """Return the records of a tensor, sorted by rank, for each of its parts.

        Args:
            key: key of the tensor.
            by_rank: whether the part of each rank counts as different, as is necessary if the
                sharding of the tensor is unknown.
        """
        cells: dict[Cell, list[Any]] = {}
        for number in self.tensors[key]:
            row = self.rows[number]
            cuts = [] if by_rank else cuts_of(row) or []
            cell = [row.rank] if by_rank else [getattr(row, cut.group) for cut in cuts]
            known = tuple(-1 if pd.isna(rank) else int(rank) for rank in cell)
            cells.setdefault(known, []).append(row)
        return cells

    def layouts(self, key: TensorKey) -> set[tuple[Any, ...]]:
        """Return how a tensor is sharded: the `dims` and group sizes that its records contain.

        The layout of a record without valid `dims` is the empty tuple.
        """
        layouts: set[tuple[Any, ...]] = set()
        for number in self.tensors[key]:
            row = self.rows[number]
            cuts = cuts_of(row)
            sizes = [getattr(row, f"{cut.group}_size") for cut in cuts or ()]
            known = [None if pd.isna(size) else int(size) for size in sizes]
            layouts.add(() if cuts is None else (row.dims, *known))
        return layouts

    def on_rank(self, key: TensorKey, rank: Any) -> Any:
        """Return the record of a tensor on one rank, or None if there is none."""
        wanted = None if pd.isna(rank) else int(rank)
        for number in self.tensors.get(key, ()):
            own = self.rows[number].rank
            if (None if pd.isna(own) else int(own)) == wanted:
                return self.rows[number]
        return None

    def load(self, row: Any) -> Tensor:
        """Return the tensor of a record; codes are returned as the values that they represent."""
        if isinstance(row.codes, dict):
            return dequantize(self.store.load_codes(row))
        return self.store.load(row)

    def load_whole(self, key: TensorKey) -> Tensor:
        """Return the tensor that all shards form, as one rank would hold it.

        Raises:
            ValueError: if shards are missing or do not fit together, or replicas differ.
        """
        numbers = self.tensors[key]
        frame = self.frame.iloc[numbers]
        if any(isinstance(codes, dict) for codes in frame["codes"]):
            raise ValueError("blocks of codes depend on the layout, and the layouts differ")
        whole = reassemble(frame, self.store.load)
        return self._in_order_of_one_rank(whole, key, self.rows[numbers[0]])

    def _in_order_of_one_rank(self, whole: Tensor, key: TensorKey, row: Any) -> Tensor:
        """Return the joined tensor; for a gated fc1, put all of gate before all of up.

        Each rank holds a shard of both, so joining the shards gives gate 0, up 0, gate 1, up 1, ...
        A run with a single rank has gate 0, gate 1, ..., up 0, up 1, ...
        """
        size = row.tp_size
        axes = [cut.axis for cut in cuts_of(row) or () if cut.group == "tp"]
        is_fc1 = str(key.module).endswith("linear_fc1")
        if not is_fc1 or pd.isna(size) or int(size) == 1 or not axes or axes[0] is None:
            return whole
        if not self._is_gated(str(key.module)):
            return whole
        parts = whole.chunk(2 * int(size), axes[0])
        return torch.cat([*parts[::2], *parts[1::2]], axes[0])

    def _is_gated(self, fc1: str) -> bool:
        """Return whether a module `fc1` has two outputs for each input of the following fc2."""
        outputs = self._size(fc1, ("weight", 0), ("output", -1))
        fc2 = f"{fc1.removesuffix('linear_fc1')}linear_fc2"
        inputs = self._size(fc2, ("weight", -1), ("input", -1))
        if outputs is None or inputs is None:
            return bool((self.card.get("arguments") or {}).get("swiglu"))
        return outputs == 2 * inputs

    def _size(self, module: str, *places: tuple[str, int]) -> int | None:
        """Return the size of the first tensor axis in `places` that is known, or None."""
        for name, axis in places:
            if shape := self._shapes.get((module, name)):
                return int(shape[axis])
        return None

    @cached_property
    def _shapes(self) -> dict[tuple[Any, Any], list[int] | None]:
        """Shapes of the whole tensors by module and tensor name."""
        return {(row.module, row.tensor_name): row.global_shape for row in self.rows}

    @property
    def run_id(self) -> str:
        """ID of the run, or "" if the records contain none."""
        return next(iter(self.store.runs()), "")

    @property
    def card(self) -> Mapping[str, Any]:
        """Run card of the run; empty if there is none."""
        return self.store.run_card(self.run_id)


def cuts_of(row: Any) -> list[Cut] | None:
    """Return how a tensor is sharded; None if the `dims` of its record are missing or invalid."""
    try:
        return parse_dims(row.dims) if isinstance(row.dims, str) else None
    except ValueError:
        return None


def _keys(frame: pd.DataFrame, *, by_sample: bool) -> pd.DataFrame:
    """Return the columns of `TensorKey` except the occurrence, with one row per record.

    A weight is the same in all micro-batches of an iteration, so that it has no micro-batch.
    """
    batch = frame["sample_idx" if by_sample else "micro_batch"].astype("Int64")
    columns = {
        "iteration": frame["iteration"],
        "batch": batch.mask(frame["tensor_name"] == "weight"),
        "data_rank": 0 if by_sample else frame["data_rank"],
        **{name: frame[name] for name in TensorKey._fields[3:-1]},
    }
    return pd.DataFrame(columns, index=frame.index)


def _recomputed_again(frame: pd.DataFrame, keys: pd.DataFrame) -> Any:
    """Return a mask of recomputed records whose tensor was also saved by the first forward pass."""
    recomputed = (frame["recomputed"] == True).to_numpy(dtype=bool)  # noqa: E712  dtype object
    if not recomputed.any():
        return recomputed
    texts = keys.assign(rank=frame["rank"]).astype("string").fillna("")
    own = list(texts.itertuples(index=False, name=None))
    first = {key for key, again in zip(own, recomputed, strict=True) if not again}
    pairs = zip(own, recomputed, strict=True)
    return np.array([bool(again) and key in first for key, again in pairs], dtype=bool)
