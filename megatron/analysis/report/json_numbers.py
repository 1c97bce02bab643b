"""Convert numbers for the report's JSON data, which has neither NaN nor infinity."""

from __future__ import annotations

import math
from typing import Any


def plain(value: float) -> float | str | None:
    """Return a value for JSON: six significant digits, None for NaN, and a string for infinity."""
    value = float(value)
    if math.isnan(value):
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)


def short(value: Any) -> float | int | str | None:
    """Return a value for JSON: five significant digits, None for NaN, and a string for infinity.

    Integers below 2**53 in magnitude are exact.
    """
    number = float(value)
    if math.isnan(number):
        return None
    if not math.isfinite(number):
        return str(number)
    return int(number) if number.is_integer() and abs(number) < 2**53 else float(f"{number:.5g}")
