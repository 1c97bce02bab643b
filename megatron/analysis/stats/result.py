"""What `stats.compute` returns: two tidy tables, and histograms on demand.

Missing numbers are NaN: a mean where there is no finite value, an SQNR where there is no error (it
is inf), a statistic that the format does not have (scales of a format without any). Counts are
whole numbers and never missing.
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

#: Shares of which `tensors` has the quantile of the values (`q0.5`) and of the magnitudes (`m0.5`).
QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)

#: What a row of `tensors` is: the record's fields. `path` is the first shard's file, `shards` how
#: many files the tensor was put together from, `shape` that of the logical tensor, `data_rank` the
#: data-parallel rank whose data it is. `note` says what is left out and why, else is empty.
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

#: Columns of `tensors` that are computed. Moments and quantiles are of the finite values.
#:
#: count         all values            finite, nan, inf   count = finite + nan + inf
#: zeros         of either sign        negative_zeros     those with a sign
#: min max mean std rms amax           std divides by n; amax is the largest magnitude
#: smallest      the smallest magnitude that is not zero
#: l1            sum of the magnitudes
#: skewness kurtosis                   kurtosis of a normal distribution is 3; NaN if constant
#: channels, outlier_channels          channels are the hidden units, or head and head_dim; an
#:               outlier's amax is beyond 6 times the median channel's, see `arrays`
#: dead_channels                       channels with values, and nothing but zeros (NaN is none)
#: channel_amax_ratio                  largest over median of the channels' amax
#: token_amax_ratio                    and of the tokens'; medians are of those that are not zero
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

#: Columns of `formats`. x is a value and y what it becomes; sums run over the values that are
#: finite before and after.
#:
#: tensor              the row of `tensors` it belongs to
#: quantized_format    name of the format            axis     row | column | all
#: used_by             GEMM that quantizes this operand so (fprop dgrad wgrad, joined by +), or ""
#: mse                 mean of (y - x)^2             rmse     its root
#: sqnr_db             10 log10(sum x^2 / sum (y - x)^2); inf without error
#: cosine              sum x y / sqrt(sum x^2 sum y^2); NaN where one of them is zero
#: bias                mean of y - x                 relative_bias   bias over the mean magnitude
#: relative_error      mean of |y - x| / |x| over x != 0
#: max_error           largest |y - x|
#: compared            values in the sums            poisoned  finite x whose y is NaN (its block)
#: nonzero             those of `compared` with x != 0
#: underflow           share of `nonzero` with y == 0, of either sign
#: saturated           share of the finite x that are clipped: with an unbounded exponent range they
#:                     would round to a larger number than the format's largest. Values that round
#:                     to the largest number anyway do not count, nor do values that become zero:
#:                     they underflow. Poisoned x are left out; weigh the share of several
#:                     tensors by finite - poisoned, and `underflow` by nonzero
#: codes_used          codes that occur              codes     codes that the element has
#: code_entropy        bits                          (all three NaN for bf16 and fp16)
#: blocks              with a scale of their own     zero_blocks, nan_blocks   among them
#: scale_min scale_max scale_median    of the stored scale's exponent: E8M0 byte - 127; nvfp4 and
#:                     hifp4: log2 of the scale; over blocks that are neither zero nor NaN
#: scales_used         distinct scales
#: block_range         mean over the blocks that are neither zero nor NaN of the distance of the
#:                     binades of their largest and their smallest magnitude above zero
#: block_range_max     the largest
#: headroom            mean over these blocks of log2(largest number * scale / largest magnitude);
#:                     if negative, the largest magnitude exceeds the largest number, and is rounded
#:                     or clipped to it
#: axis_disagreement   share of values that become another number along the other axis
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

#: Edges of the bins of `headroom`, in binades: eighths, from -1 to 2; the last bin has all beyond.
HEADROOM_EDGES = np.arange(-8, 17) / 8

Counts = NDArray[np.int64]
Numbers = NDArray[np.float64]


#: Note on the tensors that activation recomputation has saved a second time.
REPEATED = "saved again by activation recomputation; skipped, because the first pass counts"


def words_of_repeats(count: int) -> str:
    """Return a line on the tensors that were skipped because recomputation repeats them."""
    return f"{count:,} tensor{'' if count == 1 else 's'}: {REPEATED}"


def notes_by_text(notes: Iterable[str]) -> dict[str, int]:
    """How many tensors have each note, in the order of the tensors. One may have several."""
    return dict(
        Counter(note for of_one in notes if of_one for note in of_one.split(NOTE_SEPARATOR))
    )


@dataclass(frozen=True)
class FormatArrays:
    """Histograms of one tensor in one format along one axis.

    A binade is [2^e, 2^(e+1)) of |x|; arrays by binade go with `TensorArrays.exponents`. Values
    are the finite ones that are not zero.
    """

    format: str
    axis: str  #: row | column | all
    values: Counts  #: by binade
    underflow: Counts  #: by binade: those that become zero
    saturated: Counts  #: by binade: values that are clipped, see `saturated` above
    squared_error: Numbers  #: by binade: sum of (y - x)^2
    error: Numbers  #: by binade: sum of |y| - |x|, the bias in magnitude
    relative_error: Numbers  #: by binade: sum of |y - x| / |x|; divide by `values` for the mean
    #: by code of the element (`megatron.fake_quant.code_points`); empty for bf16 and fp16
    codes: Counts
    scales: Counts  #: [256] blocks by stored scale byte; empty without block scales
    block_range: Counts  #: blocks by exponent(largest) - exponent(smallest above zero): 0, 1, ...
    headroom: Counts  #: blocks by log2(largest number * scale / amax): `HEADROOM_EDGES`


@dataclass(frozen=True)
class TensorArrays:
    """Histograms of one logical tensor."""

    exponents: Counts  #: [255] of the binades: -127 (all subnormal float32) to 127
    positive: Counts  #: [255] finite values above zero, by binade
    negative: Counts  #: [255] below zero
    patterns: Counts  #: [65536] finite values by bfloat16 pattern, see `histogram.Histogram`
    channel_amax: Numbers  #: [channels] largest finite magnitude
    token_amax: Numbers  #: [tokens]
    formats: dict[tuple[str, str], FormatArrays]  #: by format and axis


@dataclass(frozen=True)
class Statistics:
    """What was computed of a dump."""

    tensors: pd.DataFrame  #: IDENTITY_COLUMNS and VALUE_COLUMNS, a row a logical tensor
    formats: pd.DataFrame  #: FORMAT_COLUMNS, a row a tensor, format and axis
    problems: list[Problem] = field(default_factory=list)  #: what could not be read, and why
    load_arrays: Callable[[int], TensorArrays] | None = None
    remarks: list[str] = field(default_factory=list)  #: what became of a cache that failed
    repeats: int = 0  #: tensors of recomputed forward passes that were skipped

    def arrays(self, tensor: int) -> TensorArrays:
        """Histograms of the tensor in this row of `tensors`."""
        assert self.load_arrays is not None
        return self.load_arrays(tensor)

    def notes(self) -> dict[str, int]:
        """What is left out of tensors and why, and of how many; see `note` of the tensors."""
        return notes_by_text(self.tensors["note"])

    def joined(self) -> pd.DataFrame:
        """A row of `formats` with the columns of its tensor beside it: tidy data for a plot."""
        return self.formats.join(self.tensors, on="tensor")
