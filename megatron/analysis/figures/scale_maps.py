"""Compute a table of a tensor's block scales, to be drawn as an image.

Blocks run along the last dimension, and the other dimensions are flattened into rows. For a large
tensor, the table contains evenly spaced rows, and only the first blocks of each row.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from megatron.analysis.stats.result_columns import scale_exponents
from megatron.fake_quant import get_format, quantize
from megatron.fake_quant.block_scaling import WHOLE_AXIS

ROWS, BLOCKS = 160, 160  #: maximum number of rows, and of blocks per row, in an image
CHUNK = 1 << 20  #: maximum number of values to copy at a time


def scale_map(tensor: Tensor, fmt: str, *, rows: int = ROWS, blocks: int = BLOCKS) -> pd.DataFrame:
    """Return the base-2 logarithms of the block scales that a format stores for a tensor.

    For an E8M0 scale, the result is its byte minus 127. For other scale types, such as E4M3 in
    NVFP4, it is log2 of the stored number, which depends on the outer scale. The result is NaN for
    a block that has only zeros or contains NaN.

    Returns:
        A table whose index is the row number; a column is named after the position of the block's
        first value in the row.

    Raises:
        ValueError: the format does not have one scale per block of a row, or the tensor has no
            values.
    """
    known = get_format(fmt).with_own_amax()
    size = known.block_size
    if size in (None, WHOLE_AXIS) or known.scale_bytes != 1 or known.height > 1:
        raise ValueError(f"{fmt} has no scale for each block of a row")
    if not tensor.numel():
        raise ValueError("the tensor has no values")
    table = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    every = -(-table.shape[0] // rows)
    columns = slice(None) if known.outer_size == WHOLE_AXIS else slice(blocks * size)
    taken = table[::every, columns].float()
    if known.has_tensor_scale:
        # `taken` may lack the table's largest value, which determines the tensor scale, so add a
        # row with this value
        largest = torch.zeros(1, taken.shape[1])
        largest[0, 0] = largest_finite(table)
        bytes_ = quantize(torch.cat([taken, largest]), known, axis=-1).scales.block()[:-1]
    else:
        bytes_ = quantize(taken, known, axis=-1).scales.block()[:, :blocks]
    stored = torch.from_numpy(scale_exponents(known))[bytes_.int()]
    taken = taken[:, : blocks * size]
    stored[_amax(taken, size) == 0] = torch.nan
    return pd.DataFrame(
        stored.numpy(),
        index=np.arange(taken.shape[0]) * every,
        columns=np.arange(stored.shape[1]) * size,
    )


def largest_finite(tensor: Tensor) -> float:
    """Return the largest finite magnitude, or 0 if no value is finite.

    At most `CHUNK` values are copied at a time.
    """
    largest = 0.0
    for part in torch.split(tensor.reshape(-1), CHUNK):
        finite = part[part.isfinite()]
        if len(finite):
            largest = max(largest, float(finite.max()), -float(finite.min()))
    return largest


def _amax(rows: Tensor, size: int) -> Tensor:
    """Return the largest magnitude of each block; the last block of a row may be shorter."""
    padded = torch.nn.functional.pad(rows.abs(), (0, -rows.shape[1] % size))
    return padded.reshape(rows.shape[0], -1, size).amax(-1)
