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
        """Return the requested part of a matrix, or the whole matrix if this part is empty."""
        if wanted is not None:
            top, bottom = max(wanted[0], 0), min(wanted[1], rows)
            left, right = max(wanted[2], 0), min(wanted[3], columns)
            if top < bottom and left < right:
                return cls(top, bottom, left, right)
        return cls(0, rows, 0, columns)

    @property
    def is_whole(self) -> bool:
        """Return whether the region starts in the first row and column."""
        return self.top == 0 and self.left == 0


@dataclass(frozen=True)
class Image:
    """Pixels; each shows the value of largest magnitude in `step` rows and columns."""

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


def reduce(matrix: Tensor, region: Region, *, width: int = WIDTH, height: int = HEIGHT) -> Image:
    """Return an image of a region; each pixel is its value of largest magnitude, with the sign.

    A pixel is NaN if one of its values is NaN.
    """
    rows, columns = region.bottom - region.top, region.right - region.left
    step = max(-(-rows // height), 1), max(-(-columns // width), 1)
    tall, wide = -(-rows // step[0]), -(-columns // step[1])
    values = np.zeros((tall, wide), np.float32)
    at_once = max(_AT_ONCE // max(step[0] * columns, 1), 1)
    for first in range(0, tall, at_once):
        last = min(first + at_once, tall)
        top = region.top + first * step[0]
        bottom = min(region.top + last * step[0], region.bottom)
        part = matrix[top:bottom, region.left : region.right].float()
        missing = (last - first) * step[0] - part.shape[0], wide * step[1] - columns
        if any(missing):  # repeat the last row and column, which changes no maximum
            part = torch.nn.functional.pad(
                part[None, None], (0, missing[1], 0, missing[0]), mode="replicate"
            )[0, 0]
        if step == (1, 1):
            values[first:last] = part.numpy()
            continue
        windows = part.reshape(last - first, step[0], wide, step[1])
        high, low = windows.amax((1, 3)), windows.amin((1, 3))
        values[first:last] = torch.where(-low > high, low, high).numpy()
    return Image(values, region, step)
