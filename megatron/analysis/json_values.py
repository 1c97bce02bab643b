"""Convert values of tables to values that JSON can represent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd


def plain(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row of a table with values that JSON can represent.

    JSON supports neither NaN nor Inf: NaN becomes null, and Inf becomes the string "inf" or "-inf".
    """
    return {str(name): _value(value) for name, value in row.items()}


def _value(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [int(each) for each in value]
    if value is None or value is pd.NA:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value if isinstance(value, (bool, int, float, str)) else str(value)
