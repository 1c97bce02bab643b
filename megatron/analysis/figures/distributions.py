"""distributions/: how the values of each tensor are spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import NormalDist

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megatron.analysis.figures.figure_data import (
    KINDS,
    FigureData,
    Make,
    NothingToDrawError,
    legend,
    share_y,
    sheet,
    trimmed,
)
from megatron.analysis.figures.patterns import REACH as PATTERN_REACH
from megatron.analysis.figures.patterns import density, magnitude_quantiles, standard_quantiles
from megatron.analysis.figures.ranges import format_ranges
from megatron.analysis.plots import (
    plot_boxes,
    plot_density,
    plot_exponent_histogram,
    plot_quantiles,
)

MOST = 36  #: small pictures on one sheet
#: Explanation of the bars below an exponent histogram.
REACH = (
    "bars: the range of each format (thin: subnormal); in block formats, bars hold for a block "
    "with the median scale, and the line extends to blocks with other scales"
)


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """exponents, histogram, box and qq."""
    if not figure_data.sums.patterns:
        raise NothingToDrawError("no tensor has a value that could be counted")
    yield "exponents", partial(exponents, figure_data)
    places = figure_data.places_apart
    for sheet_number, first in enumerate(range(0, len(places), MOST), start=1):
        name = "histogram" if first == 0 else f"histogram_{sheet_number}"
        yield name, partial(histogram, figure_data, places[first : first + MOST])
    for name, make in (("box", box), ("qq", quantile_quantile)):
        yield name, partial(make, figure_data)


def exponent_shares(figure_data: FigureData, kind: str) -> pd.DataFrame:
    """Return the share of values per binade and tensor name, for `plot_exponent_histogram`.

    Only the tensors of one kind by which formats are judged count.
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
    """Shares by binade of named counts, for `plot_exponent_histogram`; those without any value are
    left out.
    """
    chosen = trimmed(sum(counts.values(), start=np.zeros(255, dtype=np.int64)))
    frames = [
        pd.DataFrame(
            {
                "group": name,
                "exponent": np.arange(255)[chosen] - 127,
                "share": found[chosen] / max(found.sum(), 1),
            }
        )
        for name, found in counts.items()
        if found.any()
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def exponents(figure_data: FigureData) -> Figure:
    """Exponent histograms with the formats' ranges."""
    judged = figure_data.judged if figure_data.formats else figure_data.tensors
    kinds = figure_data.kinds(judged)
    figure, axes = sheet(5.4 * len(kinds), 5.0, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        mine = figure_data.judged[figure_data.judged["kind"] == kind]
        ranges = format_ranges(figure_data.formats, mine)
        plot_exponent_histogram(
            exponent_shares(figure_data, kind), ranges, title=KINDS[kind], ax=ax
        )
    for ax in axes[1:]:
        ax.set_ylabel("")
    legend(figure, axes)
    origin = figure_data.judged_origin if figure_data.formats else figure_data.origin
    note = f"{REACH}; zeros and the lowest 0.01 % are left out; {origin}"
    figure_data.headline(figure, "Values by magnitude, and what the formats reach", note)
    return figure


def histogram(figure_data: FigureData, places: Sequence[str]) -> Figure:
    """Draw one small picture per place."""
    columns = min(4, len(places))
    rows = -(-len(places) // columns)
    figure, axes = sheet(3.1 * columns, 2.1 * rows + 0.9, rows, columns)
    for ax in axes[len(places) :]:
        ax.set_visible(False)
    for ax, place in zip(axes, places, strict=False):
        data = density(figure_data.sums.patterns[place])
        if data is None:
            ax.text(0.5, 0.5, "one value only", ha="center", transform=ax.transAxes)
            ax.set_title(figure_data.label(place), loc="left", fontsize=9)
            continue
        plot_density(data.assign(group=place.rpartition(" ")[2]), ax=ax)
        ax.set_title(figure_data.label(place), loc="left", fontsize=9)
    for ax in axes[: len(places) : columns]:
        ax.set_ylabel("density")
    note = f"x: standard deviations from zero, up to {PATTERN_REACH:g}; dotted: normal; "
    figure_data.headline(figure, "Distribution of values", note + figure_data.origin)
    return figure


def box(figure_data: FigureData) -> Figure:
    """Magnitudes of each place."""
    rows = [
        {"name": figure_data.label(place), "group": place.rpartition(" ")[2]}
        | magnitude_quantiles(figure_data.sums.patterns[place])
        for place in figure_data.places_apart
    ]
    figure, axes = sheet(9.5, 0.3 * len(rows) + 1.8)
    plot_boxes(pd.DataFrame(rows), ax=axes[0])
    note = "box: middle half; line in it: median; whiskers: 1 % to 99 %; tick: largest; hatched: "
    note += "gradients; ▾: zeros reach to here (in attention_probs: the causal mask); "
    figure_data.headline(figure, "Magnitudes of each tensor", note + figure_data.origin)
    return figure


def quantile_quantile(figure_data: FigureData) -> Figure:
    """Tails against a normal distribution."""
    kinds = figure_data.kinds(figure_data.tensors)
    figure, axes = sheet(4.9 * len(kinds), 6.2, 1, len(kinds))
    normal = NormalDist()
    shares = np.concatenate([10.0 ** np.arange(-6, -2), np.linspace(0.01, 0.99, 99)])
    shares = np.union1d(shares, 1 - shares)
    for ax, kind in zip(axes, kinds, strict=True):
        found = [
            pd.DataFrame(
                {
                    "group": place,
                    "normal": [normal.inv_cdf(share) for share in shares],
                    "value": standard_quantiles(figure_data.sums.patterns[place], shares),
                }
            )
            for place in figure_data.places_of(kind)
        ]
        plot_quantiles(pd.concat(found, ignore_index=True).dropna(), title=KINDS[kind], ax=ax)
        if ax.has_data():
            ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, fontsize=8)
    share_y(axes)
    note = "linear up to 10 standard deviations, logarithmic beyond; from 1e-6 to 1 - 1e-6; "
    title = "Tails: quantiles against a normal distribution"
    figure_data.headline(figure, title, note + figure_data.origin)
    return figure
