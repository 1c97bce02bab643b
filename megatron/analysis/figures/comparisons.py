"""Draw the figures in `comparisons/`: comparisons of runs with different quantization types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from megatron.analysis.figures.figure_data import (
    KINDS,
    FigureData,
    Make,
    NothingToDrawError,
    median_of,
    medians,
)
from megatron.analysis.figures.sheet import legend, share_y, sheet
from megatron.analysis.plots.lines import plot_lines
from megatron.analysis.plots.style import nothing


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figure "deviation".

    Raises:
        NothingToDrawError: the dump has fewer than two quantization types.
    """
    types = list(dict.fromkeys(figure_data.tensors["quant_type"]))
    if len(types) < 2:
        only = types[0] if types else "no type"
        raise NothingToDrawError(
            f"there is only one quantization type ({only}); collect others into the same folder, "
            "as `batch` does"
        )
    yield "deviation", partial(deviation, figure_data)


def deviation(figure_data: FigureData) -> Figure:
    """Draw, by layer, how far tensors of each quantization type are from the unquantized run's."""
    data = figure_data.deviations
    if data.empty:
        raise NothingToDrawError(
            "no tensor of a bf16 run has a counterpart, whole and of the same shape, in another run"
        )
    kinds = figure_data.kinds(data)
    figure, axes = sheet(4.2 * len(kinds), 4.4, 1, len(kinds))
    for ax, kind in zip(axes, kinds, strict=True):
        rows = data[data["kind"] == kind]
        if (rows["deviation"] == 0).all():  # a logarithmic axis cannot show 0
            nothing(ax, KINDS[kind], f"equal in all runs\nin iteration {_last(rows)}")
            continue
        lines = medians(rows, "quant_type", "layer_idx", "deviation")
        values = lines["value"]
        if not ((values > 0) & (values < math.inf)).any():  # a log axis cannot show Inf
            what = "not finite" if (values == math.inf).all() else "equal or not finite"
            nothing(ax, KINDS[kind], f"{what} in every run\nin iteration {_last(rows)}")
            continue
        plot_lines(
            lines,
            xlabel="layer",
            ylabel="‖x - x0‖ / ‖x0‖",
            title=KINDS[kind],
            logarithmic=True,
            narrow=1,
            ax=ax,
        )
    share_y([ax for ax in axes if ax.get_legend_handles_labels()[0]])
    legend(figure, axes)
    last = _last(data)
    note = "x0: the same tensor of the run without quantization; "
    note += f"{median_of(data, ['quant_type', 'kind', 'layer_idx'], 'point')}, iteration "
    infinite = int((data["deviation"] == math.inf).sum())
    if infinite:
        last += f"; not finite in {infinite:,} of {len(data):,} tensors: a NaN or Inf differs, or "
        last += "only x0 is zero"
    title = "Deviation of each run from the run without quantization"
    figure_data.headline(figure, title, note + last)
    return figure


def _last(data: pd.DataFrame) -> str:
    """Return the iteration in which the runs are compared, as text.

    If it differs between quantization types, the text lists the iteration of each type.
    """
    last = data.groupby("quant_type")["iteration"].first()
    if last.nunique() == 1:
        return str(last.iloc[0])
    return ", ".join(f"{name} {iteration}" for name, iteration in last.items())
