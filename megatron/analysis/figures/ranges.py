"""Where formats have numbers, to be drawn over the exponents of values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from megatron.fake_quant import get_format, grid
from megatron.fake_quant.formats import Cast, GroupScaling, TensorScaling, TwoLevelScaling
from megatron.fake_quant.nvfp4 import LARGEST as NVFP4_LARGEST


def format_ranges(formats: Sequence[str], table: pd.DataFrame) -> pd.DataFrame:
    """Exponents of the smallest, smallest normal and largest number of each format.

    A block or a tensor reaches what its scale makes of its elements: those of the median block (or
    tensor) of `table`, which has columns `quantized_format`, `scale_median` and `amax`.
    """
    rows = []
    for name in formats:
        fmt, mine = get_format(name), table[table["quantized_format"] == name]
        if isinstance(fmt.element, Cast) and fmt.element.name == "bfloat16":
            continue  # reaches everything
        shift = 0.0
        largest = float(grid.positive_values(fmt.element)[-1])
        if isinstance(fmt.scaling, TensorScaling):
            amax = mine["amax"].median()
            shift = math.log2(amax / fmt.scaling.target) if amax > 0 else 0.0
        elif fmt.scaling is not None:
            shift = mine["scale_median"].median()
            if isinstance(fmt.scaling, TwoLevelScaling):  # under the scale of the tensor
                amax = mine["amax"].median()
                shift += math.log2(amax / NVFP4_LARGEST) if amax > 0 else 0.0
        if math.isnan(shift):
            continue
        # a bit for 8 values and one for 4 double an element each, its smallest ones stay
        doubled = 2 if isinstance(fmt.scaling, GroupScaling) else 0
        rows.append(
            {
                "format": name,
                "smallest": math.log2(float(grid.positive_values(fmt.element)[0])) + shift,
                "normal": math.log2(grid.smallest_normal(fmt.element)) + shift,
                "largest": math.log2(largest) + shift + doubled,
            }
        )
    return pd.DataFrame(rows, columns=["format", "smallest", "normal", "largest"])
