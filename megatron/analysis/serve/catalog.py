"""List the logical tensors of a dump as columns, and find them by ID, place, layer or iteration.

A catalog is a snapshot: it does not change when the run writes more. An ID is 16 hexadecimal
digits, computed from the fields that identify a tensor, so that an address with an ID stays valid
after a restart. An ID in an address is only compared with the IDs in the catalog.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.dump.run_endings import ending
from megatron.analysis.figures.figure_data import kind_of, short_module
from megatron.analysis.serve.records import UNKNOWN, Records
from megatron.analysis.stats.matrix_view import is_operand, used_by

GEMMS = ("fprop", "dgrad", "wgrad")  #: GEMMs in order of precedence
AXES = ("row", "column")
_ID = re.compile(r"[0-9a-f]{16}")


class Catalog:
    """The logical tensors of a dump, in the order in which their first records were read.

    Attributes with one element per tensor: `ids`, `rows` (row of the first record in `Records`),
    `run`, `place`, `module` (codes), `layer`, `iteration`, `micro_batch`, `data_rank`, `operand`
    and `files`.

    Args:
        records: records of the dump; those that are added later are not part of the snapshot.
        bad: numbers of the index files whose records are ignored.
        cards: run cards by run ID.
        version: number of this snapshot.
    """

    def __init__(
        self,
        records: Records,
        bad: frozenset[int],
        cards: Mapping[str, dict[str, Any]],
        version: int,
    ):
        self.records, self.cards, self.version = records, cards, version
        size = len(records)
        self._keep = self._kept(size, bad)
        identity = records.identity.values[:size]
        kept = np.flatnonzero(self._keep)
        first_of, files = _first_rows(identity[kept])
        rows = kept[first_of]
        rows, files = self._first_passes(rows, files)
        self.rows: NDArray[np.int64] = rows
        self.files: NDArray[np.int64] = files
        self.ids: NDArray[np.uint64] = identity[rows]
        self.run = records.texts["run_id"].codes[rows]
        self.layer = _known(records.integers["layer_idx"].values[rows], -1)
        self.iteration = _known(records.integers["iteration"].values[rows], 0)
        self.micro_batch = _known(records.integers["micro_batch"].values[rows], 0)
        self.data_rank = records.data_rank.values[rows]
        self.nbytes = _known(records.integers["bytes"].values[rows], 0)
        #: number that changes if a tensor is written again, or if more of its shards are found;
        #: it does not depend on the order in which the indexes are read
        self.stamps: NDArray[np.uint64] = self._stamps()
        self._describe(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def _kept(self, size: int, bad: frozenset[int]) -> NDArray[np.bool_]:
        """Return a mask of records to use: none of codes or ignored indexes, and one per path."""
        records = self.records
        codes = records.tables["codes"]
        is_value = np.array([value is None for value in codes.distinct], dtype=bool)
        keep: NDArray[np.bool_] = is_value[codes.codes[:size]]
        if bad:
            keep &= ~np.isin(records.origin.values[:size], [*bad])
        hashes = records.path_hash.values[:size]
        if len(np.unique(hashes)) < size:
            # If several lines list the same file, the last one counts. An index takes precedence
            # over the file itself.
            listed = records.origin.values[:size] > 0
            order = np.lexsort((np.arange(size), listed & keep))
            last = pd.Series(hashes[order]).duplicated(keep="last").to_numpy()
            keep[order[last]] = False
        return keep

    def _first_passes(
        self, rows: NDArray[np.int64], files: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Leave out tensors that activation recomputation saved a second time."""
        column = self.records.texts["recomputed"]
        is_repeat = np.array([value is True for value in column.distinct], bool)[column.codes[rows]]
        self.repeats = 0
        if not is_repeat.any():
            return rows, files
        passes = self.records.first_pass.values[rows]
        twice = is_repeat & np.isin(passes, passes[~is_repeat])
        self.repeats = int(twice.sum())
        return rows[~twice], files[~twice]

    def _stamps(self) -> NDArray[np.uint64]:
        """Return one number per tensor: the sum of its shards' hashes of time and size."""
        records = self.records

        def stamps_of(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
            times = records.floats["wall_time"].values[rows].view(np.uint64)
            sizes = _known(records.integers["bytes"].values[rows], 0).astype(np.uint64)
            stamps: NDArray[np.uint64] = times ^ (sizes << np.uint64(17))
            return stamps

        found = stamps_of(self.rows)
        sharded = self.files > 1
        if sharded.any():
            rows, ids = self._rows_by_id
            starts = np.flatnonzero(np.append(True, ids[1:] != ids[:-1]))
            sums = np.add.reduceat(stamps_of(rows), starts)
            found[sharded] = sums[np.searchsorted(ids[starts], self.ids[sharded])]
        return found

    def _describe(self, rows: NDArray[np.int64]) -> None:
        """Compute the place, GEMMs and kind of each tensor, once per combination of fields."""
        texts = self.records.texts
        names = ("layer_type", "module", "operation", "tensor_name")
        codes = np.stack([texts[name].codes[rows] for name in names], axis=1)
        combinations, first, inverse = np.unique(
            codes, axis=0, return_index=True, return_inverse=True
        )
        order = np.argsort(first, kind="stable")
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        inverse = position[inverse.reshape(-1)]
        places: dict[str, int] = {}
        of_place: list[int] = []
        kinds, operands, axes = [], [], []
        for combination in combinations[order]:
            fields = [texts[name].distinct[c] for name, c in zip(names, combination, strict=True)]
            layer_type, module, operation, tensor_name = fields
            part = short_module(str(module or layer_type or ""))
            name = str(tensor_name or "tensor")
            of_place.append(places.setdefault(f"{part} {name}".strip(), len(places)))
            kinds.append(kind_of(name, operation))
            operands.append(is_operand(layer_type, tensor_name))
            axes.append([_axis(layer_type, tensor_name, gemm) for gemm in GEMMS])
        self.places: list[str] = [*places]
        self.place: NDArray[np.int64] = np.array(of_place, np.int64)[inverse]
        self.operand: NDArray[np.bool_] = np.array(operands, bool)[inverse]
        #: for each tensor and GEMM: index in `AXES` of the axis along which blocks run, or -1 if
        #: the tensor is not an operand of the GEMM
        self.axis_of_gemm: NDArray[np.int64] = np.array(axes, np.int64).reshape(-1, 3)[inverse]
        kind_of_place = {places_of: kinds[i] for i, places_of in enumerate(of_place)}
        operand_of_place = {places_of: operands[i] for i, places_of in enumerate(of_place)}
        self.place_kinds = [kind_of_place[number] for number in range(len(places))]
        self.place_operands = [operand_of_place[number] for number in range(len(places))]

    @property
    def first_axis(self) -> NDArray[np.int64]:
        """Index in `AXES` of the axis along which the blocks of each tensor run.

        It is the axis in the first GEMM that quantizes the tensor; rows if no GEMM quantizes it.
        """
        axes = self.axis_of_gemm
        choice = np.argmax(axes >= 0, axis=1)
        found: NDArray[np.int64] = np.maximum(axes[np.arange(len(axes)), choice], 0)
        return found

    def axis_in(self, gemm: str) -> NDArray[np.int64]:
        """Return the column of `axis_of_gemm` for a GEMM; without a GEMM, return `first_axis`."""
        return self.axis_of_gemm[:, GEMMS.index(gemm)] if gemm in GEMMS else self.first_axis

    @functools.cached_property
    def runs(self) -> list[dict[str, Any]]:
        """One dictionary per run, in the order in which the runs started.

        The keys are `code`, `id`, `type`, `tensors` (the number of tensors), `iterations`,
        `started` and `ending`.
        """
        texts = self.records.texts
        found = []
        types = texts["quant_type"]
        order = np.argsort(self.run, kind="stable")
        ends = np.flatnonzero(np.diff(self.run[order])) + 1
        for own in np.split(order, ends) if len(order) else ():
            code = int(self.run[own[0]])
            run_id = texts["run_id"].distinct[code] or ""
            first = self.rows[own[0]]
            started = texts["timestamp"].distinct[texts["timestamp"].codes[first]] or ""
            iterations = np.unique(self.iteration[own])
            found.append(
                {
                    "code": code,
                    "id": run_id,
                    "type": str(types.distinct[types.codes[first]] or "unknown"),
                    "tensors": len(own),
                    "iterations": iterations.tolist(),
                    "started": started,
                    "ending": ending(self.cards.get(run_id, {})),
                }
            )
        return sorted(found, key=lambda run: (run["started"], run["id"]))

    @functools.cached_property
    def _order(self) -> NDArray[np.int64]:
        return np.argsort(self.ids, kind="stable")

    def find(self, text: str) -> int | None:
        """Return the index of the tensor with an ID, or None if no tensor has this ID."""
        if not _ID.fullmatch(text):
            return None
        wanted = np.uint64(int(text, 16))
        order = self._order
        at = int(np.searchsorted(self.ids[order], wanted))
        if at < len(order) and self.ids[order[at]] == wanted:
            return int(order[at])
        return None

    def id_of(self, tensor: int) -> str:
        """Return the ID of a tensor as text."""
        return f"{int(self.ids[tensor]):016x}"

    def field(self, tensor: int, name: str) -> Any:
        """Return a text field of a tensor's first record."""
        column = self.records.texts[name]
        return column.distinct[column.codes[self.rows[tensor]]]

    def name(self, tensor: int) -> str:
        """Return a short name, such as `L3 fc1 input`."""
        layer = int(self.layer[tensor])
        place = self.places[int(self.place[tensor])]
        return f"L{layer} {place}" if layer >= 0 else place

    def same(self, tensor: int, **changed: int) -> int | None:
        """Return the tensor that differs from a given one only in the `changed` columns, or None.

        Args:
            tensor: index of the given tensor.
            changed: values of columns (`run`, `iteration`, `layer`, `micro_batch`, `data_rank`).
        """
        mask = self.place == self.place[tensor]
        for column in ("run", "iteration", "layer", "micro_batch", "data_rank"):
            values = getattr(self, column)
            mask &= values == changed.get(column, values[tensor])
        found = np.flatnonzero(mask)
        return int(found[0]) if len(found) else None

    def variants(self, tensor: int, column: str) -> dict[int, int]:
        """Return a tensor and those that differ from it only in `column`, keyed by that column.

        Args:
            tensor: index of the given tensor.
            column: `run`, `iteration`, `layer`, `micro_batch` or `data_rank`.
        """
        mask = self.place == self.place[tensor]
        for name in ("run", "iteration", "layer", "micro_batch", "data_rank"):
            if name != column:
                values = getattr(self, name)
                mask &= values == values[tensor]
        numbers = np.flatnonzero(mask)
        values = getattr(self, column)[numbers]
        order = np.argsort(values, kind="stable")
        found = {int(values[at]): int(numbers[at]) for at in order[::-1]}
        found[int(getattr(self, column)[tensor])] = tensor
        return dict(sorted(found.items()))

    def neighbors(self, tensor: int) -> dict[str, int]:
        """Return the tensors in the layer and pass of a given one, keyed by place."""
        mask = np.ones(len(self), bool)
        for name in ("run", "iteration", "layer", "micro_batch", "data_rank"):
            values = getattr(self, name)
            mask &= values == values[tensor]
        found = {self.places[int(self.place[i])]: int(i) for i in np.flatnonzero(mask)[::-1]}
        found[self.places[int(self.place[tensor])]] = tensor
        return dict(sorted(found.items(), key=lambda item: self.rows[item[1]]))

    def heads(self, tensor: int) -> tuple[int, int] | None:
        """Return the numbers of sequences and heads of an attention layer; None if unknown."""
        texts, sizes = self.records.texts, self.records.sizes["shape"]
        names = texts["tensor_name"]
        modules = texts["module"].codes[self.rows]
        for name in ("query", "attention_probs"):
            if name in names:
                mask = (names.codes[self.rows] == names[name]) & (modules == modules[tensor])
                for other in np.flatnonzero(mask & (self.run == self.run[tensor]))[:1]:
                    shape = sizes.distinct[sizes.codes[self.rows[other]]]
                    if shape is not None and len(shape) == 4:
                        pair = shape[1:3] if name == "query" else shape[0:2]
                        return int(pair[0]), int(pair[1])
        return None

    def records_of(self, tensors: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows in `Records` of all shards and replicas of some tensors."""
        chosen = np.asarray(tensors, dtype=np.int64)
        if (self.files[chosen] == 1).all():
            rows: NDArray[np.int64] = self.rows[chosen]
            return rows
        of_id = self._rows_by_id
        parts = [of_id[0][start:end] for start, end in map(self._span, self.ids[chosen])]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    @functools.cached_property
    def _rows_by_id(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        kept = np.flatnonzero(self._keep)
        identity = self.records.identity.values[: len(self._keep)][kept]
        order = np.argsort(identity, kind="stable")
        return kept[order], identity[order]

    def _span(self, wanted: np.uint64) -> tuple[int, int]:
        sorted_ids = self._rows_by_id[1]
        return (
            int(np.searchsorted(sorted_ids, wanted, "left")),
            int(np.searchsorted(sorted_ids, wanted, "right")),
        )

    def values_of_layers(self, tensors: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return, for each layer of some tensors, the row in `Records` of one V tensor.

        `stats.logical_tensors` reads the size of an attention head from it.
        """
        column = self.records.texts["tensor_name"]
        if "value" not in column:
            return np.zeros(0, np.int64)
        rows = self._value_rows
        chosen = np.asarray(tensors, dtype=np.int64)
        wanted = {(int(self.run[i]), int(self.layer[i])) for i in chosen}
        found = [rows[key] for key in wanted if key in rows]
        return np.array(sorted(found), np.int64)

    @functools.cached_property
    def _value_rows(self) -> dict[tuple[int, int], int]:
        column = self.records.texts["tensor_name"]
        tensors = np.flatnonzero(column.codes[self.rows] == column["value"])
        return {(int(self.run[i]), int(self.layer[i])): int(self.rows[i]) for i in tensors[::-1]}


def _first_rows(identity: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each tensor's first row and number of rows, in the order of the first rows."""
    _, first, counts = np.unique(identity, return_index=True, return_counts=True)
    order = np.argsort(first, kind="stable")
    return first[order], counts[order]


def _known(numbers: NDArray[np.int64], unknown: int) -> NDArray[np.int64]:
    return np.where(numbers == UNKNOWN, unknown, numbers)


def _axis(layer_type: Any, tensor_name: Any, gemm: str) -> int:
    axes = [gemm in used_by(layer_type, tensor_name, axis).split("+") for axis in AXES]
    return axes.index(True) if True in axes else -1
