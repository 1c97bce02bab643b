"""block_analysis/: the scales, room and codes of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from megatron.analysis.dump.tensor_files import UnreadableTensorError
from megatron.analysis.figures.codes import usage
from megatron.analysis.figures.figure_data import (
    FigureData,
    Make,
    NothingToDrawError,
    legend,
    sheet,
)
from megatron.analysis.figures.heatmaps import file_name
from megatron.analysis.figures.scale_maps import scale_map
from megatron.analysis.plots import plot_block_map, plot_code_usage, plot_counts
from megatron.analysis.plots.style import powers_of_two, right_of_title
from megatron.analysis.stats import HEADROOM_EDGES
from megatron.analysis.stats.kernels.scalar_quantizer import NAN_E8M0
from megatron.fake_quant import get_format
from megatron.fake_quant.formats import BlockScaling, Cast

MAPS = 6  #: tensors on a sheet, of different places, those with the lowest SQNR first
MOST_CODES = 256


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """scale_map_<format>, blocks, code_usage."""
    formats = figure_data.with_blocks()
    if not formats:
        raise NothingToDrawError("none of the formats has blocks; add mxfp8 to --formats")
    for name in formats:
        if not get_format(name).square:
            yield f"scale_map_{file_name(name)}", partial(maps, figure_data, name)
    yield "blocks", partial(counted, figure_data, formats)
    yield "code_usage", partial(codes, figure_data)


def worst(figure_data: FigureData, fmt: str, count: int) -> pd.DataFrame:
    """Return the tensor with the lowest SQNR of each place, the lowest SQNR first.

    The SQNR is that of blocks along the last dimension, as in the maps.
    """
    mine = figure_data.judged[figure_data.judged["quantized_format"] == fmt]
    if mine.empty:
        raise NothingToDrawError(figure_data.nothing_judged)
    table = figure_data.found.formats
    along = table[(table["quantized_format"] == fmt) & (table["axis"] == "row")]
    sqnr = mine["tensor"].map(along.set_index("tensor")["sqnr_db"])
    mine = mine.assign(along_row=sqnr)[mine["count"] > 0]
    return mine.sort_values("along_row", kind="stable").drop_duplicates("place").head(count)


def maps(figure_data: FigureData, fmt: str) -> Figure:
    """Scale maps of the worst tensors."""
    rows = worst(figure_data, fmt, MAPS)
    drawn = []
    for row in rows.itertuples():
        try:
            drawn.append((row, scale_map(figure_data.load(row.tensor), fmt)))
        except (UnreadableTensorError, ValueError):
            continue  # only a part of it was collected, or its file is gone by now
    if not drawn:
        raise NothingToDrawError("no tensor with values was collected whole, or its file is gone")
    columns = min(3, len(drawn))
    height = -(-len(drawn) // columns)
    figure, axes = sheet(4.6 * columns, 3.5 * height + 0.8, height, columns)
    for ax in axes[len(drawn) :]:
        ax.set_visible(False)
    for ax, (row, data) in zip(axes, drawn, strict=False):
        title = f"L{row.layer_idx} {row.place}, {row.along_row:.1f} dB ({row.quant_type} run)"
        across = "output unit" if row.tensor_name.endswith("weight") else "row (token, head)"
        plot_block_map(
            data,
            rows=across,
            columns="first value of the block",
            title=title,
            ax=ax,
            powers=isinstance(get_format(fmt).scaling, BlockScaling),
        )
    note = "the stored scale of each block and the SQNR, for blocks along the last dimension; the "
    note += f"{figure_data.judge} of matmuls with the lowest SQNR, one per place; gray: zeros only"
    figure_data.headline(figure, f"{fmt}: scale maps", note)
    return figure


def counted(figure_data: FigureData, formats: list[str]) -> Figure:
    """Headroom, dynamic range and scales of blocks."""
    found = {name: figure_data.summed(name) for name in formats}
    known = {name: part for name, part in found.items() if part is not None}
    if not known:
        raise NothingToDrawError("no tensor was collected whole")
    figure, axes = sheet(14.0, 4.4, 1, 3)
    edges, step = HEADROOM_EDGES, HEADROOM_EDGES[1] - HEADROOM_EDGES[0]
    seen = np.flatnonzero(sum(part.headroom for part in known.values()))
    chosen = slice(int(seen[0]), int(seen[-1]) + 1) if len(seen) else slice(None)
    room = [
        pd.DataFrame(
            {
                "format": n,
                "left": edges[chosen],
                "right": edges[chosen] + step,
                "count": p.headroom[chosen],
            }
        )
        for n, p in known.items()
    ]
    plot_counts(
        pd.concat(room),
        xlabel="binades from the largest value up to the largest number",
        title="Headroom",
        ax=axes[0],
    )
    plot_counts(
        _by_number({n: p.block_range for n, p in known.items()}, 0),
        xlabel="binades between smallest and largest value",
        title="Range in a block",
        ax=axes[1],
    )
    e8m0 = {
        name: of_numbers(figure_data, name, part.scales)
        for name, part in known.items()
        if isinstance(get_format(name).scaling, BlockScaling)
    }
    if e8m0:
        data = _by_number(e8m0, -127)
        plot_counts(
            data,
            xlabel="scale of the block",
            title="Scales (E8M0)",
            ax=axes[2],
        )
        powers_of_two(axes[2].xaxis)
        if others := [name for name in known if name not in e8m0]:
            right_of_title(axes[2], f"without {', '.join(others)}, whose scales are E4M3")
    else:
        axes[2].set_visible(False)
    if alike := same_counts({n: p.block_range for n, p in known.items()}):
        right_of_title(axes[1], " = ".join(alike))
    for ax in axes[1:]:
        ax.set_ylabel("")
    legend(figure, axes)
    note = (
        f"{figure_data.judged_origin}; ranges and scales without 0.01 % at each end, blocks of "
        "zeros and NaN"
    )
    figure_data.headline(figure, "Blocks: room, range and scales", note)
    return figure


def same_counts(counts: dict[str, np.ndarray]) -> list[str]:
    """Return the formats whose counts equal those of another, so that one curve hides another."""
    return [
        name
        for name, found in counts.items()
        if any(other != name and np.array_equal(found, counts[other]) for other in counts)
    ]


def of_numbers(figure_data: FigureData, fmt: str, scales: np.ndarray) -> np.ndarray:
    """Blocks by E8M0 byte, without those of zeros only (they store the smallest scale) and those
    with a NaN.
    """
    mine = figure_data.judged[figure_data.judged["quantized_format"] == fmt]
    found: np.ndarray = scales.copy()
    found[0] -= int(mine["zero_blocks"].sum())
    found[NAN_E8M0] = 0
    return found


def _by_number(counts: dict[str, np.ndarray], first: int) -> pd.DataFrame:
    """Counts of whole numbers from `first` on, without 0.01 % at each end."""
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


def codes(figure_data: FigureData) -> Figure:
    """Usage of the codes of each format's elements."""
    mine = [
        name
        for name in figure_data.formats
        if not isinstance(get_format(name).element, Cast)
        and 1 << get_format(name).element.bits <= MOST_CODES
    ]
    found = {name: figure_data.summed(name) for name in mine}
    shown = {name: part for name, part in found.items() if part is not None and part.codes.any()}
    if not shown:
        raise NothingToDrawError("none of the formats has codes that are counted")
    figure, axes = sheet(11.0, 2.4 * len(shown) + 0.9, len(shown), 1)
    for ax, (name, part) in zip(axes, shown.items(), strict=True):
        scaled = get_format(name).scaling is not None
        plot_code_usage(usage(name, part), title=name, scaled=scaled, ax=ax)
    for ax, after in itertools.pairwise(axes):
        if ax.get_xlabel() == after.get_xlabel():
            ax.set_xlabel("")
    note = f"{figure_data.judged_origin}; red: never used"
    figure_data.headline(figure, "How often each code is used", note)
    return figure
