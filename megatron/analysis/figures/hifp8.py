"""hifp8_analysis/: where on HiFloat8's tapered precision the values lie, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megatron.analysis.figures.codes import usage
from megatron.analysis.figures.figure_data import (
    KINDS,
    FigureData,
    Make,
    NothingToDrawError,
    legend,
    share_y,
    sheet,
)
from megatron.analysis.figures.quantization import magnitude_errors
from megatron.analysis.figures.sums import FormatSum
from megatron.analysis.plots import (
    plot_code_usage,
    plot_error_by_magnitude,
    plot_stacked_shares,
)
from megatron.analysis.plots.style import INK, percent
from megatron.fake_quant import get_format
from megatron.fake_quant.formats import HiFloat8

#: Regions: name, first and last binade, colour. HiFloat8 has 3, 2, 1 bits of mantissa the farther
#: from 1, and powers of two only at the bottom. Its largest number is 2^15 itself.
REGIONS: dict[str, tuple[str, tuple[int, int]]] = {
    "lost (becomes zero)": ("#b3261e", (-127, -24)),
    "denormal: powers of two": ("#e0a458", (-23, -16)),
    "1 bit, 2⁻¹⁵…2⁻⁸": ("#a8cfb5", (-15, -8)),
    "2 bits, 2⁻⁷…2⁻⁴": ("#6fb187", (-7, -4)),
    "3 bits, 2⁻³…2³": ("#2c7a4f", (-3, 3)),
    "2 bits, 2⁴…2⁷": ("#6d9fb8", (4, 7)),
    "1 bit, 2⁸…2¹⁵": ("#a9c6d6", (8, 15)),
    "saturated (from 1.25 · 2¹⁵)": ("#7a1f4b", (16, 127)),
}
LOST, SATURATED = next(iter(REGIONS)), list(REGIONS)[-1]
EXPONENTS = np.arange(255) - 127


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """regions, code_usage, error_by_region, error_by_magnitude."""
    name = the_format(figure_data)
    for title, make in (
        ("regions", regions),
        ("error_by_region", error_by_region),
        ("error_by_magnitude", error_by_magnitude),
        ("code_usage", code_usage),
    ):
        yield title, partial(make, figure_data, name)


def the_format(figure_data: FigureData) -> str:
    """The first HiFloat8 format without a scale, by whose exponents values fall in regions."""
    for name in figure_data.formats:
        fmt = get_format(name)
        if isinstance(fmt.element, HiFloat8) and fmt.scaling is None:
            return name
    raise NothingToDrawError("hifp8 is not among the formats; add it to --formats")


def by_region(found: FormatSum) -> pd.DataFrame:
    """Return the number of values and the squared error of each region.

    Values that underflow or are clipped were counted during quantization. If any value of the
    highest binade was clipped, the whole error of that binade counts as error of clipped values:
    the sum does not separate it from values below 1.25 * 2^15, which round to 2^15.
    """
    kept = found.values - found.underflow - found.saturated
    error = found.squared_error.copy()
    beyond = np.where((found.saturated > 0) & (EXPONENTS >= 15), error, 0.0)
    error -= beyond
    rows = []
    for name, (_, (first, last)) in REGIONS.items():
        inside = slice(first + 127, last + 128)
        count, lost = kept[inside].sum(), error[inside].sum()
        if name == LOST:
            count += found.underflow.sum()
        if name == SATURATED:
            count, lost = count + found.saturated.sum(), lost + beyond.sum()
        rows.append({"region": name, "values": float(count), "error": float(lost)})
    return pd.DataFrame(rows)


def region_shares(found: FormatSum) -> pd.DataFrame:
    """The same as shares of all values that are not zero, and of the whole squared error."""
    table = by_region(found)
    for column in ("values", "error"):
        table[column] /= table[column].sum() or 1.0
    return table


def regions(figure_data: FigureData, fmt: str) -> Figure:
    """Which of the regions each tensor's values fall in."""
    sums = {place: figure_data.summed(fmt, [place]) for place in figure_data.judged_places()}
    rows = [
        {"name": place, "part": part, "share": share}
        for place, found in sums.items()
        if found is not None
        for part, share in region_shares(found)[["region", "values"]].itertuples(index=False)
    ]
    if not rows:
        raise NothingToDrawError(figure_data.nothing_judged)
    data = pd.DataFrame(rows)
    figure, axes = sheet(10.5, 0.3 * data["name"].nunique() + 2.2)
    colours = {name: colour for name, (colour, _) in REGIONS.items()}
    plot_stacked_shares(data, colours, xlabel="share of values that are not zero", ax=axes[0])
    legend(figure, axes, columns=4)
    title = "HiFloat8: bits of mantissa that the values get"
    figure_data.headline(figure, title, figure_data.judged_origin)
    return figure


def visible_percent(share: float) -> str:
    """Return a share in percent, or `<0.0001 %` if it is below one in a million."""
    return "<0.0001 %" if 0 < share < 1e-6 else percent(share)


def error_by_region(figure_data: FigureData, fmt: str) -> Figure:
    """Share of values and of the squared error in each region."""
    kinds = figure_data.kinds(figure_data.judged)
    figure, axes = sheet(4.8 * len(kinds), 4.4, 1, len(kinds), sharey=True)
    names = list(REGIONS)
    for ax, kind in zip(axes, kinds, strict=True):
        found = figure_data.summed(fmt, figure_data.judged_places(kind))
        assert found is not None
        data = region_shares(found)
        y = np.arange(len(names))
        for column, shift, colour in (("values", -0.2, "#9aa5b1"), ("error", 0.2, "#3d8f63")):
            ax.barh(y + shift, data[column], 0.38, color=colour, label=f"share of {column}")
            for place, share in zip(y + shift, data[column], strict=True):
                if share > 0:
                    ax.text(
                        share + 0.01,
                        place,
                        visible_percent(share),
                        va="center",
                        fontsize=7.5,
                        color=INK,
                    )
        ax.set_yticks(y, names)
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.set_xlim(0, 1.16)
        ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: percent(x)))
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(KINDS[kind], loc="left", fontweight="bold")
    legend(figure, axes)
    note = f"error: sum of squares; {figure_data.judged_origin}"
    figure_data.headline(figure, f"{fmt}: where the error comes from", note)
    return figure


def error_by_magnitude(figure_data: FigureData, fmt: str) -> Figure:
    """The tapered precision as it shows in the data, over the regions."""
    kinds = figure_data.kinds(figure_data.judged)
    figure, axes = sheet(4.8 * len(kinds), 4.4, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        data = magnitude_errors(figure_data, kind)
        data = data[data["format"] == fmt]
        plot_error_by_magnitude(data, title=KINDS[kind], ax=ax)
        if not ax.has_data():
            continue
        low, high = ax.get_xlim()
        for name, (colour, (first, last)) in REGIONS.items():
            left, right = max(first, low), min(last + 1, high)
            if left < right:
                ax.axvspan(left, right, color=colour, alpha=0.18, linewidth=0, label=name)
    share_y(axes)
    legend(figure, axes, columns=5)
    figure_data.headline(figure, f"{fmt}: relative error by magnitude", figure_data.judged_origin)
    return figure


def code_usage(figure_data: FigureData, fmt: str) -> Figure:
    """Which codes occur."""
    kinds = figure_data.kinds(figure_data.judged)
    figure, axes = sheet(11.0, 2.6 * len(kinds) + 0.9, len(kinds), 1)
    for ax, kind in zip(axes, kinds, strict=True):
        found = figure_data.summed(fmt, figure_data.judged_places(kind))
        assert found is not None
        plot_code_usage(usage(fmt, found), title=KINDS[kind], scaled=False, ax=ax)
    for ax in axes[:-1]:
        ax.set_xlabel("")
    legend(figure, axes)
    figure_data.headline(figure, f"{fmt}: how often each code is used", figure_data.judged_origin)
    return figure
