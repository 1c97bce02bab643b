"""Hold the records of a dump as columns that grow while a run writes.

A column of text stores each distinct text once, and a small integer per record. A dump with
100,000 records takes about 40 MB. Columns only grow, so a view of their first n rows stays valid
while another thread appends.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.dump.reassembly import data_ranks, parse_dims
from megatron.analysis.dump.record_columns import (
    COLUMNS,
    FIELDS,
    RANK_COLUMNS,
    WHOLE,
    Columns,
    WrongTypeError,
)

UNKNOWN = int(np.iinfo(np.int64).min)  #: an unknown integer
_SIZES = ("shape", "global_shape")
_TABLES = ("slice", "codes", "amax", "accumulate")
_FLOATS = ("wall_time",)
_INTEGERS = tuple(name for name in (*FIELDS, "bytes") if name in WHOLE)
_TEXTS = tuple(name for name in FIELDS if name not in (*_INTEGERS, *_SIZES, *_TABLES, *_FLOATS))
#: Columns of texts that, together with the integers and the data-parallel rank below, identify a
#: logical tensor; see `stats.logical_tensors.KEYS`.
_KEY_TEXTS = (
    *("run_id", "layer_type", "module", "operation", "phase", "tensor_name", "quant_type"),
)
_KEY_INTEGERS = ("iteration", "micro_batch", "layer_idx")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class GrowingArray:
    """An array to which values are appended; its memory at least doubles when it is full."""

    def __init__(self, dtype: Any, width: int | None = None):
        self._width = () if width is None else (width,)
        self._data: NDArray[Any] = np.zeros((1024, *self._width), dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def extend(self, values: Any) -> None:
        """Append values, or rows if the array has a width."""
        added = np.asarray(values, self._data.dtype).reshape(-1, *self._width)
        size = self._size + len(added)
        if size > len(self._data):
            grown = np.zeros((max(size, 2 * len(self._data)), *self._width), self._data.dtype)
            grown[: self._size] = self._data[: self._size]
            self._data = grown
        self._data[self._size : size] = added
        self._size = size

    @property
    def values(self) -> NDArray[Any]:
        """View of the values; values that are appended later are not part of it."""
        return self._data[: self._size]


class CodedColumn(dict[Any, int]):
    """A column that stores each distinct value once; as a dictionary, it maps values to codes."""

    def __init__(self) -> None:
        super().__init__()
        self._codes = GrowingArray(np.int32)
        self.distinct: list[Any] = []  #: distinct values, in the order of their codes
        self._hashes = GrowingArray(np.uint64)

    def __missing__(self, value: Any) -> int:
        self[value] = code = len(self.distinct)
        self.distinct.append(value)
        self._hashes.extend([digest(repr(value))])
        return code

    def extend(self, values: Sequence[Any]) -> NDArray[np.int32]:
        """Append values, and return their codes."""
        added = np.fromiter(map(self.__getitem__, values), np.int32, len(values))
        self._codes.extend(added)
        return added

    @property
    def codes(self) -> NDArray[np.int32]:
        """Code of each row."""
        return self._codes.values

    def hashes(self, codes: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return a hash of the value of each code."""
        found: NDArray[np.uint64] = self._hashes.values[codes]
        return found


def digest(text: str) -> int:
    """Return a number of 64 bits that identifies a text; it is the same in every process."""
    encoded = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest(), "little")


def check_tables(row: Mapping[str, Any]) -> None:
    """Raise WrongTypeError if a table in a record holds something that JSON cannot represent."""
    for name in _TABLES:
        _as_key(row.get(name))


class Records:
    """All records of a dump, in the order in which they were read.

    `identity` holds a number per record. It is equal for records of the same logical tensor, that
    is, for its shards and replicas.
    """

    def __init__(self) -> None:
        self.texts = {name: CodedColumn() for name in _TEXTS}
        self.sizes = {name: CodedColumn() for name in _SIZES}
        self.tables = {name: CodedColumn() for name in _TABLES}
        self.integers = {name: GrowingArray(np.int64) for name in _INTEGERS}
        self.floats = {name: GrowingArray(np.float64) for name in _FLOATS}
        self.ranks = CodedColumn()  #: coordinates of each record's rank, as in `RANK_COLUMNS`
        self.folders, self.sources = CodedColumn(), CodedColumn()
        self.names: list[str] = []  #: name of each record's file
        self.origin = GrowingArray(np.int32)  #: number of the file in which the record was found
        self.data_rank = GrowingArray(np.int64)
        self.identity = GrowingArray(np.uint64)
        #: `identity` computed without the field `recomputed`
        self.first_pass = GrowingArray(np.uint64)
        self.path_hash = GrowingArray(np.uint64)
        self._known_dims: dict[Any, bool] = {}

    def __len__(self) -> int:
        return len(self.names)

    def add(self, columns: Columns, origin: int) -> None:
        """Append the rows of a checked table of records.

        Args:
            columns: records of one file.
            origin: number of the file in which they were found.

        Raises:
            WrongTypeError: if a field holds something that JSON cannot represent; no row is added.
        """
        values, size = columns.of, len(columns)
        tables = {name: list(map(_as_key, values[name])) for name in self.tables}  # may raise
        codes = {name: column.extend(values[name]) for name, column in self.texts.items()}
        for name, column in self.sizes.items():
            column.extend([None if shape is None else tuple(shape) for shape in values[name]])
        for name, column in self.tables.items():
            column.extend(tables[name])
        for name, numbers in self.integers.items():
            numbers.extend([UNKNOWN if value is None else value for value in values[name]])
        for name, numbers in self.floats.items():
            numbers.extend([np.nan if value is None else value for value in values[name]])
        coordinates, rank_of_row = columns.ranks
        ranks = self.ranks.extend([coordinates[rank] for rank in rank_of_row])
        folders, names = zip(*map(os.path.split, values["path"]), strict=True)
        folder_codes = self.folders.extend(folders)
        self.sources.extend(values["source"])
        self.data_rank.extend(self._data_ranks(ranks, codes["module"], codes["tensor_name"]))
        hashes = self._path_hashes(folder_codes, names)
        self.path_hash.extend(hashes)
        identity = self._identities(codes, len(self.names), hashes)
        recomputed = self.texts["recomputed"].hashes(codes["recomputed"])
        self.first_pass.extend(identity)
        self.identity.extend(_mixed(identity ^ recomputed))
        self.origin.extend(np.full(size, origin))
        self.names += names  # last, because other threads take the length from here

    def _data_ranks(
        self, ranks: NDArray[np.int32], modules: NDArray[np.int32], names: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Return the data-parallel rank of each row, computed once per combination of fields."""
        keys = np.stack([ranks, modules, names], axis=1)
        combinations, inverse = np.unique(keys, axis=0, return_inverse=True)
        table = pd.DataFrame(
            [self.ranks.distinct[rank] for rank, _, _ in combinations], columns=list(RANK_COLUMNS)
        )
        table = table.astype("Int64")
        table["module"] = [self.texts["module"].distinct[code] for _, code, _ in combinations]
        table["tensor_name"] = [
            self.texts["tensor_name"].distinct[code] for _, _, code in combinations
        ]
        found: NDArray[np.int64] = np.asarray(data_ranks(table))[inverse.reshape(-1)]
        return found

    def _path_hashes(
        self, folder_codes: NDArray[np.int32], names: Sequence[str]
    ) -> NDArray[np.uint64]:
        text = np.fromiter(names, dtype=object, count=len(names))
        try:
            of_names = pd.util.hash_array(text, categorize=False)
        except UnicodeEncodeError:  # a name with bytes that are not valid UTF-8
            of_names = np.array([digest(name) for name in names], np.uint64)
        return _mixed(of_names ^ self.folders.hashes(folder_codes))

    def _identities(
        self, codes: dict[str, NDArray[np.int32]], start: int, paths: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """Return a hash per row that identifies its logical tensor, ignoring `recomputed`.

        A file without a run ID, or with dims that cannot be parsed, is a tensor of its own.
        """
        total = self.data_rank.values[start:].astype(np.uint64)
        for name in _KEY_TEXTS:
            total = _mixed(total ^ self.texts[name].hashes(codes[name]))
        for name in _KEY_INTEGERS:
            total = _mixed(total ^ self.integers[name].values[start:].astype(np.uint64))
        has_run = np.array([run is not None for run in self.texts["run_id"].distinct], bool)
        understood = np.array([*map(self._understood, self.texts["dims"].distinct)], bool)
        alone = ~(has_run[codes["run_id"]] & understood[codes["dims"]])
        return np.where(alone, paths, total)

    def _understood(self, dims: Any) -> bool:
        if dims not in self._known_dims:
            try:
                parse_dims(dims if isinstance(dims, str) else "?")
                self._known_dims[dims] = isinstance(dims, str)
            except ValueError:
                self._known_dims[dims] = False
        return self._known_dims[dims]

    def hashes_of(self, paths: Sequence[str]) -> NDArray[np.uint64]:
        """Return the hashes that `path_hash` contains for files with these paths."""
        if not paths:
            return np.zeros(0, np.uint64)
        folders, names = zip(*map(os.path.split, paths), strict=True)
        codes = np.fromiter(map(self.folders.__getitem__, folders), np.int32, len(folders))
        return self._path_hashes(codes, names)

    def path(self, row: int) -> str:
        """Return the path of a record's file."""
        folder = self.folders.distinct[self.folders.codes[row]]
        return f"{folder}{os.sep}{self.names[row]}"

    def frame(self, rows: Sequence[int] | NDArray[np.int64]) -> pd.DataFrame:
        """Return some records as a table with the columns of `TensorStore.records`."""
        at = np.asarray(rows, dtype=np.int64)
        columns: dict[str, Any] = {}
        for name, column in self.texts.items():
            columns[name] = _objects(column, at, lambda value: value)
        for name, column in self.sizes.items():
            columns[name] = _objects(column, at, lambda size: None if size is None else [*size])
        for name, column in self.tables.items():
            columns[name] = _objects(column, at, _from_key)
        for name, integers in self.integers.items():
            columns[name] = _whole(integers.values[at])
        for name, floats in self.floats.items():
            known = [None if np.isnan(value) else float(value) for value in floats.values[at]]
            columns[name] = pd.Series(known, dtype=object)
        coordinates = [self.ranks.distinct[code] for code in self.ranks.codes[at]]
        for number, name in enumerate(RANK_COLUMNS):
            of_rank = [rank[number] for rank in coordinates]
            columns[name] = _whole(
                np.array([UNKNOWN if value is None else value for value in of_rank], np.int64)
            )
        columns["path"] = pd.Series([self.path(int(row)) for row in at], dtype=object)
        columns["source"] = _objects(self.sources, at, lambda value: value)
        return pd.DataFrame({name: columns[name] for name in COLUMNS})


def _as_key(table: Any) -> str | None:
    try:
        return None if table is None else json.dumps(table, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        raise WrongTypeError("a table holds something other than plain values") from None


@functools.lru_cache(maxsize=256)
def _parsed(key: str) -> Any:
    return json.loads(key)


def _from_key(key: str | None) -> Any:
    return None if key is None else _parsed(key)


def _objects(
    column: CodedColumn, at: NDArray[np.int64], convert: Callable[[Any], Any]
) -> pd.Series[Any]:
    found = np.empty(len(at), dtype=object)
    for position, code in enumerate(column.codes[at]):
        found[position] = convert(column.distinct[code])
    return pd.Series(found, dtype=object)


def _whole(numbers: NDArray[np.int64]) -> Any:
    unknown = numbers == UNKNOWN
    if not unknown.any():
        return numbers
    return pd.arrays.IntegerArray(np.where(unknown, 0, numbers), unknown)


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return numbers whose bits depend on all bits of the given numbers."""
    mixed: NDArray[np.uint64] = numbers * _FACTOR
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(32)
    return mixed
