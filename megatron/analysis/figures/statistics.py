"""Write the files in `statistics/`: a figure of the value range of every tensor, and CSV files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from matplotlib.figure import Figure

from megatron.analysis.figures.figure_data import FigureData, Make, NothingToDrawError, median_of
from megatron.analysis.figures.sheet import sheet
from megatron.analysis.plots.scales import plot_scales
from megatron.analysis.stats.export import with_safe_texts


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figure "scales" and the files "tensors.csv" and "formats.csv".

    Raises:
        NothingToDrawError: no tensor could be read.
    """
    if figure_data.tensors.empty:
        raise NothingToDrawError("no tensor could be read")
    yield "scales", partial(scales, figure_data)
    tensors = with_safe_texts(figure_data.statistics.tensors)
    yield "tensors.csv", partial(tensors.to_csv, index_label="tensor")
    yield "formats.csv", partial(figure_data.statistics.formats.to_csv, index=False)


def scales(figure_data: FigureData) -> Figure:
    """Draw the RMS and the range of the magnitudes, one row per place (module and tensor name)."""
    table = figure_data.tensors
    data = table.groupby("place")[["m0.01", "rms", "amax"]].median()
    data = data.reindex(figure_data.places_apart).reset_index()
    data = data.rename(columns={"place": "name", "m0.01": "low", "amax": "high"})
    data = data.assign(group=[name.rpartition(" ")[2] for name in data["name"]])
    data["name"] = data["name"].map(figure_data.label)
    figure, axes = sheet(9.0, 0.3 * len(data) + 1.8, categories=True)
    plot_scales(data, ax=axes[0])
    note = "dot: rms; line: from the 1 % quantile of magnitudes to the largest; "
    note += f"{median_of(table, ['place'], 'row')}; {figure_data.origin}"
    figure_data.headline(figure, "Scale of each tensor", note)
    return figure
