"""The result of `stats.compute`: two tidy tables, and histograms on demand.

    statistics = stats.compute(store, ["mxfp8", "mxfp4", "hifp8"])
    statistics.tensors      one row per logical tensor: its identity and statistics of its values
    statistics.formats      one row per tensor, format and axis: the errors that the format causes
    statistics.problems     files that were left out, and the reasons (`Problem`)
    statistics.arrays(7)    histograms of tensor 7, from the cache or computed on demand

A *logical* tensor is a tensor that the ranks of a run hold jointly: shards are merged according to
their `dims`, replicas count once, and partial sums are added. Data-parallel ranks hold different
data, so each has its own tensors (`data_rank`). Each shard is quantized separately, as on its rank.

A format is any name that `megatron.fake_quant.get_format` accepts. The quantized values are bit for
bit the same as those of `fake_quantize(x, format, axis)` in the dtype of the tensor. Blocks run
along two axes, because each GEMM quantizes its operands along its own reduction axis:

    axis "row"      along the last dimension: hidden units, head_dim, keys of probabilities
    axis "column"   along tokens (linear layers: sequence and batch flattened), along queries or
                    keys (attention), along output units (weights)
    axis "all"      formats without blocks

`used_by` lists the GEMMs that quantize a collected operand along that axis (`fprop`, `dgrad`,
`wgrad`; empty for results). Square blocks (`mxfp8:2d`) are the same along both axes, so their axis
is "all".

Undefined numbers are NaN, such as the mean of a tensor without finite values, or the scales of a
format that has none. The SQNR of a format that causes no error is inf.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.dump.tensor_files import Problem
from megatron.analysis.stats.logical_tensors import NOTE_SEPARATOR

#: Levels of the quantile columns in `tensors`, for the values (`q0.5`) and magnitudes (`m0.5`).
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)

#: Columns of `tensors` that identify a tensor, mostly fields of its record. `path` is the file of
#: the first shard, `shards` is the number of files, and `shape` is the shape of the logical tensor.
#: `data_rank` is the data-parallel rank whose data the tensor holds. `note` states what was left
#: out and why; it is empty if nothing was left out.
IDENTITY_COLUMNS = (
    "run_id",
    "iteration",
    "micro_batch",
    "data_rank",
    "layer_type",
    "layer_idx",
    "module",
    "operation",
    "phase",
    "component",
    "tensor_name",
    "quant_type",
    "format",
    "recomputed",
    "dtype",
    "shape",
    "dims",
    "shards",
    "path",
    "note",
)

#: Columns of `tensors` that are computed. Moments and quantiles describe the finite values.
#:
#: count               number of values; count = finite + nan + inf
#: finite nan inf      number of finite values, of NaN, and of Inf
#: zeros               number of zeros of either sign
#: negative_zeros      number of negative zeros
#: min max mean        minimum, maximum and mean
#: std                 population standard deviation (divided by n)
#: rms                 root mean square
#: amax                largest magnitude
#: smallest            smallest nonzero magnitude
#: l1                  sum of the magnitudes
#: skewness kurtosis   the kurtosis of a normal distribution is 3; NaN if all values are equal
#: q0.001 ... m0.999   quantiles of the values (q) and of the magnitudes (m); see QUANTILES
#: channels            number of channels: hidden units, or head and head_dim
#: outlier_channels    number of channels whose amax exceeds 6 times the median channel's
#: dead_channels       number of channels that hold only zeros (NaN is not a zero)
#: channel_amax_ratio  largest amax of a channel divided by the amax of the median channel
#: token_amax_ratio    the same ratio for tokens; both medians leave out amax values of zero
VALUE_COLUMNS = (
    "count",
    "finite",
    "nan",
    "inf",
    "zeros",
    "negative_zeros",
    "min",
    "max",
    "mean",
    "std",
    "rms",
    "amax",
    "smallest",
    "l1",
    "skewness",
    "kurtosis",
    *(f"q{share}" for share in QUANTILES),
    *(f"m{share}" for share in QUANTILES),
    "channels",
    "outlier_channels",
    "dead_channels",
    "channel_amax_ratio",
    "token_amax_ratio",
)

#: Columns of `formats`. x is a value and y is the quantized value; sums and means run over
#: the values that are finite before and after quantization.
#:
#: tensor              row number of the tensor in `tensors`
#: quantized_format    name of the format
#: axis                row | column | all
#: used_by             GEMMs that quantize this operand along this axis (fprop dgrad wgrad, joined
#:                     by +), or ""
#: mse                 mean of (y - x)^2
#: rmse                square root of the MSE
#: sqnr_db             10 log10(sum x^2 / sum (y - x)^2); inf if there is no error
#: cosine              sum x y / sqrt(sum x^2 sum y^2); NaN if a factor is zero
#: bias                mean of y - x
#: relative_bias       bias divided by the mean magnitude
#: gain                sum x y / sum x^2 - 1, which is the slope of a least-squares fit of y to x,
#:                     minus 1. If it is negative, rounding shrinks the tensor. Errors of positive
#:                     and negative values cancel in the bias, but not in the gain. NaN if all x are
#:                     zero
#: relative_error      mean of |y - x| / |x| over x != 0
#: max_error           largest |y - x|
#: compared            number of values in the sums
#: poisoned            number of finite x whose y is NaN, because their block contains NaN or Inf
#: nonzero             number of compared values with x != 0
#: underflow           share of `nonzero` with y == 0, of either sign
#: saturated           share of the finite x that are clipped: with an unbounded exponent range,
#:                     they would round to a number above the largest number of the format. Values
#:                     that round to the largest number anyway do not count. Values that become zero
#:                     count as underflow. Poisoned x are left out. To average over tensors, weight
#:                     this share by finite - poisoned, and `underflow` by nonzero
#: clipping_error underflow_error grid_error
#:                     shares of the sum of (y - x)^2 due to clipped values, to values that become
#:                     zero, and to all other values, which are rounded to a neighboring number of
#:                     the format. The three shares add up to 1. They are NaN if there is no error.
#:                     Values that become Inf are in none of the sums
#: codes_used          number of codes that occur; NaN for bf16 and fp16
#: codes               number of codes of the element type; NaN for bf16 and fp16
#: code_entropy        entropy of the codes, in bits; NaN for bf16 and fp16
#: blocks              number of blocks
#: zero_blocks         number of blocks that hold only zeros
#: nan_blocks          number of blocks that contain NaN or Inf
#: scale_min scale_max scale_median
#:                     minimum, maximum and median exponent of the stored scales (E8M0 byte - 127;
#:                     nvfp4 and hifp4: log2 of the scale), over the blocks that are neither zero
#:                     nor NaN
#: scales_used         number of distinct scales
#: block_range         number of binades between the largest magnitude of a block and its smallest
#:                     nonzero magnitude, averaged over the blocks that are neither zero nor NaN
#: block_range_max     maximum of this number over the same blocks
#: headroom            log2(largest number * scale / largest magnitude), averaged over the same
#:                     blocks; if it is negative, the largest magnitude exceeds the largest number
#:                     and is rounded or clipped to it
#: axis_disagreement   share of values that are quantized differently along the two axes
#: axis_sqnr_db        10 log10(sum x^2 / sum (y_row - y_column)^2)
FORMAT_COLUMNS = (
    "tensor",
    "quantized_format",
    "axis",
    "used_by",
    "mse",
    "rmse",
    "sqnr_db",
    "cosine",
    "bias",
    "relative_bias",
    "gain",
    "relative_error",
    "max_error",
    "compared",
    "nonzero",
    "poisoned",
    "underflow",
    "saturated",
    "clipping_error",
    "underflow_error",
    "grid_error",
    "codes_used",
    "codes",
    "code_entropy",
    "blocks",
    "zero_blocks",
    "nan_blocks",
    "scale_min",
    "scale_max",
    "scale_median",
    "scales_used",
    "block_range",
    "block_range_max",
    "headroom",
    "axis_disagreement",
    "axis_sqnr_db",
)

#: Columns of `formats` with the shares of the squared error by cause.
ERROR_SHARES = ("clipping_error", "underflow_error", "grid_error")

#: Lower edges of the `headroom` bins, in binades: from -1 to 2 in steps of 1/8. The last bin has no
#: upper edge, and the first bin also counts lower values.
HEADROOM_EDGES = np.arange(-8, 17) / 8

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]


#: Remark on the tensors that activation recomputation saved a second time.
REPEATED = "saved again by activation recomputation; skipped, because the first pass counts"


def words_of_repeats(count: int) -> str:
    """Return a line that states how many tensors were skipped because they were saved twice."""
    return f"{count:,} tensor{'' if count == 1 else 's'}: {REPEATED}"


def notes_by_text(notes: Iterable[str]) -> dict[str, int]:
    """Return the number of tensors with each note, in the order in which the notes first occur.

    A tensor may have several notes, joined by NOTE_SEPARATOR.
    """
    return dict(
        Counter(note for joined in notes if joined for note in joined.split(NOTE_SEPARATOR))
    )


@dataclass(frozen=True)
class FormatArrays:
    """Histograms of one tensor in one format along one axis.

    A binade is the range [2^e, 2^(e+1)) of |x|; `TensorArrays.exponents` holds the exponent e of
    each binade. Here, x is a value and y is the quantized value. Only values that are finite and
    not zero are counted. `values` and `overflow` leave out those that become NaN.
    """

    format: str
    axis: str  #: row | column | all
    values: Counts  #: number of values that have a finite result, by binade
    underflow: Counts  #: number of values that become zero, by binade
    saturated: Counts  #: number of clipped values, by binade; see FORMAT_COLUMNS
    overflow: Counts  #: number of values that become Inf, by binade; if they are clipped, they
    #: are in `saturated`, too
    squared_error: Numbers  #: sum of (y - x)^2 by binade; the next three arrays add up to it
    clipping_error: Numbers  #: squared error of clipped values
    underflow_error: Numbers  #: squared error of values that become zero
    grid_error: Numbers  #: squared error of values that are neither clipped nor become zero
    error: Numbers  #: sum of |y| - |x| by binade; divide by `values` to get the mean
    relative_error: Numbers  #: sum of |y - x| / |x| by binade; divide by `values` to get the mean
    #: number of values by element code (`megatron.fake_quant.code_points`); empty for bf16 and fp16
    codes: Counts
    scales: Counts  #: number of blocks by scale byte; empty without block scales
    #: number of blocks by dynamic range: element i counts the blocks in which
    #: exponent(largest) - exponent(smallest nonzero) is i
    block_range: Counts
    #: number of blocks by log2(largest number * scale / amax), in the bins of `HEADROOM_EDGES`
    headroom: Counts


@dataclass(frozen=True)
class TensorArrays:
    """Histograms of one logical tensor."""

    exponents: Counts  #: exponents of the 255 binades: -127 (all subnormal float32) to 127
    positive: Counts  #: number of finite values above zero, by binade
    negative: Counts  #: number of finite values below zero, by binade
    patterns: Counts  #: counts by bfloat16 bit pattern, shape [65536]; see `histogram.Histogram`
    channel_amax: Numbers  #: largest finite magnitude of each channel, shape [channels]
    token_amax: Numbers  #: largest finite magnitude of each token, shape [tokens]
    formats: dict[tuple[str, str], FormatArrays]  #: histograms by format name and axis


@dataclass(frozen=True)
class Statistics:
    """Statistics of a dump; the docstring of this module describes the attributes."""

    tensors: pd.DataFrame  #: columns IDENTITY_COLUMNS and VALUE_COLUMNS, one row per logical tensor
    formats: pd.DataFrame  #: columns FORMAT_COLUMNS, one row per tensor, format and axis
    #: files that could not be read or measured
    problems: list[Problem] = field(default_factory=list)
    load_arrays: Callable[[int], TensorArrays] | None = None  #: function that loads the histograms
    remarks: list[str] = field(default_factory=list)  #: messages about problems with the cache
    #: number of tensors skipped because activation recomputation saved them a second time
    repeats: int = 0

    def arrays(self, tensor: int) -> TensorArrays:
        """Return the histograms of the tensor in row number `tensor` of the table `tensors`."""
        assert self.load_arrays is not None
        return self.load_arrays(tensor)

    def notes(self) -> dict[str, int]:
        """Return the number of tensors with each note; a note states what was left out."""
        return notes_by_text(self.tensors["note"])

    def joined(self) -> pd.DataFrame:
        """Return `formats` joined with the columns of `tensors`, as tidy data for plots."""
        return self.formats.join(self.tensors, on="tensor")
