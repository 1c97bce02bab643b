"""Read the loss and the gradient norm of each iteration from the events of a dump's indexes.

A dump of an older version, or of a trainer whose loss is unknown, has no such events.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd

EVENT = "trained"  #: name of the event that has losses and gradient norms
COLUMNS = ("run_id", "iteration", "loss", "grad_norm", "finite")
_WORDS = ("nan", "inf", "-inf")  #: how the event represents numbers that are not finite


def loss_curve(events: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a table with the columns `COLUMNS`, sorted by run and iteration.

    A number that is unknown is NaN. `finite` is false if one of the two numbers is known and is NaN
    or infinite. Entries of a damaged event are skipped. If an iteration occurs twice in a run, the
    last entry counts.
    """
    rows = [
        (str(event.get("run_id") or ""), *numbers)
        for event in events
        if event.get("event") == EVENT
        for numbers in _numbers(event)
    ]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    numbers = {"iteration": "int64", "loss": "float64", "grad_norm": "float64"}
    table = table.astype(numbers | {"finite": "bool"})
    table = table.drop_duplicates(["run_id", "iteration"], keep="last")
    return table.sort_values(["run_id", "iteration"]).reset_index(drop=True)


def _numbers(event: Mapping[str, Any]) -> list[tuple[int, float, float, bool]]:
    lists = [event.get(name) for name in ("iterations", "loss", "grad_norm")]
    if not all(isinstance(values, list) for values in lists):
        return []
    return [
        (iteration, _float(loss), _float(grad_norm), _finite(loss) and _finite(grad_norm))
        for iteration, loss, grad_norm in zip(*lists, strict=False)
        if type(iteration) is int and 0 <= iteration < 1 << 53
    ]


def _finite(value: Any) -> bool:
    """Return False if a number is NaN or infinite, and True if it is finite or unknown."""
    if isinstance(value, str):
        return value not in _WORDS
    return not isinstance(value, float) or math.isfinite(value)


def _float(value: Any) -> float:
    known = type(value) is float or (isinstance(value, str) and value in _WORDS)
    return float(value) if known or (type(value) is int and abs(value) < 1 << 53) else math.nan
