"""Where formats have numbers, to be drawn over the exponents of values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from megatron.fake_quant import get_format
from megatron.fake_quant.formats import Cast, GroupScaling, TensorScaling, TwoLevelScaling
from megatron.fake_quant.inspect import format_properties
from megatron.fake_quant.nvfp4 import LARGEST as NVFP4_LARGEST


def format_ranges(formats: Sequence[str], table: pd.DataFrame) -> pd.DataFrame:
    """Return exponents of the smallest, smallest normal and largest number of each format.

    The range of a block (or tensor) is that of the elements times its scale. `smallest`, `normal`
    and `largest` hold for the median scale in `table`, `lowest` and `highest` for all scales.
    `table` has columns `quantized_format`, `scale_median`, `scale_min`, `scale_max` and `amax`.
    """
    rows = []
    for name in formats:
        fmt, mine = get_format(name), table[table["quantized_format"] == name]
        if isinstance(fmt.element, Cast) and fmt.element.name == "bfloat16":
            continue  # reaches everything
        shift = low = high = 0.0
        largest = float(format_properties.positive_values(fmt.element)[-1])
        if isinstance(fmt.scaling, TensorScaling):
            shift, low, high = _shifts(mine["amax"], fmt.scaling.target)
        elif fmt.scaling is not None:
            shift = mine["scale_median"].median()
            low, high = mine["scale_min"].min(), mine["scale_max"].max()
            if isinstance(fmt.scaling, TwoLevelScaling):  # under the scale of the tensor
                shift += _shifts(mine["amax"], NVFP4_LARGEST)[0]
                own = [_shifts(mine["amax"][[at]], NVFP4_LARGEST)[0] for at in mine.index]
                low, high = (mine["scale_min"] + own).min(), (mine["scale_max"] + own).max()
        if math.isnan(shift):
            continue
        # a bit for 8 values and one for 4 double an element each, its smallest ones stay
        doubled = 2 if isinstance(fmt.scaling, GroupScaling) else 0
        smallest = math.log2(float(format_properties.positive_values(fmt.element)[0]))
        rows.append(
            {
                "format": name,
                "lowest": smallest + low,
                "smallest": smallest + shift,
                "normal": math.log2(format_properties.smallest_normal(fmt.element)) + shift,
                "largest": math.log2(largest) + shift + doubled,
                "highest": math.log2(largest) + high + doubled,
            }
        )
    columns = ["format", "lowest", "smallest", "normal", "largest", "highest"]
    return pd.DataFrame(rows, columns=columns)


def _shifts(amax: pd.Series[float], target: float) -> tuple[float, float, float]:
    """Return log2 of the tensor scale for the median, the smallest and the largest amax."""
    known = amax[amax > 0]
    if known.empty:
        return 0.0, 0.0, 0.0
    median, low, high = (math.log2(x / target) for x in (known.median(), known.min(), known.max()))
    return median, low, high
