"""Draw the figures in `distributions/`: the distribution of the values of each tensor.

Quantiles and densities are computed from the counts of bfloat16 bit patterns, summed over tensors.
They are exact to one bfloat16 step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megatron.analysis.figures.exponent_histograms import (
    RANGE_NOTE,
    bars_height,
    exponent_shares,
    format_ranges,
)
from megatron.analysis.figures.figure_data import KINDS, FigureData, Make, NothingToDrawError
from megatron.analysis.figures.sheet import label_edges, legend, sheet, shown
from megatron.analysis.plots.boxes import plot_boxes
from megatron.analysis.plots.density import plot_density
from megatron.analysis.plots.exponent_histogram import plot_exponent_histogram
from megatron.analysis.plots.style import FAINT, text_size, visible_percent

MOST = 36  #: maximum number of panels per figure
REACH = 12.0  #: maximum distance from zero in a histogram, in standard deviations
BINS = 96  #: number of bins of a histogram

_PATTERNS = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
with np.errstate(invalid="ignore"):  # NumPy warns when it converts a signaling NaN
    _VALUES = _PATTERNS.view(np.float32).astype(np.float64)
_FINITE = np.isfinite(_VALUES)
#: Bit patterns of the finite bfloat16 numbers, in ascending order of the numbers.
_RISING = np.flatnonzero(_FINITE)[np.argsort(_VALUES[_FINITE], kind="stable")]


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figures "exponents", "histogram" and "box".

    More than `MOST` panels are split into "histogram", "histogram_2" and so on.

    Raises:
        NothingToDrawError: no values were counted.
    """
    if not figure_data.sums.patterns:
        raise NothingToDrawError("no tensor has a value that could be counted")
    yield "exponents", partial(exponents, figure_data)
    places = figure_data.places_apart
    for number, first in enumerate(range(0, len(places), MOST), start=1):
        name = "histogram" if first == 0 else f"histogram_{number}"
        yield name, partial(histogram, figure_data, places[first : first + MOST])
    yield "box", partial(box, figure_data)


def exponents(figure_data: FigureData) -> Figure:
    """Draw one exponent histogram per kind of tensor, with the ranges of the formats below it."""
    judged = figure_data.judged if figure_data.formats else figure_data.tensors
    kinds = figure_data.kinds(judged)
    uses = figure_data.judged
    ranges = [format_ranges(figure_data.formats, uses[uses["kind"] == kind]) for kind in kinds]
    height = 5.0 + max(map(bars_height, ranges))
    figure, axes = sheet(5.4 * len(kinds), height, 1, len(kinds))
    for ax, kind, own in zip(axes, kinds, ranges, strict=True):
        shares = exponent_shares(figure_data, kind)
        plot_exponent_histogram(shares, own, title=KINDS[kind], ax=ax)
    label_edges(axes, x=False)
    legend(figure, axes)
    origin = figure_data.judged_origin if figure_data.formats else figure_data.origin
    note = f"{RANGE_NOTE}; zeros and the lowest 0.01 % are left out; {origin}"
    figure_data.headline(figure, "Values by magnitude, and the ranges of the formats", note)
    return figure


def histogram(figure_data: FigureData, places: Sequence[str]) -> Figure:
    """Draw the density of the values, one panel per place (module and tensor name)."""
    columns = min(4, len(places))
    rows = -(-len(places) // columns)
    figure, axes = sheet(3.1 * columns, 2.1 * rows + 0.9, rows, columns)
    axes = shown(axes, len(places))
    for ax, place in zip(axes, places, strict=True):
        patterns = figure_data.sums.patterns[place]
        data = density(patterns)
        if data is None:
            ax.text(0.5, 0.5, "one value only", ha="center", transform=ax.transAxes)
            ax.set_title(figure_data.label(place), loc="left", fontsize=text_size(9))
            continue
        plot_density(data.assign(group=place.rpartition(" ")[2]), ax=ax)
        ax.set_title(figure_data.label(place), loc="left", fontsize=text_size(9))
        ax.set(xlabel="x / std", ylabel="density")
        if beyond := share_beyond(patterns):
            ax.text(
                0.98,
                0.96,
                f"{visible_percent(beyond)} beyond",
                ha="right",
                va="top",
                color=FAINT,
                fontsize=text_size(7),
                transform=ax.transAxes,
            )
    label_edges(axes)
    note = f"std: standard deviation; a panel reaches to {REACH:g} std at most; dotted: normal; "
    figure_data.headline(figure, "Distribution of values", note + figure_data.origin)
    return figure


def box(figure_data: FigureData) -> Figure:
    """Draw a box plot of the magnitudes, one box per place (module and tensor name)."""
    rows = [
        {"name": figure_data.label(place), "group": place.rpartition(" ")[2]}
        | magnitude_quantiles(figure_data.sums.patterns[place])
        for place in figure_data.places_apart
    ]
    figure, axes = sheet(9.5, 0.3 * len(rows) + 1.8, categories=True)
    plot_boxes(pd.DataFrame(rows), ax=axes[0])
    note = "box: middle half; line in it: median; whiskers: 1 % to 99 %; tick: largest; hatched: "
    note += "gradients; ▾: zeros reach to here (in attention_probs: the causal mask); "
    figure_data.headline(figure, "Magnitudes of each tensor", note + figure_data.origin)
    return figure


def magnitude_quantiles(patterns: NDArray[np.int64]) -> dict[str, float]:
    """Return five quantiles and the maximum of the magnitudes, from the counts of bit patterns.

    The quantiles are those at 1, 25, 50, 75 and 99 %.

    Zeros are included. All results are NaN if `patterns` has no counts.

    Args:
        patterns: number of values with each bfloat16 bit pattern.
    """
    magnitudes = patterns[: 1 << 15] + patterns[1 << 15 :]
    total = int(magnitudes.sum())
    if not total:
        return dict.fromkeys(("p1", "p25", "p50", "p75", "p99", "largest"), np.nan)
    below = np.cumsum(magnitudes)
    shares = (("p1", 0.01), ("p25", 0.25), ("p50", 0.5), ("p75", 0.75), ("p99", 0.99))
    at = {name: int(np.searchsorted(below, share * total)) for name, share in shares}
    at["largest"] = int(np.flatnonzero(magnitudes)[-1])
    return {name: float(_VALUES[place]) for name, place in at.items()}


def moments(patterns: NDArray[np.int64]) -> tuple[float, float]:
    """Return the mean and standard deviation of the finite values, from the counts of bit patterns.

    Args:
        patterns: number of values with each bfloat16 bit pattern.
    """
    counts, values = patterns[_FINITE].astype(np.float64), _VALUES[_FINITE]
    total = max(counts.sum(), 1.0)
    mean = float(counts @ values / total)
    return mean, float(np.sqrt(counts @ (values - mean) ** 2 / total))


def share_beyond(patterns: NDArray[np.int64]) -> float:
    """Return the share of the finite values that are more than `REACH` standard deviations from 0.

    Args:
        patterns: number of values with each bfloat16 bit pattern.
    """
    counts = patterns[_RISING]
    beyond = np.abs(_VALUES[_RISING]) > REACH * moments(patterns)[1]
    return float(counts[beyond].sum() / max(counts.sum(), 1))


def density(patterns: NDArray[np.int64]) -> pd.DataFrame | None:
    """Return the density of the values in bins of equal width, or None if all values are equal.

    The values are first divided by their standard deviation.

    Args:
        patterns: number of values with each bfloat16 bit pattern.
    """
    std = moments(patterns)[1]
    if not std > 0:
        return None
    counts, values = patterns[_RISING], _VALUES[_RISING] / std
    occupied = np.flatnonzero(counts)
    reach = min(REACH, max(4.0, float(np.abs(values[occupied]).max())))
    edges = np.linspace(-reach, reach, BINS + 1)
    binned, _ = np.histogram(values[occupied], edges, weights=counts[occupied])
    width, total = edges[1] - edges[0], counts.sum()
    return pd.DataFrame(
        {"left": edges[:-1], "right": edges[1:], "density": binned / (total * width)}
    )
