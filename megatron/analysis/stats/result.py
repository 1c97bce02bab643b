"""The result of `stats.compute`: two tidy tables, and histograms on demand.

    statistics = stats.compute(store, ["mxfp8", "mxfp4", "hifp8"])
    statistics.tensors      one row per logical tensor: its identity and statistics of its values
    statistics.formats      one row per tensor, format and axis: the effect of the format
    statistics.problems     files that were left out, and why (`Problem`)
    statistics.arrays(7)    histograms of tensor 7, from the cache or computed on demand

A *logical* tensor is what the ranks of a run hold together: shards are merged according to their
`dims`, replicas count once, partial sums are added. Data-parallel ranks hold different data, so
each has tensors of its own (`data_rank`). Each shard is quantized separately, as on its rank.

Formats are any that `megatron.fake_quant.get_format` knows. Values are quantized bit for bit as by
`fake_quantize(x, format, axis)`, in the dtype of the tensor. Blocks run along two axes, because
each GEMM quantizes its operands along its own reduction axis:

    axis "row"      along the last dimension: hidden units, head_dim, keys of probabilities
    axis "column"   along tokens (linear layers: sequence and batch flattened), along queries or
                    keys (attention), along output units (weights)
    axis "all"      formats without blocks

`used_by` names the GEMMs that quantize a collected operand along that axis (`fprop`, `dgrad`,
`wgrad`; empty for results). Square blocks (`mxfp8:2d`) are the same along both axes, so their axis
is "all".

Numbers without a value are NaN: a mean without finite values, or scales of a format that has none.
The SQNR of a format without errors is inf. Counts are whole numbers and never missing.
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

#: Shares whose quantiles `tensors` contains: of the values (`q0.5`) and of the magnitudes (`m0.5`).
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)

#: Columns of `tensors` that identify a tensor, mostly fields of its record. `path` is the file of
#: the first shard, `shards` the number of files, and `shape` that of the logical tensor.
#: `data_rank` is the data-parallel rank whose data the tensor holds. `note` says what is left out
#: and why; it is empty if nothing is.
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
#: count         all values            finite, nan, inf   count = finite + nan + inf
#: zeros         of either sign        negative_zeros     zeros with a sign
#: min max mean std rms amax           std divides by n; amax is the largest magnitude
#: smallest      the smallest magnitude that is not zero
#: l1            sum of the magnitudes
#: skewness kurtosis                   kurtosis of a normal distribution is 3; NaN if constant
#: channels, outlier_channels          channels are the hidden units, or head and head_dim; the
#:               amax of an outlier exceeds 6 times the median channel's, see `arrays`
#: dead_channels                       channels that hold zeros only (a NaN is no zero)
#: channel_amax_ratio                  largest amax of a channel over the median channel's
#: token_amax_ratio                    the same of tokens; medians leave out amax values of zero
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

#: Columns of `formats`. x is a value and y the quantized value; sums run over the values that are
#: finite before and after quantization.
#:
#: tensor              the row of `tensors` it belongs to
#: quantized_format    name of the format            axis     row | column | all
#: used_by             GEMMs that quantize this operand along this axis (fprop dgrad wgrad, joined
#:                     by +), or ""
#: mse                 mean of (y - x)^2             rmse     its root
#: sqnr_db             10 log10(sum x^2 / sum (y - x)^2); inf without error
#: cosine              sum x y / sqrt(sum x^2 sum y^2); NaN if a factor is zero
#: bias                mean of y - x                 relative_bias   bias over the mean magnitude
#: relative_error      mean of |y - x| / |x| over x != 0
#: max_error           largest |y - x|
#: compared            values in the sums
#: poisoned            finite x whose y is NaN, because their block holds a NaN or Inf
#: nonzero             compared values with x != 0
#: underflow           share of `nonzero` with y == 0, of either sign
#: saturated           share of the finite x that are clipped: with an unbounded exponent range they
#:                     would round to a larger number than the format's largest. Values that round
#:                     to the largest number anyway do not count, nor do values that become zero:
#:                     they underflow. Poisoned x are left out. To average over tensors, weight
#:                     this share by finite - poisoned, and `underflow` by nonzero
#: codes_used          codes that occur              codes     codes that the element has
#: code_entropy        bits                          (all three NaN for bf16 and fp16)
#: blocks              number of blocks              zero_blocks, nan_blocks   among them
#: scale_min scale_max scale_median    of the stored scale's exponent (E8M0 byte - 127; nvfp4 and
#:                     hifp4: log2 of the scale), over blocks that are neither zero nor NaN
#: scales_used         distinct scales
#: block_range         binades between a block's largest magnitude and its smallest one above zero,
#:                     averaged over the blocks that are neither zero nor NaN
#: block_range_max     the largest
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
    "relative_error",
    "max_error",
    "compared",
    "nonzero",
    "poisoned",
    "underflow",
    "saturated",
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

#: Edges of the bins of `headroom` in binades: eighths from -1 to 2. The last bin has no upper edge.
HEADROOM_EDGES = np.arange(-8, 17) / 8

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]


#: Remark on the tensors that activation recomputation saved a second time.
REPEATED = "saved again by activation recomputation; skipped, because the first pass counts"


def words_of_repeats(count: int) -> str:
    """Return a line on the tensors that were skipped because recomputation repeats them."""
    return f"{count:,} tensor{'' if count == 1 else 's'}: {REPEATED}"


def notes_by_text(notes: Iterable[str]) -> dict[str, int]:
    """Return how many tensors have each note, in the order of the tensors.

    A tensor may have several notes, joined by NOTE_SEPARATOR.
    """
    return dict(
        Counter(note for joined in notes if joined for note in joined.split(NOTE_SEPARATOR))
    )


@dataclass(frozen=True)
class FormatArrays:
    """Histograms of one tensor in one format along one axis.

    A binade is [2^e, 2^(e+1)) of |x|; `TensorArrays.exponents` holds the exponents of the arrays
    by binade. Counted are the values that are finite and not zero.
    """

    format: str
    axis: str  #: row | column | all
    values: Counts  #: by binade: all of these values
    underflow: Counts  #: by binade: values that become zero
    saturated: Counts  #: by binade: values that are clipped, see `saturated` in FORMAT_COLUMNS
    squared_error: Numbers  #: by binade: sum of (y - x)^2
    error: Numbers  #: by binade: sum of |y| - |x|, the bias in magnitude
    relative_error: Numbers  #: by binade: sum of |y - x| / |x|; divide by `values` for the mean
    #: values by code of the element (`megatron.fake_quant.code_points`); empty for bf16 and fp16
    codes: Counts
    scales: Counts  #: [256] blocks by stored scale byte; empty without block scales
    block_range: Counts  #: blocks by exponent(largest) - exponent(smallest above zero): 0, 1, ...
    headroom: Counts  #: blocks by log2(largest number * scale / amax): `HEADROOM_EDGES`


@dataclass(frozen=True)
class TensorArrays:
    """Histograms of one logical tensor."""

    exponents: Counts  #: [255] exponents of the binades: -127 (all subnormal float32) to 127
    positive: Counts  #: [255] finite values above zero, by binade
    negative: Counts  #: [255] finite values below zero, by binade
    patterns: Counts  #: [65536] finite values by bfloat16 pattern, see `histogram.Histogram`
    channel_amax: Numbers  #: [channels] largest finite magnitude
    token_amax: Numbers  #: [tokens] largest finite magnitude
    formats: dict[tuple[str, str], FormatArrays]  #: by format and axis


@dataclass(frozen=True)
class Statistics:
    """The statistics of a dump; the module's docstring describes their parts."""

    tensors: pd.DataFrame  #: IDENTITY_COLUMNS and VALUE_COLUMNS, one row per logical tensor
    formats: pd.DataFrame  #: FORMAT_COLUMNS, one row per tensor, format and axis
    problems: list[Problem] = field(default_factory=list)  #: files that were left out, and why
    load_arrays: Callable[[int], TensorArrays] | None = None  #: backs `arrays`
    remarks: list[str] = field(default_factory=list)  #: failures of the cache
    repeats: int = 0  #: tensors of recomputed forward passes that were skipped

    def arrays(self, tensor: int) -> TensorArrays:
        """Return the histograms of the tensor in this row of `tensors`."""
        assert self.load_arrays is not None
        return self.load_arrays(tensor)

    def notes(self) -> dict[str, int]:
        """Return how many tensors have each note; a note says what was left out of a tensor."""
        return notes_by_text(self.tensors["note"])

    def joined(self) -> pd.DataFrame:
        """Return `formats` with the columns of each row's tensor added: tidy data for a plot."""
        return self.formats.join(self.tensors, on="tensor")
