"""Measure one tensor: the statistics of its values, and the errors of each format.

The values of a 16-bit tensor are counted by bit pattern and, for formats with block scales, also by
the scale of their block. The result of quantizing a value depends only on these two. Each format is
therefore computed for a few thousand patterns and not for millions of values, and the formats of a
group (see `format_groups`) share the counts. float32 has too many patterns to count, so float32
values are quantized one by one.
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
from megatron.analysis.stats.errors import Errors, FormatErrors
from megatron.analysis.stats.format_groups import FormatGroups, Group, axes_of
from megatron.analysis.stats.histogram import BINS, Histogram
from megatron.analysis.stats.kernels import value_scan
from megatron.analysis.stats.kernels.block_extremes import BlockCounts, block_extremes, classes_of
from megatron.analysis.stats.kernels.error_sums import account_counted, account_values
from megatron.analysis.stats.kernels.half_tables import HALVES, INFINITY, numbers, widened
from megatron.analysis.stats.kernels.pattern_counts import Counter, Workspace, account_piece
from megatron.analysis.stats.kernels.scalar_quantizer import make_quantizer, number_of_codes
from megatron.analysis.stats.matrix_view import MatrixView
from megatron.analysis.stats.values import Values
from megatron.fake_quant.formats import Format

FLOAT32_INFINITY = np.int32(0x7F800000)
_FLOAT32_MAX = float(np.finfo(np.float32).max)
FORMATTED = (*HALVES, torch.float32)  #: dtypes that `fake_quantize` accepts


def measure(
    tensor: Tensor, matrix: MatrixView, groups: FormatGroups, workspace: Workspace | None = None
) -> tuple[Values, FormatErrors]:
    """Return the statistics of a tensor of any real dtype, and the errors of each format.

    The errors are empty if `fake_quantize` does not accept the dtype.

    Raises:
        TypeError: if the values are complex.
    """
    if tensor.is_complex():
        raise TypeError(f"complex values ({tensor.dtype}) have no order; nothing is computed")
    tensor = tensor.detach().contiguous()
    grouped = (fmt for group in groups.groups for fmt in group.formats)
    formats = [*groups.plain, *grouped, *groups.sampled]
    errors: FormatErrors = {}
    if tensor.dtype in FORMATTED:
        errors = {
            (fmt.name, axis): Errors(number_of_codes(fmt.element))
            for fmt in formats
            for axis in axes_of(fmt)
        }
    if not tensor.numel():
        tokens, channels = np.zeros(matrix.tokens), np.zeros(matrix.channels)
        zero = np.ones(matrix.channels, np.bool_)
        return Values(moments.Moments(), Histogram.empty(), tokens, channels, zero), errors
    measurement = _Measurement(tensor, matrix, workspace or Workspace())
    values = measurement.values()
    if errors:
        measurement.plain(groups.plain, errors)
        for group in groups.groups:
            measurement.group(group, errors)
        for fmt in groups.sampled:
            measure_sampled(tensor, matrix, fmt, errors)
    return values, errors


class _Measurement:
    """Measurement of one nonempty tensor. The method `values` must be called before the others."""

    def __init__(self, tensor: Tensor, matrix: MatrixView, workspace: Workspace):
        self.matrix, self.workspace, self.dtype = matrix, workspace, tensor.dtype
        self.half = tensor.dtype if tensor.dtype in HALVES else None
        self.tensor = tensor
        shape = (matrix.outer, matrix.rows, matrix.columns)
        self.bits: NDArray[Any] | None = None
        if self.half is not None:
            self.bits = tensor.view(torch.int16).numpy().view(np.uint16).reshape(shape)
        elif tensor.dtype == torch.float32:
            self.bits = tensor.view(torch.int32).numpy().reshape(shape)
        self.mapped = tensor.nbytes >= LARGE and is_mapped(tensor.data_ptr())
        self.patterns = np.zeros(0, np.uint16)  #: bit patterns that occur in a 16-bit tensor
        self.counts = np.zeros(0, np.int64)  #: number of values with each pattern in `patterns`
        self.amax = 0.0  #: largest finite magnitude

    def values(self) -> Values:
        """Return the statistics of the values, and set `patterns`, `counts` and `amax`."""
        if self.bits is None:
            return self._other_values()
        half, matrix = self.half, self.matrix
        token = np.empty(
            (matrix.outer, matrix.rows, math.prod(matrix.tokens) // (matrix.outer * matrix.rows)),
            self.bits.dtype,
        )
        channel = np.zeros(math.prod(matrix.channels), self.bits.dtype)
        counts, of_values = np.zeros(BINS, np.int64), moments.Moments()
        row = 0
        flat_token = token.reshape(-1, token.shape[-1])
        for piece in pieces(self.bits, 1):
            height = piece.shape[0] * piece.shape[1]
            part = flat_token[row : row + height].reshape(piece.shape[0], piece.shape[1], -1)
            row += height
            if half is not None:
                value_scan.amax16(piece, INFINITY[half], part, channel)
                patterns, occurrences = value_scan.counted(piece.ravel())
                counts[patterns] += occurrences
            else:
                value_scan.amax32(piece, FLOAT32_INFINITY, part, channel)
                of_values += moments.of_values(piece.ravel().view(np.float32))
                upper = (piece.ravel() >> 16).astype(np.uint16)
                patterns, occurrences = value_scan.counted(upper)
                counts[patterns] += occurrences
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
            self._magnitudes(token).reshape(matrix.tokens),
            self._magnitudes(channel).reshape(matrix.channels),
            zero.reshape(matrix.channels),
        )

    def _zeros_only(self, chosen: NDArray[np.int64], channels: int) -> NDArray[np.bool_]:
        """Return whether each of the chosen channels holds only zeros.

        All finite values of the chosen channels are zero, but there may also be NaN or Inf. The
        tensor is read a second time; only the few tensors with such channels and non-finite values
        need this.
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
        """Return the statistics of a tensor whose dtype is none of bf16, fp16 and float32.

        The values are converted to float64.
        """
        matrix, flat = self.matrix, self.tensor.reshape(-1)
        of_values, counts = moments.Moments(), np.zeros(BINS, np.int64)
        width = math.prod(matrix.channels)
        token, channel = np.zeros(flat.numel() // width), np.zeros(width)
        zero = np.ones(width, np.bool_)
        step = max((1 << 20) // width, 1) * width
        for first in range(0, flat.numel(), step):
            x = flat[first : first + step].to(torch.float64).numpy()
            of_values += moments.of_values(x)
            finite = np.where(np.isfinite(x), x, np.nan)
            upper = np.clip(finite, -_FLOAT32_MAX, _FLOAT32_MAX).astype(np.float32)
            patterns, occurrences = np.unique(upper.view(np.uint32) >> 16, return_counts=True)
            counts[patterns] += occurrences
            magnitudes = np.nan_to_num(np.abs(finite)).reshape(-1, width)
            token[first // width : first // width + len(magnitudes)] = magnitudes.max(1)
            np.maximum(channel, magnitudes.max(0), out=channel)
            zero &= (x.reshape(-1, width) == 0).all(0)
        tokens = token.reshape(matrix.tokens)
        return Values(
            of_values,
            Histogram(_finite(counts)),
            tokens,
            channel.reshape(matrix.channels),
            zero.reshape(matrix.channels),
        )

    def plain(self, formats: tuple[Format, ...], all_errors: FormatErrors) -> None:
        """Add the errors of formats without block scales to `all_errors`."""
        quantizers = [(fmt, make_quantizer(fmt, self.dtype, self.amax)) for fmt in formats]
        if self.half is not None:
            bits, zero = widened(self.half)[self.patterns], np.zeros(1, np.int32)
            for fmt, quantizer in quantizers:
                errors = all_errors[fmt.name, "all"]
                cells = self.counts[None].astype(np.float64)
                account_counted(bits, zero, cells, quantizer, errors.sums, errors.codes)
            return
        assert self.bits is not None
        class_zero = np.zeros((1, 1, 1), np.uint8)
        for piece in pieces(self.bits, 1) if quantizers else ():
            flat = piece.reshape(1, 1, -1)
            size = flat.shape[2]
            for fmt, quantizer in quantizers:
                errors = all_errors[fmt.name, "all"]
                account_values(
                    flat, class_zero, size, size, True, quantizer, errors.sums, errors.codes
                )
            give_back(piece, mapped=self.mapped)

    def group(self, group: Group, all_errors: FormatErrors) -> None:
        """Add the errors of a group of block-scaled formats, in one pass over the values."""
        quantizers = [
            (fmt, make_quantizer(fmt, self.dtype, self.amax, group.emax)) for fmt in group.formats
        ]
        axes = axes_of(group.first)
        blocks = {
            axis: BlockCounts(
                group, [(all_errors[fmt.name, axis], q) for fmt, q in quantizers], self.half
            )
            for axis in axes
        }
        counter = None
        if self.half is not None:
            counter = Counter(
                self.half, self.matrix, self.patterns, self.workspace, group, quantizers, all_errors
            )
        assert self.bits is not None
        for piece in pieces(self.bits, group.size):
            classes = {}
            for axis in axes:
                extremes = block_extremes(piece, self.matrix, group.size, axis, self.half)
                blocks[axis].add(extremes)
                classes[axis] = classes_of(extremes, group, quantizers[0][1])
            if counter is not None:
                counter.count(piece, classes)
            else:
                account_piece(piece, classes, group.size, self.matrix.run, quantizers, all_errors)
            give_back(piece, mapped=self.mapped)
        if counter is not None:
            counter.finish()
        for axis in axes:
            blocks[axis].finish()
            for fmt, _ in quantizers if len(axes) > 1 else ():
                errors = all_errors[fmt.name, axis]
                errors.disagreement[1] = errors.counts[0] + errors.counts[1] + errors.counts[2]
        self._share_disagreement(group, all_errors)

    def _share_disagreement(self, group: Group, all_errors: FormatErrors) -> None:
        """Copy the disagreement between axes from each format's row errors to its column errors."""
        for fmt in group.formats if not group.square else ():
            row, column = all_errors[fmt.name, "row"], all_errors[fmt.name, "column"]
            column.disagreement[0] = row.disagreement[0]
            column.disagreement_sum[:] = row.disagreement_sum


def _finite(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Set the counts of the bit patterns of Inf and NaN to zero in place, and return the counts."""
    halves = counts.reshape(2, BINS // 2)
    halves[:, 0x7F80:] = 0
    return counts
