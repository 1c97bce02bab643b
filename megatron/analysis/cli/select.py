"""Select tensors by conditions given on the command line.

Example: `layer=0,1 module=linear_fc* iteration=2-4`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from megatron.analysis.store import TensorStore, selected

_RANGE = re.compile(r"(\d+)-(\d+)")


def conditions_of(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Convert conditions given as text to a mapping from column to accepted values.

    A condition has the form `column=value`, `column=value,value` or `column=first-last`. Columns
    and values are those that `TensorStore.select` accepts.

    Raises:
        ValueError: if a condition has none of these forms, or its range is empty.
    """
    wanted: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not (name and equals and values):
            raise ValueError(
                f"--select {text!r} is not a condition; give column=value, as in layer=0,1 or "
                "tensor_name=input"
            )
        parts = [value for part in values.split(",") for value in _values(part, text)]
        wanted[name] = [*wanted.get(name, []), *parts]
    return wanted


def select(store: TensorStore, conditions: Sequence[str]) -> pd.DataFrame:
    """Return the records in `store` that meet all conditions; see `conditions_of`.

    Raises:
        ValueError: if a condition is malformed, or no tensor meets all conditions.
    """
    return selected(store, conditions_of(conditions))


def _values(text: str, condition: str) -> list[Any]:
    if match := _RANGE.fullmatch(text):
        first, last = int(match[1]), int(match[2])
        if first > last:
            raise ValueError(f"--select {condition!r}: {text} is empty; give {last}-{first}")
        return list(range(first, last + 1))
    if text.lower() in ("true", "false"):
        return [text.lower() == "true"]
    return [int(text)] if re.fullmatch(r"-?\d+", text) else [text]
