"""The two 16-bit types: the float32 that each of their 65,536 patterns stands for."""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

HALVES = (torch.bfloat16, torch.float16)
INFINITY = {torch.bfloat16: np.uint16(0x7F80), torch.float16: np.uint16(0x7C00)}
UNUSUAL = -1000  #: in the place of an exponent: of zero, Inf and NaN


@functools.cache
def widened(dtype: torch.dtype) -> NDArray[np.int32]:
    """Float32 bits by pattern."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    bits: NDArray[np.int32] = patterns.view(dtype).float().view(torch.int32).numpy()
    return bits


@functools.cache
def numbers(dtype: torch.dtype) -> NDArray[np.float64]:
    """The number of each pattern."""
    with np.errstate(invalid="ignore"):  # some NaN are signaling
        return widened(dtype).view(np.float32).astype(np.float64)


@functools.cache
def exponents(dtype: torch.dtype) -> NDArray[np.int16]:
    """Exponent of each pattern."""
    values = np.abs(numbers(dtype))
    found = np.frexp(values)[1] - 1
    found[~np.isfinite(values) | (values == 0)] = UNUSUAL
    return found.astype(np.int16)
