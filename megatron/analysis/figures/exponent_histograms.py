"""Compute the data of exponent histograms: shares of values per binade, and format ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.figures.figure_data import FigureData, trimmed
from megatron.fake_quant import get_format, scalings
from megatron.fake_quant.inspect import format_properties

#: Part of a figure's note that explains the bars below an exponent histogram.
RANGE_NOTE = (
    "bars: the range of each format (thin: subnormal); in block formats, bars hold for a block "
    "with the median scale, and the line extends to blocks with other scales"
)
LANE = 0.18  #: height in inches that a figure gains for each format above `LANES`
LANES = 5  #: number of formats whose bars fit below a histogram of usual height


def bars_height(ranges: pd.DataFrame) -> float:
    """Return the additional height in inches that a figure needs for the bars of many formats."""
    return LANE * max(0, len(ranges) - LANES)


def exponent_shares(figure_data: FigureData, kind: str) -> pd.DataFrame:
    """Return the share of the values in each binade, by tensor name, for tensors of one kind.

    The table is for `plot_exponent_histogram`. If the figures show formats, only tensors on which
    the formats are evaluated are counted.
    """
    table = figure_data.judged[figure_data.judged["kind"] == kind]
    if not figure_data.formats:
        table = figure_data.tensors[figure_data.tensors["kind"] == kind]
    counts = {
        str(name): figure_data.sums.binades_of(set(part["place"]))
        for name, part in table.groupby("tensor_name", sort=False)
    }
    return binade_shares(counts)


def binade_shares(counts: Mapping[str, NDArray[np.int64]]) -> pd.DataFrame:
    """Return, for each name in `counts`, the share of values in each binade.

    The table is for `plot_exponent_histogram`. Names whose counts are all zero are omitted, and so
    are the binades of the lowest 0.01 % of all values.

    Args:
        counts: for each name, the number of values in each of the 255 binades.
    """
    chosen = trimmed(sum(counts.values(), start=np.zeros(255, dtype=np.int64)))
    frames = [
        pd.DataFrame(
            {
                "group": name,
                "exponent": np.arange(255)[chosen] - 127,
                "share": binades[chosen] / max(binades.sum(), 1),
            }
        )
        for name, binades in counts.items()
        if binades.any()
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def format_ranges(formats: Sequence[str], table: pd.DataFrame) -> pd.DataFrame:
    """Return the limits of each format's range of magnitudes, as base-2 logarithms.

    The range of a block (or tensor) is the range of the elements times the scale. Formats with
    bfloat16 elements and formats with unknown scales are omitted.

    Args:
        formats: names of the formats.
        table: rows of `FigureData.judged`. The columns `quantized_format`, `scale_median`,
            `scale_min`, `scale_max` and `amax` are used.

    Returns:
        One row per format. At the median scale, `smallest` is the smallest positive number,
        `normal` the smallest normal number and `largest` the largest number. `lowest` is the
        smallest number at the smallest scale, and `highest` the largest number at the largest
        scale.
    """
    rows = []
    for name in formats:
        fmt, uses = get_format(name), table[table["quantized_format"] == name]
        if fmt.element.name == "bfloat16":
            continue  # the range of bfloat16 contains every value
        shift = low = high = 0.0
        finer_exponents = 0
        largest = float(format_properties.positive_values(fmt.element)[-1])
        target = scalings.target(fmt)
        if target is not None and fmt.block_size is None:
            shift, low, high = _shifts(uses["amax"], target)
        elif fmt.scaling is not None:
            finer_exponents = fmt.scaling.finer_exponents
            shift = uses["scale_median"].median()
            low, high = uses["scale_min"].min(), uses["scale_max"].max()
            if target is not None:  # add the tensor scale's logarithm to the block scale's
                shift += _shifts(uses["amax"], target)[0]
                own = [_shifts(uses["amax"][[at]], target)[0] for at in uses.index]
                low, high = (uses["scale_min"] + own).min(), (uses["scale_max"] + own).max()
        if math.isnan(shift):
            continue
        # In HiFloat4, one bit per 8 values and one bit per 4 values can each double an element. The
        # smallest numbers occur where neither bit is set.
        smallest = math.log2(float(format_properties.positive_values(fmt.element)[0]))
        rows.append(
            {
                "format": name,
                "lowest": smallest + low,
                "smallest": smallest + shift,
                "normal": math.log2(fmt.element.smallest_normal) + shift,
                "largest": math.log2(largest) + shift + finer_exponents,
                "highest": math.log2(largest) + high + finer_exponents,
            }
        )
    columns = ["format", "lowest", "smallest", "normal", "largest", "highest"]
    return pd.DataFrame(rows, columns=columns)


def _shifts(amax: pd.Series[float], target: float) -> tuple[float, float, float]:
    """Return log2 of the tensor scales for the median, smallest and largest positive amax.

    The tensor scale is amax / target. All results are 0 if no amax is positive.
    """
    known = amax[amax > 0]
    if known.empty:
        return 0.0, 0.0, 0.0
    median, low, high = (math.log2(x / target) for x in (known.median(), known.min(), known.max()))
    return median, low, high
