"""A part of a dump, as a command line names it: `layer=0,1 module=linear_fc* iteration=2-4`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from megatron.analysis.store import TensorStore

_RANGE = re.compile(r"(\d+)-(\d+)")


def select(store: TensorStore, conditions: Sequence[str]) -> pd.DataFrame:
    """The records that meet all conditions, each `column=value`, `column=value,value` or
    `column=first-last`; columns and values as in `TensorStore.select`.

    Raises:
        ValueError: a condition that is none, or that nothing meets.
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
    found = store.select(**wanted)
    if found.empty:
        raise ValueError(f"no tensor in {store.folder} meets {' '.join(conditions)}")
    return found


def _values(text: str) -> list[Any]:
    if match := _RANGE.fullmatch(text):
        return list(range(int(match[1]), int(match[2]) + 1))
    if text.lower() in ("true", "false"):
        return [text.lower() == "true"]
    return [int(text)] if re.fullmatch(r"-?\d+", text) else [text]
