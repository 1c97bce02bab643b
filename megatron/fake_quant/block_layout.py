"""Split a tensor into quantization blocks, `[..., blocks, values]`, and join them again.

The tensor can have any shape and strides, and blocks can run along any axis. Scaling and rounding
work on blocks only. This module converts between blocks and two other orders of the same values:
the order of the tensor, and *rows*, in which codes are stored. In rows, the axis along which blocks
run is the last one, as tensor cores read it (for an operand of a matmul, the reduction axis is
contiguous).

If the block size does not divide the axis, the last block is padded with zeros, which do not change
its maximum.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron.fake_quant.block_scaling import WHOLE_AXIS
from megatron.fake_quant.formats import Format


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Positions of the quantization blocks of a format in a tensor of a given shape."""

    shape: tuple[int, ...]  #: shape of the tensor
    axis: int  #: axis along which blocks run, counted from the front
    #: number of values of a block along `axis`, or `WHOLE_AXIS`; None if the tensor is one block
    size: int | None
    height: int = 1  #: number of rows per block; if above 1, blocks extend over the last two axes

    @classmethod
    def of(cls, shape: tuple[int, ...], fmt: Format, axis: int) -> "BlockLayout":
        """Return the positions of a format's blocks along an axis, which may be negative.

        Raises:
            ValueError: if the axis is not an integer or out of range, or if the tensor lacks the
                dimensions that the format's blocks need.
        """
        dims = len(shape)
        if dims == 0:
            if fmt.block_size is not None and not fmt.one_block:
                raise ValueError(
                    f"format {fmt.name!r} scales blocks along an axis, but the tensor has no "
                    "dimensions; give it one, for instance by x.reshape(1)"
                )
            return cls(shape, 0, None)
        # torch.compile may trace the axis; in torch 2.6, it cannot trace `int | torch.SymInt`.
        if not isinstance(axis, (int, torch.SymInt)):
            raise ValueError(f"axis={axis!r}; give an integer from {-dims} to {dims - 1}")
        if not -dims <= axis < dims:
            raise ValueError(
                f"axis {axis} is out of range for a tensor of shape {shape}; "
                f"choose one from {-dims} to {dims - 1}"
            )
        if fmt.one_block:
            return cls(shape, axis % dims, None)
        if fmt.height > 1 and (dims < 2 or axis % dims < dims - 2):
            extent = (
                f"{fmt.height} x {fmt.block_size} values" if not fmt.columns else "whole columns"
            )
            raise ValueError(
                f"format {fmt.name!r} has blocks of {extent} over the last two axes; a tensor of "
                f"shape {shape} and axis {axis} do not fit: give a matrix and one of its two axes"
            )
        if not fmt.columns:
            return cls(shape, axis % dims, fmt.block_size, fmt.height)
        rows = shape[-1] if axis % dims == dims - 2 else shape[-2]
        return cls(shape, axis % dims, fmt.block_size, max(rows, 1))

    @property
    def across(self) -> int:
        """Axis across the blocks: the one of the last two axes along which they do not run.

        It is counted from the front; see `Format.across`.
        """
        return 2 * len(self.shape) - 3 - self.axis

    def to_rows(self, x: Tensor) -> Tensor:
        """Return a view of `x` whose last axis is the one along which blocks run."""
        return x.movedim(self.axis, -1) if self.shape else x

    def from_rows(self, rows: Tensor) -> Tensor:
        """Undo `to_rows`: move the last axis of `rows` back to its position in the tensor."""
        return rows.movedim(-1, self.axis) if self.shape else rows

    def to_blocks(self, x: Tensor) -> Tensor:
        """Split `x` into blocks, `[..., blocks, values]`.

        A block that spans several rows is flattened. The last block along an axis is padded with
        zeros.
        """
        if self.size is None:
            return x.reshape(1, -1)
        rows = self.to_rows(x)
        if self.size == WHOLE_AXIS:
            return rows.unsqueeze(-2)
        columns = -rows.shape[-1] % self.size
        if self.height == 1:
            return torch.unflatten(pad(rows, (0, columns)), -1, (-1, self.size))
        rows = pad(rows, (0, columns, 0, -rows.shape[-2] % self.height))
        tiles = torch.unflatten(torch.unflatten(rows, -1, (-1, self.size)), -3, (-1, self.height))
        return tiles.transpose(-3, -2).flatten(-2)

    def from_blocks(self, blocks: Tensor) -> Tensor:
        """Convert blocks to rows and drop the padding; `from_rows` then restores the tensor."""
        if self.size is None:
            return self.to_rows(blocks.reshape(self.shape))
        rows = blocks.flatten(-2)
        if self.height > 1:
            tiles = torch.unflatten(blocks, -1, (self.height, self.size)).transpose(-3, -2)
            rows = tiles.flatten(-2).flatten(-3, -2)
            rows = rows.narrow(-2, 0, self.rows_shape[-2])
        return rows.narrow(-1, 0, self.rows_shape[-1])

    @property
    def from_end(self) -> int:
        """Negative index of the axis along which blocks run; 0 for a tensor without dimensions."""
        return self.axis - len(self.shape)

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Shape of a tensor in the order of `to_rows`, with the axis of the blocks last."""
        front, back = self.shape[: self.axis], self.shape[self.axis + 1 :]
        return (*front, *back, *self.shape[self.axis : self.axis + 1])
