"""Reduce a matrix to an image in which outliers remain visible."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WIDTH, HEIGHT = 320, 240  #: maximum number of pixels
_AT_ONCE = 1 << 22  #: number of values that are converted at a time


@dataclass(frozen=True)
class Region:
    """A rectangle of a matrix; the row `bottom` and the column `right` are not part of it."""

    top: int
    bottom: int
    left: int
    right: int

    @classmethod
    def within(cls, rows: int, columns: int, wanted: tuple[int, ...] | None = None) -> Region:
        """Return the part `wanted` of a matrix; the whole matrix if the part is empty or None."""
        if wanted is not None:
            top, bottom = max(wanted[0], 0), min(wanted[1], rows)
            left, right = max(wanted[2], 0), min(wanted[3], columns)
            if top < bottom and left < right:
                return cls(top, bottom, left, right)
        return cls(0, rows, 0, columns)


@dataclass(frozen=True)
class Image:
    """Image whose pixels each show the value of largest magnitude in `step` rows and columns."""

    values: NDArray[np.float32]
    region: Region
    step: tuple[int, int]  #: rows and columns per pixel

    @property
    def x0(self) -> float:
        """Center of the first column of pixels."""
        return self.region.left + (self.step[1] - 1) / 2

    @property
    def y0(self) -> float:
        """Center of the first row of pixels."""
        return self.region.top + (self.step[0] - 1) / 2


def reduce(
    matrix: Tensor,
    region: Region,
    *,
    minus: Tensor | None = None,
    width: int = WIDTH,
    height: int = HEIGHT,
) -> Image:
    """Return an image of a region; each pixel keeps the value of largest magnitude and its sign.

    A pixel is NaN if one of its values is NaN.

    Args:
        matrix: values to show.
        region: part to show.
        minus: matrix that is subtracted.
        width: maximum number of pixels in a row.
        height: maximum number of pixels in a column.
    """
    rows, columns = region.bottom - region.top, region.right - region.left
    step = max(-(-rows // height), 1), max(-(-columns // width), 1)
    tall, wide = -(-rows // step[0]), -(-columns // step[1])
    values = np.zeros((tall, wide), np.float32)
    # Convert a few pixels at a time, because even one row of a matrix may be very long.
    across = min(max(_AT_ONCE // (step[0] * step[1]), 1), wide)
    down = max(_AT_ONCE // (step[0] * step[1] * across), 1)
    for first in range(0, tall, down):
        top = region.top + first * step[0]
        for left in range(0, wide, across):
            chunk = (
                slice(top, min(top + down * step[0], region.bottom)),
                slice(
                    region.left + left * step[1],
                    min(region.left + (left + across) * step[1], region.right),
                ),
            )
            part = matrix[chunk].float()
            part = part if minus is None else part - minus[chunk].float()
            values[first : first + down, left : left + across] = _pixels(part, step)
    return Image(values, region, step)


def _pixels(part: Tensor, step: tuple[int, int]) -> NDArray[np.float32]:
    """Return the pixels of a part of a matrix."""
    missing = -part.shape[0] % step[0], -part.shape[1] % step[1]
    if any(missing):  # repeat the last row and column, which changes no maximum
        part = torch.nn.functional.pad(
            part[None, None], (0, missing[1], 0, missing[0]), mode="replicate"
        )[0, 0]
    if step == (1, 1):
        found: NDArray[np.float32] = part.numpy()
        return found
    windows = part.reshape(part.shape[0] // step[0], step[0], part.shape[1] // step[1], step[1])
    high, low = windows.amax((1, 3)), windows.amin((1, 3))
    found = torch.where(-low > high, low, high).numpy()
    return found
