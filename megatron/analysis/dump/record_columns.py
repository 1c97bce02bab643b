"""What is known of many tensors, as columns: a table of them without a dict for each.

A dump of 100,000 tensors is read batch by batch, and nothing of a batch is kept but its values:
equal texts and shapes once (so no reader may change one), and the rank's place as a number in a
short list of places.
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

#: What is known of one tensor: the fields of TensorRecord (missing or None where unknown), `bytes`.
Row = dict[str, Any]

GROUPS = ("tp", "pp", "dp", "cp", "ep", "etp")  #: parallel groups that a record has a place in
#: Columns of the rank's place: `rank` is the record's `world`.
RANK_COLUMNS = ("rank", "world_size", *(name for g in GROUPS for name in (g, f"{g}_size")))
FIELDS = tuple(item.name for item in fields(TensorRecord) if item.name != "rank")
COLUMNS = (*FIELDS, *RANK_COLUMNS, "bytes", "path", "source")
_OF_ROW = (*FIELDS, "bytes")


def _types() -> dict[str, tuple[type, ...]]:
    """Of each field's values, besides None, as `TensorRecord` declares them."""
    found: dict[str, tuple[type, ...]] = {"bytes": (int,)}
    for name, hint in get_type_hints(TensorRecord).items():
        parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        kinds = tuple(get_origin(part) or part for part in parts if part is not type(None))
        found[name] = (float, int) if kinds == (float,) else kinds
    return found


_TYPES = _types()
WHOLE = (*(name for name in _OF_ROW if _TYPES[name] == (int,)), *RANK_COLUMNS)  #: of whole numbers
_IN_RECORD = ("world", *RANK_COLUMNS[1:])  #: names of the rank's coordinates in a record
_SIZES = ("shape", "global_shape")
_UNKNOWN = dict.fromkeys((*_OF_ROW, "rank"))
_Place = tuple[int | None, ...]
_LOWEST = {"layer_idx": -1}  #: lowest value of a field that holds whole numbers; 0 by default
_TEXT_LIMIT = 1000  #: longest text in characters; module names have some 60
_AXES_LIMIT = 64  #: largest number of sizes in a shape
_BEYOND = 2**63  #: numbers in a record fit in 64 bits


class WrongTypeError(ValueError):
    """A value that is not allowed in its field of a record."""


class _Texts(dict[Any, Any]):
    """Cache that keeps one printable copy of equal texts and maps None to itself.

    Control characters are escaped here, before a text reaches a table, log line, figure or page. A
    module name with a newline could otherwise forge a line of output.
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
    """Equal shapes once, by their numbers."""

    def of(self, shape: list[int] | None) -> list[int] | None:
        """The one list that is equal to `shape`.

        Raises:
            WrongTypeError: it has other values than whole numbers.
        """
        if shape is None:
            return None
        try:
            return self[tuple(shape)]  # type: ignore[no-any-return]
        except (KeyError, TypeError):
            _check_sizes("shape", shape)
            return self.setdefault(tuple(shape), shape)  # type: ignore[no-any-return]


class Columns:
    """The columns of a growing table."""

    def __init__(self) -> None:
        self.of: dict[str, list[Any]] = {name: [] for name in (*_OF_ROW, "path", "source")}
        self._texts, self._sizes = _Texts(), _Sizes()
        self._places: dict[_Place, int] = {}  #: of ranks, with their numbers
        self._place: list[int] = []  #: a row's

    def __len__(self) -> int:
        return len(self._place)

    def add(self, rows: Sequence[Row], paths: Sequence[str], source: str) -> None:
        """Add rows at the end: all of them, or none. What one does not say is unknown.

        Args:
            rows: other keys than those of `Row` are passed over.
            paths: of their files.
            source: index | file | name.

        Raises:
            WrongTypeError: a value that its field cannot have.
        """
        if not rows:
            return
        try:
            turned: Any = zip(*map(operator.itemgetter(*_OF_ROW), rows), strict=True)
            found = dict(zip(_OF_ROW, turned, strict=True))
            ranks = [row["rank"] for row in rows]
        except KeyError:  # an older or foreign dump
            self.add([_UNKNOWN | row for row in rows], paths, source)
            return
        for name, values in found.items():
            _check(name, values)
            if _TYPES[name] == (str,):
                found[name] = self._printable(name, values)
            elif name in _SIZES:
                found[name] = list(map(self._sizes.of, values))
        places = self._numbers(ranks)
        for name, values in found.items():
            self.of[name] += values
        self.of["path"] += paths
        self.of["source"] += [source] * len(paths)
        self._place += places

    def _printable(self, name: str, values: Iterable[str | None]) -> list[str | None]:
        try:
            return list(map(self._texts.__getitem__, values))
        except WrongTypeError as error:
            raise WrongTypeError(f"{name} {error}") from None

    def _numbers(self, ranks: Iterable[Any]) -> list[int]:
        """The number of each rank's place; most rows have that of the row before."""
        last: Any = None
        number = -1
        numbers = []
        for rank in ranks:
            if number < 0 or rank != last:
                known = {} if rank is None else rank
                if not isinstance(known, dict):
                    raise WrongTypeError(f"rank is {_short(rank)}, not a table of coordinates")
                place = tuple(known.get(name) for name in _IN_RECORD)
                for name, value in zip(_IN_RECORD, place, strict=True):
                    if value is not None and not (type(value) is int and abs(value) < _BEYOND):
                        raise WrongTypeError(f"rank's {name} is {_short(value)}, not an integer")
                _check_place(dict(zip(_IN_RECORD, place, strict=True)))
                number, last = self._places.setdefault(place, len(self._places)), rank
            numbers.append(number)
        return numbers

    def cut(self, length: int) -> None:
        """Leave the first rows."""
        for values in (*self.of.values(), self._place):
            del values[length:]

    def order(self, positions: Iterable[int]) -> list[int]:
        """These rows by run, then as written; the path decides between ranks."""
        columns = [self.of[name] for name in ("run_id", "timestamp", "counter", "path")]
        keys = [(a or "", b or "", c or 0, d) for a, b, c, d in zip(*columns, strict=True)]
        return sorted(positions, key=keys.__getitem__)

    def table(self, positions: Sequence[int]) -> pd.DataFrame:
        """These rows as a table, in this order."""
        at = np.array(positions, dtype=np.int64)
        made: dict[str, Any] = {}
        for name, values in self.of.items():
            if name in WHOLE:
                made[name] = _whole_numbers(values, at)
            else:  # as they are: pandas would turn None into NaN, and lists into columns
                column = np.fromiter(values, dtype=object, count=len(values))
                made[name] = pd.Series(column[at], dtype=object)
        place = np.array(self._place, dtype=np.int64)[at]
        turned = zip(*self._places, strict=True) if self._places else ((),) * len(RANK_COLUMNS)
        for name, numbers in zip(RANK_COLUMNS, turned, strict=True):
            made[name] = _whole_numbers(numbers, place)
        return pd.DataFrame({name: made[name] for name in COLUMNS}, copy=False)


def _check(name: str, values: Sequence[Any]) -> None:
    """Refuse values with a wrong type and impossible values. None means unknown."""
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
        if any(abs(value) >= _BEYOND for value in known):
            raise WrongTypeError(f"{name} is beyond 64 bits")
        if known and min(known) < lowest:
            raise WrongTypeError(f"{name} is {min(known)}; the lowest is {lowest}")
    elif _TYPES[name] == (float, int) and not all(map(_is_finite, known)):
        wrong = next(value for value in known if not _is_finite(value))
        raise WrongTypeError(f"{name} is {_short(wrong)}, not a finite number")
    elif name in _CHECKS:
        for value in known:
            _CHECKS[name](value)


def _is_finite(value: float) -> bool:
    return abs(value) < _BEYOND and math.isfinite(value)


def _check_sizes(name: str, sizes: Any) -> None:
    """Refuse a value that is not a list of sizes.

    Raises:
        WrongTypeError: if it is not such a list; the message says why.
    """
    if not isinstance(sizes, list) or len(sizes) > _AXES_LIMIT:
        found = f"a {type(sizes).__name__}" if not isinstance(sizes, list) else f"{len(sizes)} long"
        raise WrongTypeError(f"{name} is {found}, not a list of at most {_AXES_LIMIT} sizes")
    if not set(map(type, sizes)) <= {int}:
        raise WrongTypeError(f"{name} has values that are not whole numbers")
    if sizes and not (min(sizes) >= 0 and max(sizes) < _BEYOND):
        raise WrongTypeError(f"{name} has a size that is negative or beyond 64 bits")


def _check_slice(part: dict[Any, Any]) -> None:
    for name in ("of", "start", "step"):
        _check_sizes(f"slice's {name}", part.get(name))
    if len({len(part[name]) for name in ("of", "start", "step")}) > 1 or 0 in part["step"]:
        raise WrongTypeError("slice has a step of 0, or not one number per dimension")


def _check_codes(codes: dict[Any, Any]) -> None:
    _check_sizes("codes' shape", codes.get("shape"))
    axis, dtype, dims = codes.get("axis"), codes.get("dtype"), len(codes["shape"])
    if type(axis) is not int or not -dims <= axis < dims:
        raise WrongTypeError(f"codes' axis is {_short(axis)}, not one of its {dims} dimensions")
    if dtype not in ("float32", "float16", "bfloat16", "float64"):
        raise WrongTypeError(f"codes' dtype is {_short(dtype)}, which no operand has")


_CHECKS = {"slice": _check_slice, "codes": _check_codes}


def _check_place(place: dict[str, int | None]) -> None:
    """Refuse ranks that no run can have."""
    for name, value in place.items():
        lowest = 1 if name.endswith("_size") else 0
        if value is not None and value < lowest:
            raise WrongTypeError(f"rank's {name} is {value}; the lowest is {lowest}")
    for group in ("world", *GROUPS):
        rank, size = place[group], place[f"{group}_size"]
        if rank is not None and size is not None and rank >= size:
            raise WrongTypeError(f"rank's {group} is {rank}, but the group has size {size}")


def _short(value: Any) -> str:
    """Return a value as a message shows it; lists and objects are shown by type alone."""
    kind = type(value).__name__
    return reprlib.repr(value) if isinstance(value, (bool, int, float, str)) else f"a {kind}"


def _whole_numbers(values: Sequence[int | None], at: Any) -> Any:
    """Those at `at`: int64, or pandas' Int64 with NA where some are unknown."""
    if None not in values:
        return np.array(values, dtype=np.int64)[at]
    unknown = np.fromiter((value is None for value in values), dtype=bool, count=len(values))[at]
    known = np.array([value or 0 for value in values], dtype=np.int64)[at]
    return pd.arrays.IntegerArray(known, unknown) if unknown.any() else known
