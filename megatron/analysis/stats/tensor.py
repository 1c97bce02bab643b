"""Everything about one tensor: its values, and what each format does to them.

16-bit tensors are counted: how often each of 65,536 patterns occurs, and for formats with block
scales how often with which scale. All that a format does to a value follows from these two, so a
format is computed for a few thousand patterns, not for millions of values; and formats whose blocks
get the same scale share the counts. float32 values are too many to count and go one by one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.analysis.stats import moments
from megatron.analysis.stats.chunks import LARGE, give_back, is_mapped, pieces
from megatron.analysis.stats.direct import measure_sampled
from megatron.analysis.stats.errors import Errors
from megatron.analysis.stats.format_groups import FormatGroups, Group, axes_of
from megatron.analysis.stats.histogram import BINS, Histogram
from megatron.analysis.stats.kernels import value_scan
from megatron.analysis.stats.kernels.block_extremes import BlockCounts, block_extremes, classes_of
from megatron.analysis.stats.kernels.error_sums import account_cells, account_values
from megatron.analysis.stats.kernels.half_tables import HALVES, INFINITY, numbers, widened
from megatron.analysis.stats.kernels.pattern_counts import Counter, Workspace, one_by_one
from megatron.analysis.stats.kernels.scalar_quantizer import make_coder, number_of_codes
from megatron.analysis.stats.matrix_view import MatrixView
from megatron.analysis.stats.values import Values
from megatron.fake_quant.formats import Format

FLOAT32_INFINITY = np.int32(0x7F800000)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
FORMATTED = (*HALVES, torch.float32)  #: dtypes that formats can be computed of

FormatErrors = dict[tuple[str, str], Errors]  #: by format and axis


def measure(
    tensor: Tensor, layout: MatrixView, plan: FormatGroups, workspace: Workspace | None = None
) -> tuple[Values, FormatErrors]:
    """The statistics of a tensor of any real dtype; those of formats if it is of a dtype that
    `fake_quantize` takes.

    Raises:
        TypeError: complex values.
    """
    if tensor.is_complex():
        raise TypeError(f"complex values ({tensor.dtype}) have no order; nothing is computed")
    tensor = tensor.detach().contiguous()
    formats = [*plan.plain, *(f for group in plan.groups for f in group.formats), *plan.sampled]
    found: FormatErrors = {}
    if tensor.dtype in FORMATTED:
        found = {
            (fmt.name, axis): Errors(number_of_codes(fmt.element))
            for fmt in formats
            for axis in axes_of(fmt)
        }
    if not tensor.numel():
        tokens, channels = np.zeros(layout.tokens), np.zeros(layout.channels)
        zero = np.ones(layout.channels, np.bool_)
        return Values(moments.Moments(), Histogram.empty(), tokens, channels, zero), found
    one = _Tensor(tensor, layout, workspace or Workspace())
    values = one.values()
    if found:
        one.plain(plan.plain, found)
        for group in plan.groups:
            one.group(group, found)
        for fmt in plan.sampled:
            measure_sampled(tensor, layout, fmt, found)
    return values, found


class _Tensor:
    """One tensor while it is measured."""

    def __init__(self, tensor: Tensor, layout: MatrixView, workspace: Workspace):
        self.layout, self.workspace, self.dtype = layout, workspace, tensor.dtype
        self.half = tensor.dtype if tensor.dtype in HALVES else None
        self.tensor = tensor
        shape = (layout.outer, layout.rows, layout.columns)
        self.bits: NDArray[Any] | None = None
        if self.half is not None:
            self.bits = tensor.view(torch.int16).numpy().view(np.uint16).reshape(shape)
        elif tensor.dtype == torch.float32:
            self.bits = tensor.view(torch.int32).numpy().reshape(shape)
        self.mapped = tensor.nbytes >= LARGE and is_mapped(tensor.data_ptr())
        self.patterns = np.zeros(0, np.uint16)  #: of a 16-bit type, those that occur
        self.counts = np.zeros(0, np.int64)  #: of each of these
        self.amax = 0.0  #: largest finite magnitude

    def values(self) -> Values:
        """The statistics of the values; finds patterns and amax on the way."""
        if self.bits is None:
            return self._other_values()
        half, layout = self.half, self.layout
        token = np.empty(
            (layout.outer, layout.rows, math.prod(layout.tokens) // (layout.outer * layout.rows)),
            self.bits.dtype,
        )
        channel = np.zeros(math.prod(layout.channels), self.bits.dtype)
        counts, of_values = np.zeros(BINS, np.int64), moments.Moments()
        row = 0
        flat_token = token.reshape(-1, token.shape[-1])
        for piece in pieces(self.bits, 1):
            height = piece.shape[0] * piece.shape[1]
            part = flat_token[row : row + height].reshape(piece.shape[0], piece.shape[1], -1)
            row += height
            if half is not None:
                value_scan.amax16(piece, INFINITY[half], part, channel)
                found, often = value_scan.counted(piece.ravel())
                counts[found] += often
            else:
                value_scan.amax32(piece, FLOAT32_INFINITY, part, channel)
                of_values += moments.of_values(piece.ravel().view(np.float32))
                upper = (piece.ravel() >> 16).astype(np.uint16)
                found, often = value_scan.counted(upper)
                counts[found] += often
            give_back(piece, mapped=self.mapped)
        if half is not None:
            self.patterns = np.flatnonzero(counts).astype(np.uint16)
            self.counts = counts[self.patterns]
            of_values = moments.of_counted(numbers(half)[self.patterns], self.counts)
            counts = np.zeros(BINS, np.int64)
            np.add.at(counts, widened(half)[self.patterns] >> 16 & 0xFFFF, self.counts)
        self.amax = of_values.amax if of_values.finite else 0.0
        zero = channel == 0
        if of_values.finite < of_values.count and zero.any():
            zero[zero] = self._zeros_only(np.flatnonzero(zero), len(channel))
        return Values(
            of_values,
            Histogram(_finite(counts)),
            self._magnitudes(token).reshape(layout.tokens),
            self._magnitudes(channel).reshape(layout.channels),
            zero.reshape(layout.channels),
        )

    def _zeros_only(self, chosen: NDArray[np.int64], channels: int) -> NDArray[np.bool_]:
        """Which of the chosen channels, without a number but zeros, have no NaN and Inf either. It
        takes a second reading, of the few tensors that have such values and such channels.
        """
        assert self.bits is not None
        zero = np.ones(len(chosen), np.bool_)
        magnitude = value_scan.LOW31 if self.half is None else value_scan.LOW15
        for piece in pieces(self.bits, 1):
            zero &= ~(piece.reshape(-1, channels)[:, chosen] & magnitude).any(0)
            give_back(piece, mapped=self.mapped)
        return zero

    def _magnitudes(self, bits: NDArray[Any]) -> NDArray[np.float64]:
        wide = bits if self.half is None else widened(self.half)[bits]
        return wide.view(np.float32).astype(np.float64)

    def _other_values(self) -> Values:
        """Of a dtype that no format takes: through float64."""
        layout, flat = self.layout, self.tensor.reshape(-1)
        of_values, counts = moments.Moments(), np.zeros(BINS, np.int64)
        width = math.prod(layout.channels)
        token, channel = np.zeros(flat.numel() // width), np.zeros(width)
        zero = np.ones(width, np.bool_)
        step = max((1 << 20) // width, 1) * width
        for first in range(0, flat.numel(), step):
            x = flat[first : first + step].to(torch.float64).numpy()
            of_values += moments.of_values(x)
            finite = np.where(np.isfinite(x), x, np.nan)
            upper = np.clip(finite, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
            found, often = np.unique(upper.view(np.uint32) >> 16, return_counts=True)
            counts[found] += often
            matrix = np.nan_to_num(np.abs(finite)).reshape(-1, width)
            token[first // width : first // width + len(matrix)] = matrix.max(1)
            np.maximum(channel, matrix.max(0), out=channel)
            zero &= (x.reshape(-1, width) == 0).all(0)
        tokens = token.reshape(layout.tokens)
        return Values(
            of_values,
            Histogram(_finite(counts)),
            tokens,
            channel.reshape(layout.channels),
            zero.reshape(layout.channels),
        )

    def plain(self, formats: tuple[Format, ...], found: FormatErrors) -> None:
        """Formats without blocks: every value is of class 0."""
        coders = [(fmt, make_coder(fmt, self.dtype, self.amax)) for fmt in formats]
        if self.half is not None:
            bits, zero = widened(self.half)[self.patterns], np.zeros(1, np.int32)
            for fmt, coder in coders:
                errors = found[fmt.name, "all"]
                cells = self.counts[None].astype(np.float64)
                account_cells(bits, zero, cells, coder, errors.sums, errors.codes)
            return
        assert self.bits is not None
        none = np.zeros((1, 1, 1), np.uint8)
        for piece in pieces(self.bits, 1) if coders else ():
            flat = piece.reshape(1, 1, -1)
            size = flat.shape[2]
            for fmt, coder in coders:
                errors = found[fmt.name, "all"]
                account_values(flat, none, size, size, True, coder, errors.sums, errors.codes)
            give_back(piece, mapped=self.mapped)

    def group(self, group: Group, found: FormatErrors) -> None:
        """Formats with block scales."""
        coders = [
            (fmt, make_coder(fmt, self.dtype, self.amax, group.emax)) for fmt in group.formats
        ]
        axes = axes_of(group.first)
        blocks = {
            axis: BlockCounts(group, [(found[f.name, axis], c) for f, c in coders], self.half)
            for axis in axes
        }
        counter = None
        if self.half is not None:
            counter = Counter(
                self.half, self.layout, self.patterns, self.workspace, group, coders, found
            )
        assert self.bits is not None
        for piece in pieces(self.bits, group.size):
            classes = {}
            for axis in axes:
                extremes = block_extremes(piece, self.layout, group.size, axis, self.half)
                blocks[axis].add(extremes)
                classes[axis] = classes_of(extremes, group, coders[0][1])
            if counter is not None:
                counter.count(piece, classes)
            else:
                one_by_one(piece, classes, group.size, self.layout.run, coders, found)
            give_back(piece, mapped=self.mapped)
        if counter is not None:
            counter.finish()
        for axis in axes:
            blocks[axis].finish()
            for fmt, _ in coders if len(axes) > 1 else ():
                errors = found[fmt.name, axis]
                errors.disagreement[1] = errors.counts[0] + errors.counts[1] + errors.counts[2]
        self._share_disagreement(group, found)

    def _share_disagreement(self, group: Group, found: FormatErrors) -> None:
        """It was counted for the row; the column's is the same."""
        for fmt in group.formats if not group.square else ():
            row, column = found[fmt.name, "row"], found[fmt.name, "column"]
            column.disagreement[0] = row.disagreement[0]
            column.disagreement_sum[:] = row.disagreement_sum


def _finite(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Without the patterns of Inf and NaN."""
    halves = counts.reshape(2, BINS // 2)
    halves[:, 0x7F80:] = 0
    return counts
