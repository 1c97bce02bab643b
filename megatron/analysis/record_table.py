"""The records of a dump as a pandas table, and how a part of it is named.

One row a tensor. The columns are the fields of `TensorRecord`, with the rank's coordinates in
columns of their own, and where the tensor lies. What is unknown (of a file without metadata) is
None, or NA in a column of numbers.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.tensor_files import Row
from megatron.tensor_record import COMPONENTS, TENSOR_NAMES, TensorRecord

GROUPS = ("tp", "pp", "dp", "cp", "ep", "etp")  #: parallel groups that a record has a place in
#: Columns of the rank's place: `rank` is the record's `world`.
RANK_COLUMNS = ("rank", "world_size", *(name for g in GROUPS for name in (g, f"{g}_size")))
FIELDS = tuple(item.name for item in fields(TensorRecord) if item.name != "rank")
COLUMNS = (*FIELDS, *RANK_COLUMNS, "bytes", "path", "source")

_WHOLE = ("iteration", "micro_batch", "sample_idx", "counter", "layer_idx", "schema_version",
          "bytes", *RANK_COLUMNS)  # fmt: skip
_IN_RECORD = {"rank": "world"}  #: names of the rank's place in a record, where others
_ALIASES = {"layer": "layer_idx", "world": "rank"}
_ACCEPTED: Mapping[str, Collection[str]] = {
    "layer_type": TENSOR_NAMES,
    "operation": ("forward", "backward"),
    "phase": ("pre", "post"),
    "component": COMPONENTS.values(),
    "tensor_name": dict.fromkeys(name for names in TENSOR_NAMES.values() for name in names),
}


def table_of(rows: Sequence[Row]) -> pd.DataFrame:
    """The table of these rows, in their order."""
    ranks = [row["rank"] if isinstance(row["rank"], dict) else {} for row in rows]
    columns = _columns(rows, (*FIELDS, "bytes", "path", "source"))
    columns |= _columns(ranks, [_IN_RECORD.get(name, name) for name in RANK_COLUMNS])
    columns["rank"] = columns.pop("world")
    made = {
        name: _whole_numbers(values) if name in _WHOLE else _objects(values)
        for name, values in columns.items()
    }
    return pd.DataFrame({name: made[name] for name in COLUMNS}, copy=False)


def _columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The rows turned, None where one has no such key. Row by row: a row is then in the cache."""
    try:
        turned: Any = zip(*map(operator.itemgetter(*names), rows), strict=True)
        columns = dict(zip(names, turned, strict=False))
    except KeyError:
        columns = {name: [row.get(name) for row in rows] for name in names}
    return {name: columns.get(name, ()) for name in names}


def _whole_numbers(values: Sequence[Any]) -> Any:
    """int64, or pandas' Int64 with NA where some are unknown."""
    try:
        return np.fromiter(values, dtype=np.int64, count=len(values))
    except TypeError:
        return pd.array(
            [value if isinstance(value, int) else None for value in values], dtype="Int64"
        )


def _objects(values: Sequence[Any]) -> Any:
    """The values as they are: pandas would turn None into NaN, and lists into columns."""
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return pd.Series(made, dtype=object)


def matching(records: pd.DataFrame, conditions: Mapping[str, Any]) -> pd.DataFrame:
    """The rows of `records` for which every condition holds; see `TensorStore.select`.

    Raises:
        ValueError: no such column, or a value that the column can never have.
    """
    keep = np.ones(len(records), dtype=bool)
    for given, wanted in conditions.items():
        name = _ALIASES.get(given, given)
        if name not in COLUMNS:
            raise ValueError(
                f"no condition {given!r}; choose from {', '.join(_ALIASES)}, {', '.join(COLUMNS)}"
            )
        several = isinstance(wanted, Collection) and not isinstance(wanted, str)
        values = list(wanted) if several else [wanted]
        _check(name, values)
        keep &= _holds(records[name], name, values)
    return records[keep]


def _check(name: str, values: list[Any]) -> None:
    if name in _ACCEPTED:
        accepted = _ACCEPTED[name]
        if wrong := [value for value in values if value is not None and value not in accepted]:
            raise ValueError(f"no {name} {wrong[0]!r}; choose from {', '.join(accepted)}")
    if name in _WHOLE and any(isinstance(value, str) for value in values):
        raise ValueError(
            f"{name} is a whole number, not {values[0]!r}; give a number, a list or a range"
        )


def _holds(column: pd.Series[Any], name: str, values: list[Any]) -> Any:
    """Which rows have one of `values`; None stands for unknown."""
    if name == "module":
        names = {each for each in column.unique() if isinstance(each, str)}
        fitting = [each for each in names if any(is_module(each, str(v)) for v in values if v)]
        values = [*fitting, *([None] if None in values else [])]
    if name in ("shape", "global_shape"):
        wanted = [tuple(value) for value in [values]] if values and _is_size(values) else values
        sizes = {tuple(value) for value in wanted}
        return np.array([shape is not None and tuple(shape) in sizes for shape in column])
    found = column.isin([value for value in values if value is not None]).to_numpy(dtype=bool)
    if None in values:
        found = found | column.isna().to_numpy()
    return found


def _is_size(values: list[Any]) -> bool:
    return all(isinstance(value, int) for value in values)


def is_module(name: str, pattern: str) -> bool:
    """Whether a shell pattern fits a dotted module name, or the end of it from a dot on."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
