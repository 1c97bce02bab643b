"""Cut a tensor into matrices, tiles and groups, for the CPU kernel of `BlockScaling` formats."""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.fake_quant.formats import Format
from megatron.fake_quant.fused import numba_blocks, numba_columns

#: columns in a tile whose blocks span several rows, few enough that the rows stay in the cache
_COLUMNS = 512
FEW = 16  #: number of rows of blocks in a matrix below which its columns are divided, too


def matrices(fmt: Format, shape: list[int], axis: int, *, last: bool) -> tuple[int, int, int]:
    """Return the shape `[outer, n, inner]` in which the kernel for blocks reads a tensor.

    last: True if blocks run along the last axis in memory.
    """
    if fmt.height > 1:
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    if last:
        return 1, math.prod(shape[:axis]), shape[axis]
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def tiling_of(fmt: Format, n: int, inner: int, *, last: bool) -> numba_blocks.Tiling:
    """Return the shape of a format's blocks and of tiles in matrices of `n` x `inner` values.

    last: True if blocks run along the last axis in memory.
    """
    assert fmt.block_size is not None
    size = fmt.block_size if fmt.height > 1 else min(fmt.block_size, inner if last else n)
    height, width = (fmt.height, size) if last else (size, fmt.height)
    most = _COLUMNS if height > 1 else numba_columns.TILE
    columns = max(most // width, 1) * width
    # If there are few rows of blocks, divide the columns into strips, so that all threads work.
    strips = 1 if -(-n // height) >= FEW else -(-inner // columns)
    return numba_blocks.Tiling(height, width, columns, strips, last)


class OuterGroups(NamedTuple):
    """Groups of values with a common outer scale; the arguments of `finite_maxima`."""

    rows: int  #: rows of a group, which is also the height of a band of groups
    columns: int  #: columns of a group
    strips: int  #: number of parts into which a band is cut, for more threads
    most: NDArray[np.int32]  #: largest magnitude of each group, `[matrices, rows, columns]`


def outer_groups(
    src: NDArray[np.integer[Any]], fmt: Format, tiling: numba_blocks.Tiling
) -> tuple[OuterGroups, numba_blocks.Tiling]:
    """Return the groups with a common outer scale, and a tiling that refers to them.

    Their maxima are zero, and stay unused if there is no outer scale or one for the whole tensor.
    """
    if fmt.outer_size is None:
        return OuterGroups(0, 0, 0, np.zeros((1, 1, 1), np.int32)), tiling
    outer, n, inner = src.shape
    shift = fmt.outer_size.bit_length() - 1
    size = 1 << shift
    rows, columns = (1, min(size, inner)) if tiling.along_rows else (min(size, n), 1)
    strips = 1 if tiling.along_rows else -(-inner // numba_columns.TILE)
    most = np.zeros((outer, -(-n // rows), -(-inner // columns)), np.int32)
    groups = OuterGroups(rows, columns, strips, most)
    if tiling.along_rows:
        return groups, tiling._replace(column_shift=shift)
    return groups, tiling._replace(row_shift=shift)
