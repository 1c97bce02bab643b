"""hifp8_analysis/: where on HiFloat8's tapered precision the values lie, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megatron.analysis.figures.codes import usage
from megatron.analysis.figures.heatmaps import KINDS
from megatron.analysis.figures.material import (
    Material,
    NothingToDrawError,
    headline,
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

#: Regions by |exponent|: name, first and last exponents, colour. HiFloat8 has 3, 2, 1 bits of
#: mantissa the farther from 1, and powers of two only at the bottom.
REGIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "lost (below 2^-23)": ("#b3261e", lambda e: e < -23),
    "denormal: powers of two": ("#e0a458", lambda e: (e >= -23) & (e <= -16)),
    "1 bit, 2^-15..2^-8": ("#a8cfb5", lambda e: (e >= -15) & (e <= -8)),
    "2 bits, 2^-7..2^-4": ("#6fb187", lambda e: (e >= -7) & (e <= -4)),
    "3 bits, 2^-3..2^3": ("#2c7a4f", lambda e: (e >= -3) & (e <= 3)),
    "2 bits, 2^4..2^7": ("#6d9fb8", lambda e: (e >= 4) & (e <= 7)),
    "1 bit, 2^8..2^15": ("#a9c6d6", lambda e: (e >= 8) & (e <= 15)),
    "saturated (above 2^15)": ("#7a1f4b", lambda e: e > 15),
}
EXPONENTS = np.arange(255) - 127


def draw(material: Material) -> Iterator[tuple[str, Figure]]:
    """regions, code_usage, error_by_region, error_by_magnitude."""
    name = the_format(material)
    yield "regions", regions(material)
    yield "error_by_region", error_by_region(material, name)
    yield "error_by_magnitude", error_by_magnitude(material, name)
    yield "code_usage", code_usage(material, name)


def the_format(material: Material) -> str:
    """The first HiFloat8 format without a scale, by whose exponents values fall in regions."""
    for name in material.formats:
        fmt = get_format(name)
        if isinstance(fmt.element, HiFloat8) and fmt.scaling is None:
            return name
    raise NothingToDrawError("hifp8 is not among the formats; add it to --formats")


def region_shares(counts: np.ndarray) -> dict[str, float]:
    """Share of values above zero in magnitude, by region."""
    total = max(int(counts.sum()), 1)
    return {
        name: float(counts[inside(EXPONENTS)].sum() / total)
        for name, (_, inside) in REGIONS.items()
    }


def regions(material: Material) -> Figure:
    """Which of the regions each tensor's values fall in."""
    rows = [
        {"name": place, "part": part, "share": share}
        for place in material.places
        for part, share in region_shares(material.sums.binades_of({place})).items()
    ]
    data = pd.DataFrame(rows)
    figure, axes = sheet(10.5, 0.3 * data["name"].nunique() + 2.2)
    colours = {name: colour for name, (colour, _) in REGIONS.items()}
    plot_stacked_shares(data, colours, xlabel="share of values that are not zero", ax=axes[0])
    legend(figure, axes, columns=4)
    headline(figure, "HiFloat8: bits of mantissa that the values get", material.origin)
    return figure


def error_by_region(material: Material, fmt: str) -> Figure:
    """Share of values and of the squared error in each region."""
    kinds = [kind for kind in KINDS if (material.uses["kind"] == kind).any()]
    figure, axes = sheet(4.8 * len(kinds), 4.4, 1, len(kinds), sharey=True)
    names = list(REGIONS)
    for ax, kind in zip(axes, kinds, strict=True):
        found = material.summed(fmt, material.places_of(kind))
        assert found is not None
        data = _region_table(found)
        y = np.arange(len(names))
        for column, shift, colour in (("values", -0.2, "#9aa5b1"), ("error", 0.2, "#3d8f63")):
            ax.barh(y + shift, data[column], 0.38, color=colour, label=f"share of {column}")
            for place, share in zip(y + shift, data[column], strict=True):
                if share > 0:
                    ax.text(
                        share + 0.01, place, percent(share), va="center", fontsize=7.5, color=INK
                    )
        ax.set_yticks(y, names)
        ax.set_ylim(len(names) - 0.4, -0.6)
        ax.set_xlim(0, 1.16)
        ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: percent(x)))
        ax.spines[["top", "right"]].set_visible(False)
        ax.set_title(KINDS[kind], loc="left", fontweight="bold")
    legend(figure, axes)
    note = f"error: sum of squares; {material.origin}"
    headline(figure, f"{fmt}: where the error comes from", note)
    return figure


def _region_table(found: FormatSum) -> pd.DataFrame:
    values, errors = max(int(found.values.sum()), 1), found.squared_error.sum() or 1.0
    return pd.DataFrame(
        [
            {
                "region": name,
                "values": found.values[inside(EXPONENTS)].sum() / values,
                "error": found.squared_error[inside(EXPONENTS)].sum() / errors,
            }
            for name, (_, inside) in REGIONS.items()
        ]
    )


def error_by_magnitude(material: Material, fmt: str) -> Figure:
    """The tapered precision as it shows in the data, over the regions."""
    kinds = [kind for kind in KINDS if (material.uses["kind"] == kind).any()]
    figure, axes = sheet(4.8 * len(kinds), 4.4, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        data = magnitude_errors(material, kind)
        data = data[data["format"] == fmt]
        plot_error_by_magnitude(data, title=KINDS[kind], ax=ax)
        if not ax.has_data():
            continue
        low, high = ax.get_xlim()
        for name, (colour, inside) in REGIONS.items():
            mine = EXPONENTS[inside(EXPONENTS)]
            left, right = max(mine[0], low), min(mine[-1] + 1, high)
            if left < right:
                ax.axvspan(left, right, color=colour, alpha=0.18, linewidth=0, label=name)
    share_y(axes)
    legend(figure, axes, columns=5)
    headline(figure, f"{fmt}: relative error by magnitude", material.origin)
    return figure


def code_usage(material: Material, fmt: str) -> Figure:
    """Which codes occur."""
    kinds = [kind for kind in KINDS if (material.uses["kind"] == kind).any()]
    figure, axes = sheet(11.0, 2.6 * len(kinds) + 0.9, len(kinds), 1)
    for ax, kind in zip(axes, kinds, strict=True):
        found = material.summed(fmt, material.places_of(kind))
        assert found is not None
        plot_code_usage(usage(fmt, found), title=KINDS[kind], ax=ax)
    for ax in axes[:-1]:
        ax.set_xlabel("")
    legend(figure, axes)
    headline(figure, f"{fmt}: how often each code is used", material.origin)
    return figure
