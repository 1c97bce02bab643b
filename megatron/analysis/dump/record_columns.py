"""Store the records of many tensors as columns, which takes less memory than dictionaries.

A dump may have 100,000 tensors, so its records are read in batches and only their values are kept.
Equal strings and equal shapes are stored once, so they must not be modified. The coordinates of a
rank are stored as an index into a short list.
"""

from __future__ import annotations

import contextlib
import math
import operator
import reprlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np
import pandas as pd

from megatron.bounded_files import printable
from megatron.tensor_record import TensorRecord

#: Record of one tensor: a dictionary of the fields of `TensorRecord` and the file size `bytes`. An
#: unknown field is None, or its key is missing.
Row = dict[str, Any]

GROUPS = ("tp", "pp", "dp", "cp", "ep", "etp")  #: names of the parallel groups
#: Columns with the rank in each parallel group and the size of the group. `rank` is the global
#: rank, which a record stores under the key "world".
RANK_COLUMNS = ("rank", "world_size", *(name for g in GROUPS for name in (g, f"{g}_size")))
FIELDS = tuple(item.name for item in fields(TensorRecord) if item.name != "rank")
COLUMNS = (*FIELDS, *RANK_COLUMNS, "bytes", "path", "source")
_OF_ROW = (*FIELDS, "bytes")


def _types() -> dict[str, tuple[type, ...]]:
    """Return the Python types that `TensorRecord` allows for each field, apart from None."""
    types: dict[str, tuple[type, ...]] = {"bytes": (int,)}
    for name, hint in get_type_hints(TensorRecord).items():
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = tuple(get_origin(part) or part for part in parts if part is not type(None))
        types[name] = (float, int) if kinds == (float,) else kinds
    return types


_TYPES = _types()
#: Integer columns of the table of records.
WHOLE = (*(name for name in _OF_ROW if _TYPES[name] == (int,)), *RANK_COLUMNS)
#: Keys under which a record stores the coordinates of its rank: the global rank and the world size,
#: then the rank in each parallel group and the size of the group.
_IN_RECORD = ("world", *RANK_COLUMNS[1:])
_SIZES = ("shape", "global_shape")
_UNKNOWN = dict.fromkeys((*_OF_ROW, "rank"))
_Coordinates = tuple[int | None, ...]  #: coordinates of a rank in the order of _IN_RECORD
_LOWEST = {"layer_idx": -1}  #: minimum values of integer fields whose minimum is not 0
_TEXT_LIMIT = 1000  #: maximum length of a string in characters; module names have about 60
_AXES_LIMIT = 64  #: maximum number of dimensions in a shape
_TOO_LARGE = 2**63  #: numbers in a record must be below this, to fit into int64


class WrongTypeError(ValueError):
    """Error raised if a field of a record has a value of the wrong type or an impossible value."""


class _Texts(dict[Any, Any]):
    """A cache that maps each string to one shared printable copy, and None to None.

    Control characters are escaped here, before a string reaches a table, log, figure or page.
    Otherwise, a module name with a newline could forge a line of output.
    """

    def __missing__(self, text: str | None) -> str | None:
        shown = text
        if text is not None:
            if len(text) > _TEXT_LIMIT:
                raise WrongTypeError(f"has {len(text)} characters; at most {_TEXT_LIMIT} are read")
            if any("\ud800" <= letter <= "\udfff" for letter in text):
                raise WrongTypeError("has a lone surrogate, which is not a character")
            shown = printable(text, limit=_TEXT_LIMIT)
        self[text] = shown
        return shown


class _Sizes(dict[Any, Any]):
    """A cache that maps each shape to one list that all rows with this shape share."""

    def of(self, shape: list[int] | None) -> list[int] | None:
        """Return the cached list equal to `shape`; if there is none, add `shape` to the cache.

        Raises:
            WrongTypeError: if the shape is not a list of sizes.
        """
        if shape is None:
            return None
        try:
            return self[tuple(shape)]  # type: ignore[no-any-return]
        except (KeyError, TypeError):
            _check_sizes("shape", shape)
            return self.setdefault(tuple(shape), shape)  # type: ignore[no-any-return]


class Columns:
    """A table to which records are added, stored as lists; rows share the coordinates of a rank."""

    def __init__(self) -> None:
        self.of: dict[str, list[Any]] = {name: [] for name in (*_OF_ROW, "path", "source")}
        self._texts, self._sizes = _Texts(), _Sizes()
        self._coordinates: dict[_Coordinates, int] = {}  #: index of each rank's coordinates
        self._rank_of_row: list[int] = []  #: index in `_coordinates` of each row's rank

    def __len__(self) -> int:
        return len(self._rank_of_row)

    @property
    def ranks(self) -> tuple[list[_Coordinates], list[int]]:
        """Distinct coordinates of ranks, and for each row the index of its rank's coordinates.

        A rank's coordinates are in the order of `RANK_COLUMNS`.
        """
        return [*self._coordinates], self._rank_of_row

    def add(self, rows: Sequence[Row], paths: Sequence[str], source: str) -> None:
        """Append all given rows to the table, or none of them if any row is invalid.

        Args:
            rows: records to append. Missing fields count as unknown, and keys that are not fields
                of `Row` are ignored.
            paths: path of the file of each row.
            source: source of the rows: `index`, `file` or `name`.

        Raises:
            WrongTypeError: if a field has a value that is not allowed.
        """
        if not rows:
            return
        try:
            transposed: Any = zip(*map(operator.itemgetter(*_OF_ROW), rows), strict=True)
            columns = dict(zip(_OF_ROW, transposed, strict=True))
            ranks = [row["rank"] for row in rows]
        except KeyError:  # dumps written by other programs may lack fields
            self.add([_UNKNOWN | row for row in rows], paths, source)
            return
        for name, values in columns.items():
            _check(name, values)
            if _TYPES[name] == (str,):
                columns[name] = self._printable(name, values)
            elif name in _SIZES:
                columns[name] = list(map(self._sizes.of, values))
        numbers = self._numbers(ranks)
        for name, values in columns.items():
            self.of[name] += values
        self.of["path"] += paths
        self.of["source"] += [source] * len(paths)
        self._rank_of_row += numbers

    def _printable(self, name: str, values: Iterable[str | None]) -> list[str | None]:
        try:
            return list(map(self._texts.__getitem__, values))
        except WrongTypeError as error:
            raise WrongTypeError(f"{name} {error}") from None

    def _numbers(self, ranks: Iterable[Any]) -> list[int]:
        """Return the index of each rank in `_coordinates`, to which new ranks are added.

        Most rows have the same rank as the previous row, whose index is then reused.
        """
        last: Any = None
        number = -1
        numbers = []
        for rank in ranks:
            if number < 0 or rank != last:
                by_name = {} if rank is None else rank
                if not isinstance(by_name, dict):
                    raise WrongTypeError(f"rank is {_short(rank)}, not a table of coordinates")
                coordinates = tuple(by_name.get(name) for name in _IN_RECORD)
                for name, value in zip(_IN_RECORD, coordinates, strict=True):
                    if value is not None and not (type(value) is int and abs(value) < _TOO_LARGE):
                        raise WrongTypeError(f"rank's {name} is {_short(value)}, not an integer")
                _check_coordinates(dict(zip(_IN_RECORD, coordinates, strict=True)))
                number = self._coordinates.setdefault(coordinates, len(self._coordinates))
                last = rank
            numbers.append(number)
        return numbers

    def truncate(self, length: int) -> None:
        """Remove all rows after the first `length` rows."""
        for values in (*self.of.values(), self._rank_of_row):
            del values[length:]

    def order(self, positions: Iterable[int]) -> list[int]:
        """Return the given row numbers, sorted by run, then by time of writing, then by path."""
        columns = [self.of[name] for name in ("run_id", "timestamp", "counter", "path")]
        keys = [(a or "", b or "", c or 0, d) for a, b, c, d in zip(*columns, strict=True)]
        return sorted(positions, key=keys.__getitem__)

    def table(self, positions: Sequence[int]) -> pd.DataFrame:
        """Return a table of the rows with the given numbers, in the given order."""
        at = np.array(positions, dtype=np.int64)
        columns: dict[str, Any] = {}
        for name, values in self.of.items():
            if name in WHOLE:
                columns[name] = _whole_numbers(values, at)
            else:  # dtype object keeps pandas from changing None into NaN and lists into columns
                column = np.fromiter(values, dtype=object, count=len(values))
                columns[name] = pd.Series(column[at], dtype=object)
        ranks = np.array(self._rank_of_row, dtype=np.int64)[at]
        known = self._coordinates
        coordinates = zip(*known, strict=True) if known else ((),) * len(RANK_COLUMNS)
        for name, numbers in zip(RANK_COLUMNS, coordinates, strict=True):
            columns[name] = _whole_numbers(numbers, ranks)
        return pd.DataFrame({name: columns[name] for name in COLUMNS}, copy=False)


def _check(name: str, values: Sequence[Any]) -> None:
    """Raise WrongTypeError if a value of a field has the wrong type or is impossible.

    None is allowed for every field and means unknown.
    """
    lowest = _LOWEST.get(name, 0)
    if name in WHOLE and set(map(type, values)) == {int}:
        with contextlib.suppress(OverflowError):
            if min(array("q", values)) >= lowest:  # fast path: check all values at once
                return
    allowed = (*_TYPES[name], type(None))
    if not set(map(type, values)) <= set(allowed):
        wrong = next(value for value in values if type(value) not in allowed)
        kinds = " or ".join(each.__name__ for each in _TYPES[name])
        raise WrongTypeError(f"{name} is {_short(wrong)}, not {kinds}")
    known = [value for value in values if value is not None]
    if name in WHOLE:
        if any(abs(value) >= _TOO_LARGE for value in known):
            raise WrongTypeError(f"{name} does not fit into 64 bits")
        if known and min(known) < lowest:
            raise WrongTypeError(f"{name} is {min(known)}; the lowest is {lowest}")
    elif _TYPES[name] == (float, int) and not all(map(_is_finite, known)):
        wrong = next(value for value in known if not _is_finite(value))
        raise WrongTypeError(f"{name} is {_short(wrong)}, not a finite number")
    elif name in _CHECKS:
        for value in known:
            _CHECKS[name](value)


def _is_finite(value: float) -> bool:
    return abs(value) < _TOO_LARGE and math.isfinite(value)


def _check_sizes(name: str, sizes: Any) -> None:
    """Raise WrongTypeError with the reason if a value is not a valid list of sizes."""
    if not isinstance(sizes, list) or len(sizes) > _AXES_LIMIT:
        many = isinstance(sizes, list)
        actual = f"a list of {len(sizes)} values" if many else f"a {type(sizes).__name__}"
        raise WrongTypeError(f"{name} is {actual}, not a list of at most {_AXES_LIMIT} sizes")
    if not set(map(type, sizes)) <= {int}:
        raise WrongTypeError(f"{name} has values that are not integers")
    if sizes and not (min(sizes) >= 0 and max(sizes) < _TOO_LARGE):
        raise WrongTypeError(f"{name} has a size that is negative or does not fit into 64 bits")


def _check_slice(part: dict[Any, Any]) -> None:
    for name in ("of", "start", "step"):
        _check_sizes(f"slice's {name}", part.get(name))
    if len({len(part[name]) for name in ("of", "start", "step")}) > 1 or 0 in part["step"]:
        raise WrongTypeError("slice has a step of 0, or not one number per dimension")


def _check_codes(codes: dict[Any, Any]) -> None:
    _check_sizes("codes' shape", codes.get("shape"))
    axis, dtype, dims = codes.get("axis"), codes.get("dtype"), len(codes["shape"])
    if type(axis) is not int or not -dims <= axis < dims:
        raise WrongTypeError(
            f"codes' axis is {_short(axis)}, but the codes' shape has {dims} dimension(s)"
        )
    if dtype not in ("float32", "float16", "bfloat16", "float64"):
        raise WrongTypeError(f"codes' dtype is {_short(dtype)}, which no operand has")


def _check_amax(amaxes: dict[Any, Any]) -> None:
    for value in amaxes.values():
        if type(value) is not float or not 0 <= value < math.inf:
            raise WrongTypeError(f"amax has {_short(value)}, not a finite float of 0 or more")


def _check_accumulate(names: dict[Any, Any]) -> None:
    for text in (*names, *names.values()):
        if type(text) is not str or len(text) > _TEXT_LIMIT:
            raise WrongTypeError(f"accumulate has {_short(text)}, not the name of an accumulator")


_CHECKS = {
    "slice": _check_slice,
    "codes": _check_codes,
    "amax": _check_amax,
    "accumulate": _check_accumulate,
}


def _check_coordinates(coordinates: dict[str, int | None]) -> None:
    """Raise WrongTypeError for impossible coordinates of a rank, such as rank 4 in a group of 4."""
    for name, value in coordinates.items():
        lowest = 1 if name.endswith("_size") else 0
        if value is not None and value < lowest:
            raise WrongTypeError(f"rank's {name} is {value}; the lowest is {lowest}")
    for group in ("world", *GROUPS):
        rank, size = coordinates[group], coordinates[f"{group}_size"]
        if rank is not None and size is not None and rank >= size:
            raise WrongTypeError(f"rank's {group} is {rank}, but the group has size {size}")


def _short(value: Any) -> str:
    """Return a short description of a value for a message.

    Lists, dictionaries and other objects are described by their type only.
    """
    kind = type(value).__name__
    return reprlib.repr(value) if isinstance(value, (bool, int, float, str)) else f"a {kind}"


def _whole_numbers(values: Sequence[int | None], at: Any) -> Any:
    """Return `values` at the positions `at` as int64, or as pandas Int64 if some are unknown."""
    if None not in values:
        return np.array(values, dtype=np.int64)[at]
    unknown = np.fromiter((value is None for value in values), dtype=bool, count=len(values))[at]
    known = np.array([value or 0 for value in values], dtype=np.int64)[at]
    return pd.arrays.IntegerArray(known, unknown) if unknown.any() else known
