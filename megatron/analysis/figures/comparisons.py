"""comparisons/: the runs of a dump, with one quantization type each, against each other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from megatron.analysis.figures.heatmaps import KINDS
from megatron.analysis.figures.material import (
    Material,
    NothingToDrawError,
    headline,
    legend,
    medians,
    sheet,
    trimmed,
)
from megatron.analysis.plots import plot_exponent_histogram, plot_lines


def draw(material: Material) -> Iterator[tuple[str, Figure]]:
    """exponents_by_type, rms_by_type, deviation."""
    types = list(dict.fromkeys(material.tensors["quant_type"]))
    if len(types) < 2:
        only = types[0] if types else "no type"
        raise NothingToDrawError(
            f"there is one type only ({only}); collect others beside it, as `batch` does"
        )
    yield "exponents_by_type", exponents_by_type(material, types)
    yield "rms_by_type", by_type(material, "rms", "rms", "Root mean square by layer")
    if not material.deviations.empty:
        yield "deviation", deviation(material.deviations)


def exponents_by_type(material: Material, types: list[str]) -> Figure:
    """Whether training in another type moves the values."""
    kinds = [kind for kind in KINDS if (material.tensors["kind"] == kind).any()]
    figure, axes = sheet(4.6 * len(kinds), 4.2, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        places = set(material.places_of(kind))
        counts = {name: material.sums.binades_of(places, name) for name in types}
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
        plot_exponent_histogram(pd.concat(frames), title=KINDS[kind], ax=ax)
    for ax in axes[1:]:
        ax.set_ylabel("")
    legend(figure, axes)
    note = "values before quantization, of runs trained in each type"
    headline(figure, "Values by magnitude in runs of each type", note)
    return figure


def by_type(material: Material, column: str, ylabel: str, title: str) -> Figure:
    """A statistic by layer, a line a type."""
    kinds = [kind for kind in KINDS if (material.tensors["kind"] == kind).any()]
    figure, axes = sheet(4.2 * len(kinds), 4.2, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        mine = material.tensors[material.tensors["kind"] == kind]
        data = medians(mine, "quant_type", "layer_idx", column)
        plot_lines(data, xlabel="layer", ylabel=ylabel, title=KINDS[kind], logarithmic=True, ax=ax)
    legend(figure, axes)
    headline(figure, title, f"median of {material.origin}")
    return figure


def deviation(data: pd.DataFrame) -> Figure:
    """How quantization's error grows through the layers and iterations."""
    kinds = [kind for kind in KINDS if (data["kind"] == kind).any()]
    last = data["iteration"].max()
    figure, axes = sheet(4.2 * len(kinds), 4.4, 1, len(kinds), sharey=True)
    for ax, kind in zip(axes, kinds, strict=True):
        mine = data[(data["kind"] == kind) & (data["iteration"] == last)]
        shown = medians(mine, "quant_type", "layer_idx", "deviation")
        plot_lines(
            shown, xlabel="layer", ylabel="|x - x0| / |x0|", title=KINDS[kind], logarithmic=True,
            ax=ax,
        )  # fmt: skip
    for ax in axes[1:]:
        ax.set_ylabel("")
    legend(figure, axes)
    note = f"x0: the same tensor of the run without quantization; iteration {last}, median"
    headline(figure, "How far each run is from the one without quantization", note)
    return figure
