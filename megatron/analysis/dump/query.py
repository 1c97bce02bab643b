"""Select tensors of a dump by conditions on the columns of its table.

The table has one row per tensor. Its columns are the fields of `TensorRecord`, the coordinates of
the rank, and the location of the file; see `record_columns`. An unknown value is None, or NA in a
column of integers. For example, most values are unknown if a file has no metadata.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.dump.record_columns import COLUMNS, WHOLE
from megatron.tensor_record import COMPONENTS, TENSOR_NAMES

#: Alternative names of columns in conditions, mapped to the column names.
_ALIASES = {"layer": "layer_idx", "world": "rank"}
#: Valid values of some columns; the other columns accept any value.
_ACCEPTED: Mapping[str, Collection[str]] = {
    "layer_type": TENSOR_NAMES,
    "operation": ("forward", "backward"),
    "phase": ("pre", "post"),
    "component": COMPONENTS.values(),
    "tensor_name": dict.fromkeys(name for names in TENSOR_NAMES.values() for name in names),
}


def matching(records: pd.DataFrame, conditions: Mapping[str, Any]) -> pd.DataFrame:
    """Return the rows of `records` for which every condition holds; see `TensorStore.select`.

    Raises:
        ValueError: if a column is unknown, or a value is never valid for its column.
    """
    keep = np.ones(len(records), dtype=bool)
    for condition, wanted in conditions.items():
        name = _ALIASES.get(condition, condition)
        if name not in COLUMNS:
            raise ValueError(
                f"no condition {condition!r}; choose from {', '.join(_ALIASES)}, "
                f"{', '.join(COLUMNS)}"
            )
        if isinstance(wanted, range) and name in WHOLE:  # a range may be too long for a list
            keep &= _in_range(records[name], wanted)
            continue
        several = isinstance(wanted, Collection) and not isinstance(wanted, str)
        values = list(wanted) if several else [wanted]
        _check(name, values)
        keep &= _holds(records[name], name, values)
    return records[keep]


def _in_range(column: pd.Series[Any], wanted: range) -> Any:
    """Return a mask of the rows whose value lies in `wanted`; unknown values lie in no range."""
    if not wanted:
        return np.zeros(len(column), dtype=bool)
    known = column.notna().to_numpy()
    numbers = column.fillna(0).to_numpy(dtype=np.int64)
    low, high = sorted((wanted[0], wanted[-1]))
    between = (low <= numbers) & (numbers <= high)
    return known & between & ((numbers - low) % abs(wanted.step) == 0)


def _check(name: str, values: list[Any]) -> None:
    if name in _ACCEPTED:
        accepted = _ACCEPTED[name]
        if wrong := [value for value in values if value is not None and value not in accepted]:
            raise ValueError(f"no {name} {wrong[0]!r}; choose from {', '.join(accepted)}")
    if name in WHOLE and (texts := [value for value in values if isinstance(value, str)]):
        raise ValueError(
            f"{name} must be an integer, not {texts[0]!r}; give a number, a list or a range"
        )


def _holds(column: pd.Series[Any], name: str, values: list[Any]) -> Any:
    """Return a mask of the rows whose value is one of `values`; None stands for unknown.

    Values of `module` are shell patterns; see `is_module`.
    """
    if name == "module":
        modules = {module for module in column.unique() if isinstance(module, str)}
        matches = [
            module for module in modules if any(is_module(module, str(v)) for v in values if v)
        ]
        values = [*matches, *([None] if None in values else [])]
    if name in ("shape", "global_shape"):
        wanted = [tuple(value) for value in [values]] if values and _is_size(values) else values
        sizes = {tuple(value) for value in wanted}
        return np.array([shape is not None and tuple(shape) in sizes for shape in column])
    holds = column.isin([value for value in values if value is not None]).to_numpy(dtype=bool)
    if None in values:
        holds = holds | column.isna().to_numpy()
    return holds


def _is_size(values: list[Any]) -> bool:
    return all(isinstance(value, int) for value in values)


def is_module(name: str, pattern: str) -> bool:
    """Return whether a shell pattern matches a module name, or the part after any of its dots."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
