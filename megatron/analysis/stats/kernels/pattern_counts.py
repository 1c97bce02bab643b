"""Formats with block scales: 16-bit values are counted by the classes of their blocks and their
pattern, and the counts evaluated; others go one by one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.analysis.stats.errors import Errors
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
    account_cells,
    account_disagreement,
    account_values,
    disagree_values,
)
from megatron.analysis.stats.kernels.error_sums_simd import account_blocks, disagree_blocks
from megatron.analysis.stats.kernels.half_tables import widened
from megatron.analysis.stats.kernels.scalar_quantizer import ScalarQuantizer
from megatron.analysis.stats.kernels.scale_disagreement import disagree_scaled
from megatron.analysis.stats.matrix_view import MatrixView
from megatron.fake_quant.formats import Format

FormatErrors = dict[tuple[str, str], Errors]  #: by format and axis


class Workspace:
    """Memory that a worker uses again and again."""

    def __init__(self) -> None:
        self.pairs = PairTable()
        self.classes = {axis: ClassTable() for axis in ("row", "column")}
        self.classes["all"] = self.classes["row"]


def one_by_one(
    piece: NDArray[np.int32],
    classes: dict[str, NDArray[np.uint8]],
    size: int,
    run: int,
    coders: list[tuple[Format, ScalarQuantizer]],
    found: FormatErrors,
) -> None:
    """Float32 bits with the classes of their blocks, without counting them first."""
    for fmt, coder in coders:
        for axis, of_blocks in classes.items():
            errors, along = found[fmt.name, axis], axis != "column"
            account_values(piece, of_blocks, size, run, along, coder, errors.sums, errors.codes)
        if "column" in classes:
            row = found[fmt.name, "row"]
            disagree_values(
                piece,
                classes["row"],
                classes["column"],
                size,
                run,
                coder,
                row.disagreement,
                row.disagreement_sum,
            )


class Counter:
    """Counts the values of a 16-bit tensor by class and pattern for one group of formats."""

    def __init__(
        self,
        half: torch.dtype,
        layout: MatrixView,
        patterns: NDArray[np.uint16],
        workspace: Workspace,
        group: Group,
        coders: list[tuple[Format, ScalarQuantizer]],
        found: FormatErrors,
    ):
        """patterns: all that occur in the tensor."""
        self.half, self.run, self.patterns, self.workspace = half, layout.run, patterns, workspace
        self.group, self.coders, self.found = group, coders, found
        self.counted = 0
        self.bits = widened(half)[patterns]

    def count(self, piece: NDArray[np.uint16], classes: dict[str, NDArray[np.uint8]]) -> None:
        """A piece with the classes of its blocks."""
        self.counted += piece.size
        if self.counted >= 1 << 32:  # the counts are uint32
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
            for fmt, coder in self.coders:
                row = self.found[fmt.name, "row"]
                disagree_scaled(piece, self.half, classes, size, run, coder, row)

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
                if tile == before:  # more pairs in one tile than there are planes
                    self._count_tile(piece, rows, columns, tile)
                    tile += 1

    def _count_tile(
        self,
        piece: NDArray[np.uint16],
        rows: NDArray[np.uint8],
        columns: NDArray[np.uint8],
        tile: int,
    ) -> None:
        """One tile, value by value."""
        size, run = self.group.size, self.run
        where = tile_of(piece.shape, size, run, tile)
        bits = widened(self.half)[piece[where]]
        of_row = rows[where[0], where[1], tile % rows.shape[2]][..., None]
        of_column = columns[where[0], where[1].start // size][:, None, where[2]]
        classes = {"row": of_row, "column": of_column}
        one_by_one(bits, classes, size, bits.shape[2], self.coders, self.found)

    def finish(self) -> None:
        """Evaluate what the tables still hold."""
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
        compare = disagree_blocks if self._fast else account_disagreement
        for fmt, coder in self.coders:
            row = self.found[fmt.name, "row"]
            compare(self.bits, first, second, cells, coder, row.disagreement, row.disagreement_sum)

    @property
    def _fast(self) -> bool:
        return self.half == torch.bfloat16

    def _evaluate(self, axis: str, classes: NDArray[np.int32], cells: Cells) -> None:
        add = account_blocks if self._fast else account_cells
        for fmt, coder in self.coders:
            errors = self.found[fmt.name, axis]
            add(self.bits, classes, cells, coder, errors.sums, errors.codes)


def _marginal(classes: NDArray[np.int32], cells: Cells) -> tuple[NDArray[np.int32], Cells]:
    """Each class once, and the sums of its cells."""
    found, place = np.unique(classes, return_inverse=True)
    if len(found) == len(classes):
        return classes, cells
    summed = np.zeros((len(found), cells.shape[1]))
    for index, row in zip(place.tolist(), cells, strict=True):
        summed[index] += row
    return found, summed
