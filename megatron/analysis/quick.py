"""Summarize a dump in one picture and one text file, for a first look.

from megatron.analysis import quick_analysis

look = quick_analysis(Path("enhanced_tensor_logs/mxfp8"), Path("draw"))
look.picture, look.text, look.problems
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine

from megatron.analysis.dump.run_endings import alarm, unfinished
from megatron.analysis.dump.tensor_files import Problem
from megatron.analysis.garbage import one_garbage_collection
from megatron.analysis.judged import OPERANDS
from megatron.analysis.outputs.atomic_write import write_keeping
from megatron.analysis.outputs.statistics_text import GROUPS, format_statistics
from megatron.analysis.plots.magnitude_histogram import plot_magnitude_histogram
from megatron.analysis.plots.shares import MOST, plot_shares
from megatron.analysis.plots.style import ALARM, FAINT, RC, percent, short_count
from megatron.analysis.plots.value_histogram import ALL, plot_value_histogram
from megatron.analysis.stats.histogram import Grid
from megatron.analysis.stats.matrix_view import PAIRWISE
from megatron.analysis.stats.measure import Measurements, measure_dump
from megatron.analysis.store import TensorStore
from megatron.analysis.text_table import shown

PICTURE = "quick_analysis.png"
TEXT = "tensor_stats.txt"
BULK = 0.999  #: quantile of the magnitudes that limits the width of the histogram
REACH = 4.0  #: largest magnitude in the histogram, as a multiple of the quantile `BULK`
TAIL = 1e-4  #: maximum share of values left out at the low end of the magnitude histogram
DPI = 150  #: resolution of the picture, in dots per inch
LONGEST = 36  #: maximum length of a name in the picture, in characters
#: Columns whose distinct values the headline counts, keyed by the singular noun after the count.
COUNTED = {"iteration": "iteration", "layer": "layer_idx"}


@dataclass(frozen=True)
class QuickResult:
    """The result of `quick_analysis`: the files written, and what was found in the dump."""

    picture: Path
    text: Path
    measurements: Measurements
    problems: list[Problem]
    missing: int  #: number of files that an index lists but that do not exist
    endings: dict[str, str]  #: how each unfinished run ended, by run ID
    kept: list[Path]  #: new paths of earlier files that were renamed


def quick_analysis(
    folder: Path,
    output: Path,
    *,
    run: str | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> QuickResult:
    """Draw `quick_analysis.png` and write `tensor_stats.txt` into `output`.

    Files that cannot be read are left out and listed in the result.

    Args:
        run: ID of the run to draw, or `latest` for the most recent run; all runs by default.
        cache: folder with cached results of `stats.compute`; see `measure_dump`.
        workers: number of threads; one per processor by default.
        progress: whether to show a progress bar on a terminal.

    Raises:
        ValueError: if there is no tensor to draw, or the output folder is not writable.
    """
    check_output(output)
    dump = TensorStore(folder)
    if run is not None:
        dump = dump.only(run)
    measured = measure_dump(dump, cache=cache, workers=workers, progress=progress)
    problems = [*dump.problems, *measured.problems]
    if measured.table.empty:
        listed = "".join(f"\n  {problem}" for problem in problems[:10])
        raise ValueError(f"none of the {len(problems)} .pt files in {folder} can be read:{listed}")
    text = format_statistics(dump, measured, problems)
    picture = io.BytesIO()
    # Text created while drawing must not be parsed as formulas.
    with matplotlib.rc_context(RC), one_garbage_collection():
        draw_picture(dump, measured, problems).savefig(picture, format="png", dpi=DPI)
    kept = [
        *write_keeping(output / PICTURE, picture.getvalue()),
        *write_keeping(output / TEXT, text.encode()),
    ]
    missing = len(dump.missing)
    return QuickResult(
        output / PICTURE, output / TEXT, measured, problems, missing, unfinished(dump), kept
    )


def check_output(output: Path) -> None:
    """Create the output folder and check that it is writable.

    The check comes first, because computing the statistics may take hours.

    Raises:
        ValueError: if the folder cannot be created or is not writable.
    """
    probe = output / f".write_test_{os.getpid()}.partial"
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"cannot write to the output folder {output} ({error.strerror or error}); "
            "name another one with --output_dir, or change its permissions"
        ) from None


def draw_picture(dump: TensorStore, measured: Measurements, problems: list[Problem]) -> Figure:
    """Draw the figure that is saved as `quick_analysis.png`.

    The left column contains histograms of the values and of their magnitudes. The right column
    shows the shares of tensors and values by quantization type, layer type, operation and use.
    """
    with matplotlib.rc_context(RC):
        # leave room for the headline at the top of the figure
        height = 0.83 if alarm(dump) else 0.86
        layout = ConstrainedLayoutEngine(rect=(0.015, 0.02, 0.97, height), hspace=0.1, wspace=0.08)
        figure = Figure(figsize=(12.5, 7.6), layout=layout)
        columns = figure.add_gridspec(1, 2, width_ratios=[1.3, 1.0])
        upper, lower = figure_rows(figure, columns[0], [1.35, 1.0])
        operands, title = operands_of(measured)
        data, note = histogram_data(operands)
        plot_value_histogram(data, title=title, note=note, ax=upper)
        data, note = magnitude_data(operands)
        plot_magnitude_histogram(data, title="By magnitude", note=note, ax=lower)
        shares = {title: share_data(measured, column) for column, title in GROUPS}
        # heights in proportion to the number of bars, so that all bars have the same thickness
        heights = [min(len(data), MOST) + 0.35 for data in shares.values()]
        for ax, (title, data) in zip(
            figure_rows(figure, columns[1], heights), shares.items(), strict=True
        ):
            plot_shares(data, title=title, ax=ax)
        _headline(figure, dump, measured, problems)
    return figure


def figure_rows(figure: Figure, column: SubplotSpec, heights: list[float]) -> list[Axes]:
    """Divide a column of the figure into rows, and return the axes from top to bottom."""
    grid = column.subgridspec(len(heights), 1, height_ratios=heights)
    return [figure.add_subplot(grid[row, 0]) for row in range(len(heights))]


def operands_of(measured: Measurements) -> tuple[Measurements, str]:
    """Return the measurements to show in the histograms, and the title of the histograms.

    The histograms show the operands of matmuls, because formats are applied to them. If the dump
    has no operands, they show all tensors.
    """
    operands = measured.only(OPERANDS)
    if operands.table.empty:
        return measured, "All values"
    return operands, "Operands of matmuls"


def grouping(measured: Measurements) -> str:
    """Return the name of the column by which the values are grouped in the histograms.

    The column is the quantization type if there are several types, and otherwise the operation.
    """
    return "quant_type" if measured.table["quant_type"].nunique() > 1 else "operation"


def histogram_data(measured: Measurements) -> tuple[pd.DataFrame, str]:
    """Return histograms of all values and of each group, and a note on the range of the values.

    The histograms form one tidy table with bins of equal width. The note also counts the values
    outside the histogram.
    """
    everything, summary, column = measured.histogram(), measured.summary(), grouping(measured)
    # limit the range; otherwise, one distant outlier would squeeze all other values into one bin
    reach = REACH * everything.magnitude_quantile(BULK)
    grid = Grid.reaching(min(summary.amax, reach))
    rms = {name: group.rms for name, (_, group) in measured.by(column).items()}
    histograms = measured.histograms_by(column)
    parts = [(ALL, ALL, everything)]
    parts += [(name, f"{_brief(name)}, rms {rms[name]:.3g}", histograms[name]) for name in rms]
    edges = grid.edges()
    bins = [
        pd.DataFrame(
            {
                "group": name,
                "label": label,
                "left": edges[:-1],
                "right": edges[1:],
                "count": part.rebin(grid),
            }
        )
        for name, label, part in parts
    ]
    outside = everything.total - int(bins[0]["count"].sum())
    lines = (
        [f"from {summary.min:.4g} to {summary.max:.4g}"] if summary.finite else ["no finite value"]
    )
    if outside:
        lines.append(f"outside: {short_count(outside)}, {percent(outside / everything.total)}")
    return pd.concat(bins, ignore_index=True), ", ".join(lines)


def magnitude_data(measured: Measurements) -> tuple[pd.DataFrame, str]:
    """Return the number of values in each binade by group, and a note on the values left out.

    The lowest binades are left out if together they hold at most a share `TAIL` of the values.
    """
    everything, summary, column = (
        measured.histogram().binades(),
        measured.summary(),
        grouping(measured),
    )
    present = np.flatnonzero(everything)
    below = np.cumsum(everything)
    first = int(np.searchsorted(below, TAIL * below[-1])) if len(present) else 126
    last = int(present[-1]) if len(present) else 126
    chosen = slice(first, last + 1)
    histograms = measured.histograms_by(column)
    bins = [
        pd.DataFrame(
            {
                "group": _brief(name),
                "exponent": np.arange(first, last + 1) - 127,
                "count": histograms[name].binades()[chosen],
            }
        )
        for name in measured.by(column)
    ]
    lines = []
    if summary.zeros:
        masked = measured.table.loc[measured.table["tensor_name"].isin(PAIRWISE), "zeros"].sum()
        of_mask = f" ({short_count(masked)} masked)" if masked else ""
        share = percent(summary.zeros / summary.count)
        lines.append(f"zeros: {short_count(summary.zeros)}, {share}{of_mask}")
    if smaller := int(everything[:first].sum()):
        lines.append(f"smaller: {short_count(smaller)}, {percent(smaller / summary.count)}")
    return pd.concat(bins, ignore_index=True), ", ".join(lines)


def _brief(name: str) -> str:
    """Return a name cut to `LONGEST` characters; names in files can have any length."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 3]}..."


def share_data(measured: Measurements, column: str) -> pd.DataFrame:
    """Return a table for `plot_shares` with the number of tensors and values in each group."""
    return pd.DataFrame(
        [
            {"name": _brief(name), "tensors": tensors, "values": summary.count}
            for name, (tensors, summary) in measured.by(column).items()
        ]
    )


def _headline(
    figure: Figure, dump: TensorStore, measured: Measurements, problems: list[Problem]
) -> None:
    """Write the title and the source of the data above the plots, and any problems in red.

    Problems are NaN and Inf values, unreadable files and unfinished runs.
    """
    table, summary = measured.table, measured.summary()
    types = list(measured.by("quant_type"))
    named = ", ".join(map(_brief, types[:4])) + (
        f" and {len(types) - 4} more" if len(types) > 4 else ""
    )
    title = f"{named}: {len(table):,} tensors, {short_count(summary.count)} values"
    runs = [run for run in table["run_id"].dropna().unique()]
    facts = [shown(dump.folder), f"run {runs[0]}" if len(runs) == 1 else f"{len(runs)} runs"]
    counted = {word: table[column].dropna().nunique() for word, column in COUNTED.items()}
    counted["rank"] = dump.records["rank"].dropna().nunique()
    facts += [f"{n} {word}{'s' if n > 1 else ''}" for word, n in counted.items() if n]
    if measured.repeats:
        facts.append(f"{measured.repeats:,} recomputed tensors skipped")
    figure.text(0.02, 0.975, title, va="top", fontsize=16, fontweight="bold")
    figure.text(0.02, 0.925, "   ·   ".join(facts), va="top", color=FAINT)
    alarms = []
    if summary.nan or summary.inf:
        alarms.append(f"{summary.nan:,} NaN and {summary.inf:,} Inf values, not drawn")
    if problems:
        alarms.append(f"{len(problems)} files could not be read")
    if alarms:
        figure.text(0.98, 0.97, "\n".join(alarms), color=ALARM, ha="right", va="top")
    if ended := alarm(dump):
        figure.text(0.02, 0.895, ended, va="top", color=ALARM)
