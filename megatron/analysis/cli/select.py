"""Select tensors by conditions given on the command line.

Example: `layer=0,1 module=linear_fc* iteration=2-4`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from megatron.analysis.store import TensorStore

_RANGE = re.compile(r"(\d+)-(\d+)")


def select(store: TensorStore, conditions: Sequence[str]) -> pd.DataFrame:
    """Return the records in `store` that meet all conditions.

    A condition has the form `column=value`, `column=value,value` or `column=first-last`. Columns
    and values are those that `TensorStore.select` accepts.

    Raises:
        ValueError: if a condition has none of these forms, or no tensor meets all conditions.
    """
    wanted: dict[str, Any] = {}
    for condition in conditions:
        name, equals, text = condition.partition("=")
        if not (name and equals and text):
            raise ValueError(
                f"--select {condition!r} is no condition; give column=value, as in layer=0,1 or "
                "tensor_name=input"
            )
        values = [value for part in text.split(",") for value in _values(part)]
        wanted[name] = [*wanted.get(name, []), *values]
    records = store.select(**wanted)
    if records.empty:
        raise ValueError(f"no tensor in {store.folder} meets {' '.join(conditions)}")
    return records


def _values(text: str) -> list[Any]:
    if match := _RANGE.fullmatch(text):
        return list(range(int(match[1]), int(match[2]) + 1))
    if text.lower() in ("true", "false"):
        return [text.lower() == "true"]
    return [int(text)] if re.fullmatch(r"-?\d+", text) else [text]
