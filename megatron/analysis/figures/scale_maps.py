"""The scales of a tensor's blocks as a table that an image can be made from.

Blocks run along the last dimension; the other dimensions are its rows. Of a large tensor evenly
spaced rows are taken, and the first blocks of each.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from megatron.fake_quant import get_format, quantize
from megatron.fake_quant.formats import BlockScaling, TwoLevelScaling

ROWS, BLOCKS = 160, 160  #: of an image at most
CHUNK = 1 << 20  #: values that are copied at a time


def scale_map(tensor: Tensor, fmt: str, *, rows: int = ROWS, blocks: int = BLOCKS) -> pd.DataFrame:
    """Exponents of the stored scales: index the row, columns the first value of each block.

    Of E8M0 byte - 127; of NVFP4 log2 of the E4M3 number, whose own tensor scale is that of the
    whole tensor. NaN: the block has zeros only, or a NaN.

    Raises:
        ValueError: the format has no scale for each block along a row, or the tensor no values.
    """
    scaling = get_format(fmt).scaling
    if not isinstance(scaling, (BlockScaling, TwoLevelScaling)) or scaling.square:
        raise ValueError(f"{fmt} has no scale for each block of a row")
    if not tensor.numel():
        raise ValueError("the tensor has no values")
    table = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)
    every = -(-table.shape[0] // rows)
    taken = table[::every, : blocks * scaling.size].float()
    if isinstance(scaling, TwoLevelScaling):
        stored = _two_level(table, taken, fmt)
    else:
        bytes_ = quantize(taken, fmt, axis=-1).scales.blocks
        assert bytes_ is not None
        stored = bytes_.to(torch.float64) - 127
        stored[bytes_ == 255] = torch.nan
    stored[_amax(taken, scaling.size) == 0] = torch.nan
    return pd.DataFrame(
        stored.numpy(),
        index=np.arange(taken.shape[0]) * every,
        columns=np.arange(stored.shape[1]) * scaling.size,
    )


def _two_level(table: Tensor, taken: Tensor, fmt: str) -> Tensor:
    """With the scale of the whole tensor: its largest value stands in a row of its own."""
    largest = torch.zeros(1, taken.shape[1])
    largest[0, 0] = largest_finite(table)
    scales = quantize(torch.cat([taken, largest]), fmt, axis=-1).scales.blocks
    assert scales is not None
    numbers = scales[:-1].view(torch.float8_e4m3fn).to(torch.float64)
    return torch.where(numbers > 0, torch.log2(numbers), torch.nan)


def largest_finite(tensor: Tensor) -> float:
    """The largest finite magnitude, with a few copied values at a time; 0 if there is none."""
    largest = 0.0
    for part in torch.split(tensor.reshape(-1), CHUNK):
        finite = part[part.isfinite()]
        if len(finite):
            largest = max(largest, float(finite.max()), -float(finite.min()))
    return largest


def _amax(rows: Tensor, size: int) -> Tensor:
    """Largest magnitude of each block; the last one may be shorter."""
    padded = torch.nn.functional.pad(rows.abs(), (0, -rows.shape[1] % size))
    return padded.reshape(rows.shape[0], -1, size).amax(-1)
