"""Count values by bit pattern and scale class, and add up the errors of formats with blocks.

16-bit values are counted by bit pattern and by the scale classes of their blocks, and each
combination is then evaluated once per format. float32 values have too many bit patterns to count,
so they are quantized one by one. `kernels.scalar_quantizer` defines the scale class of a block.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.analysis.stats.errors import FormatErrors
from megatron.analysis.stats.format_groups import Group, axes_of
from megatron.analysis.stats.kernels.class_tables import (
    Cells,
    ClassTable,
    PairTable,
    count_columns,
    count_pairs,
    count_rows,
    tile_of,
)
from megatron.analysis.stats.kernels.error_sums import (
    account_counted,
    account_values,
    compare_counted,
    compare_values,
)
from megatron.analysis.stats.kernels.error_sums_simd import (
    account_counted_simd,
    compare_counted_simd,
)
from megatron.analysis.stats.kernels.half_tables import widened
from megatron.analysis.stats.kernels.scalar_quantizer import ScalarQuantizer
from megatron.analysis.stats.kernels.scale_disagreement import compare_two_level
from megatron.analysis.stats.matrix_view import MatrixView
from megatron.fake_quant.formats import Format


class Workspace:
    """Tables of counts, allocated once per thread and reused for all tensors."""

    def __init__(self) -> None:
        self.pairs = PairTable()
        self.classes = {axis: ClassTable() for axis in ("row", "column")}
        self.classes["all"] = self.classes["row"]


def account_piece(
    piece: NDArray[np.int32],
    classes: dict[str, NDArray[np.uint8]],
    size: int,
    run: int,
    quantizers: list[tuple[Format, ScalarQuantizer]],
    all_errors: FormatErrors,
) -> None:
    """Quantize the values of a chunk one by one, and add their errors to `all_errors`.

    Args:
        piece: [outer, rows, columns] values of the chunk, as float32 bits.
        classes: scale classes of the blocks, keyed by axis.
        size: number of values per block.
        run: number of values in a run; no block along a row crosses its boundary.
    """
    for fmt, quantizer in quantizers:
        for axis, of_blocks in classes.items():
            errors, by_row = all_errors[fmt.name, axis], axis != "column"
            account_values(
                piece, of_blocks, size, run, by_row, quantizer, errors.sums, errors.codes
            )
        if "column" in classes:
            row = all_errors[fmt.name, "row"]
            compare_values(
                piece,
                classes["row"],
                classes["column"],
                size,
                run,
                quantizer,
                row.disagreement,
                row.disagreement_sum,
            )


class Counter:
    """Counter of a 16-bit tensor's values by bit pattern and scale class.

    The counts serve all formats of one `Group`.
    """

    def __init__(
        self,
        half: torch.dtype,
        matrix: MatrixView,
        patterns: NDArray[np.uint16],
        workspace: Workspace,
        group: Group,
        quantizers: list[tuple[Format, ScalarQuantizer]],
        all_errors: FormatErrors,
    ):
        """Create a counter; `patterns` lists all bit patterns that occur in the tensor."""
        self.half, self.run, self.patterns, self.workspace = half, matrix.run, patterns, workspace
        self.group, self.quantizers, self.all_errors = group, quantizers, all_errors
        self.counted = 0
        self.bits = widened(half)[patterns]

    def count(self, piece: NDArray[np.uint16], classes: dict[str, NDArray[np.uint8]]) -> None:
        """Count the values of a chunk, given the scale classes of its blocks along each axis."""
        self.counted += piece.size
        if self.counted >= 1 << 32:  # the uint32 counts could overflow
            self.finish()
            self.counted = piece.size
        if self.group.by_pairs:
            self._count_pairs(piece, classes["row"], classes["column"])
            return
        size, run, workspace = self.group.size, self.run, self.workspace
        for axis, of_blocks in classes.items():
            table = workspace.classes[axis]
            if axis == "column":
                count_columns(piece, of_blocks, size, table.counts, table.occurs)
            else:
                count_rows(piece, of_blocks, size, run, table.counts, table.occurs)
        if not self.group.square:
            for fmt, quantizer in self.quantizers:
                row = self.all_errors[fmt.name, "row"]
                compare_two_level(piece, self.half, classes, size, run, quantizer, row)

    def _count_pairs(
        self, piece: NDArray[np.uint16], rows: NDArray[np.uint8], columns: NDArray[np.uint8]
    ) -> None:
        size, run, table = self.group.size, self.run, self.workspace.pairs
        tiles = piece.shape[0] * columns.shape[1] * rows.shape[2]
        tile = 0
        while tile < tiles:
            before = tile
            table.used, tile = count_pairs(
                piece,
                rows,
                columns,
                size,
                run,
                table.counts,
                table.plane_of,
                table.pairs,
                table.used,
                tile,
            )
            if tile < tiles:
                self._evaluate_pairs()
                # this tile alone has more pairs of scale classes than the table has planes
                if tile == before:
                    self._count_tile(piece, rows, columns, tile)
                    tile += 1

    def _count_tile(
        self,
        piece: NDArray[np.uint16],
        rows: NDArray[np.uint8],
        columns: NDArray[np.uint8],
        tile: int,
    ) -> None:
        """Quantize the values in one tile of a chunk one by one, and add their errors."""
        size, run = self.group.size, self.run
        where = tile_of(piece.shape, size, run, tile)
        bits = widened(self.half)[piece[where]]
        of_row = rows[where[0], where[1], tile % rows.shape[2]][..., None]
        of_column = columns[where[0], where[1].start // size][:, None, where[2]]
        classes = {"row": of_row, "column": of_column}
        account_piece(bits, classes, size, bits.shape[2], self.quantizers, self.all_errors)

    def finish(self) -> None:
        """Quantize the values whose counts remain in the tables, and add their errors."""
        if self.group.by_pairs:
            self._evaluate_pairs()
            return
        for axis in axes_of(self.group.first):
            classes, cells = self.workspace.classes[axis].take(self.patterns)
            self._evaluate(axis, classes, cells)

    def _evaluate_pairs(self) -> None:
        pairs, cells = self.workspace.pairs.take(self.patterns)
        first, second = np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1])
        self._evaluate("row", *_marginal(first, cells))
        self._evaluate("column", *_marginal(second, cells))
        compare = compare_counted_simd if self._fast else compare_counted
        for fmt, quantizer in self.quantizers:
            row = self.all_errors[fmt.name, "row"]
            compare(
                self.bits, first, second, cells, quantizer, row.disagreement, row.disagreement_sum
            )

    @property
    def _fast(self) -> bool:
        return self.half == torch.bfloat16

    def _evaluate(self, axis: str, classes: NDArray[np.int32], cells: Cells) -> None:
        add = account_counted_simd if self._fast else account_counted
        for fmt, quantizer in self.quantizers:
            errors = self.all_errors[fmt.name, axis]
            add(self.bits, classes, cells, quantizer, errors.sums, errors.codes)


def _marginal(classes: NDArray[np.int32], cells: Cells) -> tuple[NDArray[np.int32], Cells]:
    """Return the distinct scale classes and, for each, the sum of its rows of `cells`."""
    distinct, index_of_row = np.unique(classes, return_inverse=True)
    if len(distinct) == len(classes):
        return classes, cells
    summed = np.zeros((len(distinct), cells.shape[1]))
    for index, row in zip(index_of_row.tolist(), cells, strict=True):
        summed[index] += row
    return distinct, summed
