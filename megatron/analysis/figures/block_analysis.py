"""Draw the figures in `block_analysis/`: the scales, headroom, range and codes of blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from megatron.analysis.dump.tensor_files import UnreadableTensorError
from megatron.analysis.figures.figure_data import (
    FigureData,
    Make,
    NothingToDrawError,
    file_name,
    layer_name,
)
from megatron.analysis.figures.scale_maps import scale_map
from megatron.analysis.figures.sheet import label_edges, legend, sheet, shown
from megatron.analysis.figures.sums import FormatSum
from megatron.analysis.figures.sums import code_usage as usage_of
from megatron.analysis.plots.block_map import plot_block_map
from megatron.analysis.plots.code_usage import plot_code_usage
from megatron.analysis.plots.counts import plot_counts
from megatron.analysis.plots.style import powers_of_two, right_of_title
from megatron.analysis.plots.text import brief
from megatron.analysis.stats import HEADROOM_EDGES
from megatron.analysis.stats.kernels.scalar_quantizer import NAN_E8M0
from megatron.fake_quant import get_format

MAPS = 6  #: maximum number of scale maps per figure
MOST_CODES = 256  #: maximum number of codes in a bar chart


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figures "scale_map_<format>" for each format, "blocks" and "code_usage".

    Formats with square blocks have no scale map.

    Raises:
        NothingToDrawError: none of the formats stores a scale byte per block.
    """
    formats = figure_data.with_blocks()
    if not formats:
        raise NothingToDrawError("none of the formats has blocks; add mxfp8 to --formats")
    for name in formats:
        if not get_format(name).square:
            yield f"scale_map_{file_name(name)}", partial(scale_maps, figure_data, name)
    yield "blocks", partial(blocks, figure_data, formats)
    yield "code_usage", partial(code_usage, figure_data)


def worst(figure_data: FigureData, fmt: str, count: int) -> pd.DataFrame:
    """Return the `count` tensors with the lowest SQNR, at most one per module and tensor name.

    Of all tensors with the same module and tensor name, the one with the lowest SQNR is chosen. The
    SQNR is measured with blocks along the last dimension, as in the maps.
    """
    uses = figure_data.judged[figure_data.judged["quantized_format"] == fmt]
    if uses.empty:
        raise NothingToDrawError(figure_data.nothing_judged)
    table = figure_data.statistics.formats
    along = table[(table["quantized_format"] == fmt) & (table["axis"] == "row")]
    sqnr = uses["tensor"].map(along.set_index("tensor")["sqnr_db"])
    uses = uses.assign(along_row=sqnr)[uses["count"] > 0]
    return uses.sort_values("along_row", kind="stable").drop_duplicates("place").head(count)


def scale_maps(figure_data: FigureData, fmt: str) -> Figure:
    """Draw the block scales of the tensors with the lowest SQNR, one map per tensor."""
    rows = worst(figure_data, fmt, MAPS)
    drawn = []
    for row in rows.itertuples():
        try:
            drawn.append((row, scale_map(figure_data.load(row.tensor), fmt)))
        except (UnreadableTensorError, ValueError):
            continue  # only part of the tensor was collected, or a file has been removed
    if not drawn:
        raise NothingToDrawError(
            "each tensor is empty or was collected only in part, or its file was removed"
        )
    columns = min(3, len(drawn))
    height = -(-len(drawn) // columns)
    figure, axes = sheet(4.6 * columns, 3.5 * height + 0.8, height, columns)
    for ax, (row, data) in zip(shown(axes, len(drawn)), drawn, strict=True):
        place = f"{layer_name(row.layer_idx)} {brief(row.place, 30)}"
        title = f"{place}, {_sqnr(row.along_row)} ({brief(row.quant_type, 16)} run)"
        across = "output unit" if row.tensor_name.endswith("weight") else "row (token, head)"
        plot_block_map(
            data,
            rows=across,
            columns="index of the block's first value",
            title=title,
            ax=ax,
            powers=get_format(fmt).block_scale == "E8M0",
        )
    note = "the stored scale of each block and the SQNR, for blocks along the last dimension; the "
    note += f"{figure_data.judge} of matmuls with the lowest SQNR, one per place; gray: no scale"
    figure_data.headline(figure, f"{fmt}: scale maps", note)
    return figure


def _sqnr(value: float) -> str:
    if math.isfinite(value):
        return f"{value:.1f} dB"
    return "no error" if value == math.inf else "no SQNR"


def summed(figure_data: FigureData, formats: Iterable[str]) -> dict[str, FormatSum]:
    """Return the histograms of each format, summed over all tensors on which it is evaluated.

    Formats without histograms are omitted.
    """
    totals = {name: figure_data.summed(name) for name in formats}
    return {name: total for name, total in totals.items() if total is not None}


def blocks(figure_data: FigureData, formats: list[str]) -> Figure:
    """Draw histograms of the headroom, the dynamic range and the scales of quantization blocks."""
    totals = summed(figure_data, formats)
    if not totals:
        lost = "every tensor was collected only in part"
        raise NothingToDrawError(figure_data.nothing_judged if figure_data.judged.empty else lost)
    figure, axes = sheet(14.0, 4.4, 1, 3)
    plot_counts(
        _headroom(totals),
        xlabel="binades from the block's largest value to the format's",
        title="Headroom",
        ax=axes[0],
    )
    plot_counts(
        _by_number({name: total.block_range for name, total in totals.items()}, 0),
        xlabel="binades between the smallest and the largest value",
        title="Range",
        ax=axes[1],
    )
    e8m0 = {
        name: without_zeros_and_nan(figure_data, name, total.scales)
        for name, total in totals.items()
        if get_format(name).block_scale == "E8M0"
    }
    if e8m0:
        plot_counts(
            _by_number(e8m0, -127), xlabel="scale of the block", title="Scales (E8M0)", ax=axes[2]
        )
        powers_of_two(axes[2].xaxis)
        if len(e8m0) < len(totals):
            right_of_title(axes[2], "the other formats have no E8M0 scales")
    else:
        axes[2].set_visible(False)
    label_edges(axes, x=False)
    legend(figure, axes)
    note = (
        f"{figure_data.judged_origin}; ranges and scales without 0.01 % at each end, blocks of "
        "zeros and NaN"
    )
    if alike := same_counts({name: total.block_range for name, total in totals.items()}):
        note += f"; equal ranges: {'; '.join(map(' = '.join, alike))}"
    figure_data.headline(figure, "Blocks: headroom, range and scales", note)
    return figure


def same_counts(counts: dict[str, np.ndarray]) -> list[list[str]]:
    """Return each group of two or more formats whose arrays in `counts` are equal.

    The curves of such formats coincide.
    """
    groups: dict[bytes, list[str]] = {}
    for name, own in counts.items():
        groups.setdefault(own.tobytes(), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def without_zeros_and_nan(figure_data: FigureData, fmt: str, scales: np.ndarray) -> np.ndarray:
    """Return the number of blocks with each E8M0 scale byte, except all-zero and NaN blocks.

    All-zero blocks store the smallest scale, so their number is subtracted from the first count.

    Args:
        scales: number of blocks with each of the 256 E8M0 bytes, counting all blocks.
    """
    uses = figure_data.judged[figure_data.judged["quantized_format"] == fmt]
    counts: np.ndarray = scales.copy()
    counts[0] -= int(uses["zero_blocks"].sum())
    counts[NAN_E8M0] = 0
    return counts


def _headroom(totals: dict[str, FormatSum]) -> pd.DataFrame:
    """Return a table for `plot_counts` with the number of blocks in each bin of the headroom.

    The headroom is log2(largest number * scale / amax) of a block.
    Bins that are empty in all formats are removed at both ends.
    """
    edges, step = HEADROOM_EDGES, HEADROOM_EDGES[1] - HEADROOM_EDGES[0]
    occupied = np.flatnonzero(sum(total.headroom for total in totals.values()))
    chosen = slice(int(occupied[0]), int(occupied[-1]) + 1) if len(occupied) else slice(None)
    left = edges[chosen]
    return pd.concat(
        pd.DataFrame(
            {"format": name, "left": left, "right": left + step, "count": total.headroom[chosen]}
        )
        for name, total in totals.items()
    )


def _by_number(counts: dict[str, np.ndarray], first: int) -> pd.DataFrame:
    """Return block counts as a table for `plot_counts`, without the lowest and highest 0.01 %.

    Args:
        counts: for each format, the number of blocks by an integer property, such as the exponent
            of the scale.
        first: value of the property for the first count; each next count belongs to the next
            integer.
    """
    longest = max(len(part) for part in counts.values())
    padded = {name: np.pad(part, (0, longest - len(part))) for name, part in counts.items()}
    below = np.cumsum(sum(padded.values()))
    if not below[-1]:
        return pd.DataFrame({"format": [], "left": [], "right": [], "count": []})
    low, high = np.searchsorted(below, [1e-4 * below[-1], (1 - 1e-4) * below[-1]])
    low, high = int(low), int(high) + 1
    left = np.arange(low, high) + first
    return pd.concat(
        pd.DataFrame({"format": name, "left": left, "right": left + 1, "count": part[low:high]})
        for name, part in padded.items()
    )


def code_usage(figure_data: FigureData) -> Figure:
    """Draw how often each element code occurs, one panel per format."""
    small = [
        name
        for name in figure_data.formats
        if not get_format(name).is_cast and 1 << get_format(name).element.bits <= MOST_CODES
    ]
    totals = {
        name: total for name, total in summed(figure_data, small).items() if total.codes.any()
    }
    if not totals:
        lost = "none of the formats has codes that are counted"
        raise NothingToDrawError(figure_data.nothing_judged if figure_data.judged.empty else lost)
    figure, axes = sheet(11.0, 2.4 * len(totals) + 0.9, len(totals), 1)
    for ax, (name, total) in zip(axes, totals.items(), strict=True):
        scaled = get_format(name).scaling is not None
        plot_code_usage(usage_of(name, total), title=name, scaled=scaled, ax=ax)
    for ax, after in itertools.pairwise(axes):
        if ax.get_xlabel() == after.get_xlabel():
            ax.set_xlabel("")
    note = f"{figure_data.judged_origin}; red: never used"
    figure_data.headline(figure, "How often each code is used", note)
    return figure
