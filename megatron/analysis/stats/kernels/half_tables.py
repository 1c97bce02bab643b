"""Tables with one entry for each of the 65,536 bit patterns of bfloat16 or of float16."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

HALVES = (torch.bfloat16, torch.float16)
INFINITY = {torch.bfloat16: np.uint16(0x7F80), torch.float16: np.uint16(0x7C00)}
UNUSUAL = -1000  #: placeholder for the exponent of zero, Inf and NaN


@functools.cache
def widened(dtype: torch.dtype) -> NDArray[np.int32]:
    """Return a table that converts bit patterns of `dtype` to float32 bits."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    bits: NDArray[np.int32] = patterns.view(dtype).float().view(torch.int32).numpy()
    return bits


@functools.cache
def numbers(dtype: torch.dtype) -> NDArray[np.float64]:
    """Return a table of the numbers that the bit patterns of `dtype` represent."""
    # converting a signaling NaN would otherwise cause a warning
    with np.errstate(invalid="ignore"):
        return widened(dtype).view(np.float32).astype(np.float64)


@functools.cache
def exponents(dtype: torch.dtype) -> NDArray[np.int16]:
    """Return a table that maps each bit pattern of `dtype` to the base-2 exponent of its number."""
    values = np.abs(numbers(dtype))
    result = np.frexp(values)[1] - 1
    result[~np.isfinite(values) | (values == 0)] = UNUSUAL
    return result.astype(np.int16)
