"""CPU kernel for NF4; see `absmax.py`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.fake_quant.elements import TABLES
from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused.numba_bits import INFINITY, ONE, as_bits, as_float, kernel
from megatron.fake_quant.fused.numba_compile import inlined
from megatron.fake_quant.fused.numba_tiles import (
    COLUMNS,
    DEPTH,
    extent,
    fill_special,
    maxima,
    spread,
)
from megatron.fake_quant.rounding import midpoints

VALUES = np.array(TABLES["nf4"], np.float32)
THRESHOLDS = midpoints(torch.from_numpy(VALUES)).numpy()


def make_rule(fmt: Format, finite_amax: Callable[[], Tensor]) -> None:
    """Return None, because all constants of NF4 are known when the kernel is compiled."""


@inlined
def looked_up(x: Any) -> Any:
    """Round `x` to a value of the table by comparing it with the thresholds between values."""
    value = VALUES[0]
    for i in range(15):
        value = VALUES[i + 1] if x > THRESHOLDS[i] else value
    return value


@kernel
def table(rule: Any, tiles: Any, drawn: Any, cut: Any, start: Any, stop: Any) -> None:
    """Quantize the tiles `start` to `stop - 1` in place."""
    amax, reciprocals = np.empty(COLUMNS, np.int32), np.empty(COLUMNS, np.float32)
    for item in range(start, stop):
        tile, place = tiles[item - start], extent(cut, item)
        maxima(tile, amax, place.columns)
        spread(amax, place, cut.size // DEPTH)
        divide = False
        for j in range(place.columns):
            reciprocal = ONE / as_float(amax[j]) if amax[j] != 0 else np.float32(0)
            reciprocals[j] = reciprocal
            divide |= as_bits(reciprocal) == INFINITY
        for i in range(DEPTH):
            values = tile[i]
            if divide:
                for j in range(place.columns):
                    scaled = np.float32(as_float(values[j]) * reciprocals[j])
                    if as_bits(reciprocals[j]) == INFINITY:
                        scaled = np.float32(as_float(values[j]) / as_float(amax[j]))
                    values[j] = as_bits(looked_up(scaled) * as_float(amax[j]))
            else:
                for j in range(place.columns):
                    scaled = np.float32(as_float(values[j]) * reciprocals[j])
                    values[j] = as_bits(looked_up(scaled) * as_float(amax[j]))
        fill_special(tile, amax, place.columns)
