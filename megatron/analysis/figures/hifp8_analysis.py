"""Draw the figures in `hifp8_analysis/`: values and errors in HiFloat8's precision regions.

A region is a range of binades with the same number of mantissa bits, or one in which values
underflow or saturate.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megatron.analysis.figures.figure_data import KINDS, FigureData, Make, NothingToDrawError
from megatron.analysis.figures.quantization_analysis import magnitude_errors
from megatron.analysis.figures.sheet import legend, share_y, sheet
from megatron.analysis.figures.sums import FormatSum
from megatron.analysis.figures.sums import code_usage as usage_of
from megatron.analysis.plots.code_usage import plot_code_usage
from megatron.analysis.plots.error_by_magnitude import plot_error_by_magnitude
from megatron.analysis.plots.stacked_shares import plot_stacked_shares
from megatron.analysis.plots.style import INK, percent, text_size, visible_percent
from megatron.fake_quant import get_format

#: Color, first binade and last binade of each precision region. The mantissa has 3 bits for numbers
#: near 1, and 2 bits or 1 bit farther away. Denormal numbers are powers of two. The largest number
#: is 2^15.
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
#: Name of the last region in a format that rounds values beyond its range to Inf.
INFINITE = "becomes Inf (from 1.25 · 2¹⁵)"


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figures "regions", "error_by_region", "error_by_magnitude" and "code_usage"."""
    fmt = hifloat8_format(figure_data)
    for title, make in (
        ("regions", regions),
        ("error_by_region", error_by_region),
        ("error_by_magnitude", error_by_magnitude),
        ("code_usage", code_usage),
    ):
        yield title, partial(make, figure_data, fmt)


def hifloat8_format(figure_data: FigureData) -> str:
    """Return the first HiFloat8 format without scales; scales would shift the precision regions.

    Raises:
        NothingToDrawError: there is no such format.
    """
    for name in figure_data.formats:
        fmt = get_format(name)
        if fmt.element.tapered and fmt.scaling is None:
            return name
    raise NothingToDrawError("hifp8 is not among the formats; add it to --formats")


def regions_of(fmt: str) -> dict[str, tuple[str, tuple[int, int]]]:
    """Return the regions of a HiFloat8 format without scales; see `REGIONS`."""
    infinite = getattr(get_format(fmt).element, "overflow", "saturate") == "inf"
    last = INFINITE if infinite else SATURATED
    return {last if name == SATURATED else name: region for name, region in REGIONS.items()}


def by_region(total: FormatSum, fmt: str) -> pd.DataFrame:
    """Return the number of nonzero values and the sum of squared errors in each precision region.

    Values that underflow, saturate or become Inf, and their errors, were counted during
    quantization. They belong to the first and to the last region, whatever their binade. The
    numbers of values add up to the number of all finite nonzero values. Values that become Inf are
    left out of the errors.
    """
    # values that become Inf are in `saturated` and not in `values`
    inside_range = total.values + total.overflow - total.underflow - total.saturated
    rows = []
    for name, (_, (first, last)) in regions_of(fmt).items():
        binades = slice(first + 127, last + 128)
        count, squares = inside_range[binades].sum(), total.grid_error[binades].sum()
        if name == LOST:
            count, squares = count + total.underflow.sum(), squares + total.underflow_error.sum()
        if name in (SATURATED, INFINITE):
            count, squares = count + total.saturated.sum(), squares + total.clipping_error.sum()
        rows.append({"region": name, "values": float(count), "error": float(squares)})
    return pd.DataFrame(rows)


def region_shares(total: FormatSum, fmt: str) -> pd.DataFrame:
    """Return each precision region's share of the nonzero values and of the squared error."""
    table = by_region(total, fmt)
    for column in ("values", "error"):
        table[column] /= table[column].sum() or 1.0
    return table


def regions(figure_data: FigureData, fmt: str) -> Figure:
    """Draw the share of values in each precision region as stacked bars.

    There is one bar per place (module and tensor name).
    """
    sums = {place: figure_data.summed(fmt, [place]) for place in figure_data.judged_places()}
    rows = [
        {"name": place, "part": part, "share": share}
        for place, total in sums.items()
        if total is not None
        for part, share in region_shares(total, fmt)[["region", "values"]].itertuples(index=False)
    ]
    if not rows:
        raise NothingToDrawError(figure_data.nothing_judged)
    data = pd.DataFrame(rows)
    figure, axes = sheet(10.5, 0.3 * data["name"].nunique() + 2.2, categories=True)
    colors = {name: color for name, (color, _) in regions_of(fmt).items()}
    plot_stacked_shares(data, colors, xlabel="share of values that are not zero", ax=axes[0])
    legend(figure, axes, columns=4)
    title = "HiFloat8: mantissa bits of the values"
    figure_data.headline(figure, title, figure_data.judged_origin)
    return figure


def error_by_region(figure_data: FigureData, fmt: str) -> Figure:
    """Draw each precision region's share of the values and of the squared error.

    There is one panel per kind of tensor.
    """
    kinds = figure_data.kinds(figure_data.judged)
    figure, axes = sheet(4.8 * len(kinds), 4.4, 1, len(kinds), sharey=True)
    names = list(regions_of(fmt))
    for ax, kind in zip(axes, kinds, strict=True):
        total = figure_data.summed(fmt, figure_data.judged_places(kind))
        assert total is not None
        data = region_shares(total, fmt)
        y = np.arange(len(names))
        for column, shift, color in (("values", -0.2, "#9aa5b1"), ("error", 0.2, "#3d8f63")):
            ax.barh(y + shift, data[column], 0.38, color=color, label=f"share of {column}")
            for place, share in zip(y + shift, data[column], strict=True):
                if share > 0:
                    ax.text(
                        share + 0.01,
                        place,
                        visible_percent(share),
                        va="center",
                        fontsize=text_size(7.5),
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
    infinite = ", without values that become Inf" if INFINITE in names else ""
    note = f"error: sum of squares{infinite}; {figure_data.judged_origin}"
    figure_data.headline(figure, f"{fmt}: where the error comes from", note)
    return figure


def error_by_magnitude(figure_data: FigureData, fmt: str) -> Figure:
    """Draw the relative error by magnitude, with a colored band for each precision region."""
    kinds = figure_data.kinds(figure_data.judged)
    figure, axes = sheet(4.8 * len(kinds), 4.4, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        data = magnitude_errors(figure_data, kind)
        data = data[data["format"] == fmt]
        plot_error_by_magnitude(data, title=KINDS[kind], ax=ax)
        if not ax.has_data():
            continue
        low, high = ax.get_xlim()
        for name, (color, (first, last)) in regions_of(fmt).items():
            left, right = max(first, low), min(last + 1, high)
            if left < right:
                ax.axvspan(left, right, color=color, alpha=0.18, linewidth=0, label=name)
    share_y(axes)
    legend(figure, axes, columns=5)
    figure_data.headline(figure, f"{fmt}: relative error by magnitude", figure_data.judged_origin)
    return figure


def code_usage(figure_data: FigureData, fmt: str) -> Figure:
    """Draw how often each code occurs, one panel per kind of tensor."""
    kinds = figure_data.kinds(figure_data.judged)
    figure, axes = sheet(11.0, 2.6 * len(kinds) + 0.9, len(kinds), 1)
    for ax, kind in zip(axes, kinds, strict=True):
        total = figure_data.summed(fmt, figure_data.judged_places(kind))
        assert total is not None
        plot_code_usage(usage_of(fmt, total), title=KINDS[kind], scaled=False, ax=ax)
    for ax in axes[:-1]:
        ax.set_xlabel("")
    legend(figure, axes)
    figure_data.headline(figure, f"{fmt}: how often each code is used", figure_data.judged_origin)
    return figure
