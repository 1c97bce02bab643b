"""Summarize a dump in one picture and one text file, for a first look.

The picture shows which number format loses how much in which matmul of which layer, and below it
the values of the operands.

from megatron.analysis import quick_analysis

look = quick_analysis(Path("enhanced_tensor_logs/mxfp8"), Path("draw"))
look.picture, look.text, look.problems
"""

from __future__ import annotations

import io
import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from megatron.analysis.dump.run_endings import alarm, unfinished
from megatron.analysis.dump.tensor_files import Problem
from megatron.analysis.figures.figure_data import layer_name
from megatron.analysis.garbage import one_garbage_collection
from megatron.analysis.judged import OPERANDS
from megatron.analysis.outputs.atomic_write import write_keeping
from megatron.analysis.outputs.statistics_text import format_statistics
from megatron.analysis.plots.heatmap import plot_heatmap
from megatron.analysis.plots.magnitude_histogram import plot_magnitude_histogram
from megatron.analysis.plots.style import ALARM, FAINT, in_style, nothing, percent, short_count
from megatron.analysis.plots.value_histogram import ALL, plot_value_histogram
from megatron.analysis.stats.histogram import Grid
from megatron.analysis.stats.matrix_view import PAIRWISE
from megatron.analysis.stats.measure import Measurements, measure_dump
from megatron.analysis.store import TensorStore
from megatron.analysis.study.first_look import FirstLook, default_formats, first_look
from megatron.analysis.study.verdict import by_candidate, in_decibels
from megatron.analysis.text_table import shown
from megatron.fake_quant.names import get_format

PICTURE = "quick_analysis.png"
TEXT = "tensor_stats.txt"
BULK = 0.999  #: quantile of the magnitudes that limits the width of the histogram
REACH = 4.0  #: largest magnitude in the histogram, as a multiple of the quantile `BULK`
TAIL = 1e-4  #: maximum share of values left out at the low end of the magnitude histogram
DPI = 150  #: resolution of the picture, in dots per inch
LONGEST = 36  #: maximum length of a name in the picture, in characters
WIDTH = 12.5  #: width of the picture, in inches
ROW = 0.235  #: height of a row of a heat map, in inches
MOST_ROWS = 40  #: maximum number of rows of a heat map
PANEL = 2.1  #: minimum width of a heat map, in inches
MOST_PANELS = 12  #: maximum number of heat maps
WIDE_PANELS = 4  #: maximum number of heat maps that have room for bits and median on one line
LETTERS = 160  #: maximum number of characters per line of the verdict
REASON = 110  #: maximum number of characters per line of the reason why there is no heat map
LINE = 0.2  #: distance between two lines of the verdict, in inches
#: numbers are written into the cells if all heat maps together have at most this many columns
NUMBERS = 36
SAMPLE = 110  #: maximum length of the description of what was studied, in characters
LABELS = 8  #: maximum number of labeled columns of a heat map
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
    formats: Sequence[str] | None = None,
    cache: Path | None = None,
    workers: int | None = None,
    progress: bool = False,
) -> QuickResult:
    """Draw `quick_analysis.png` and write `tensor_stats.txt` into `output`.

    Files that cannot be read are left out and listed in the result.

    Args:
        run: ID of the run to draw, or `latest` for the most recent run; all runs by default.
        formats: formats to compare; by default those of `first_look.default_formats`.
        cache: folder with cached results of `stats.compute`; see `measure_dump`.
        workers: number of threads; one per processor by default.
        progress: whether to show a progress bar on a terminal.

    Raises:
        ValueError: if a format is unknown, there is no tensor to draw, or the output folder is not
            writable.
    """
    for name in formats or ():
        get_format(name)
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
    compared = compare(dump, formats or default_formats(dump), workers)
    picture = io.BytesIO()
    # Text created while drawing must not be parsed as formulas.
    with in_style(), one_garbage_collection():
        draw_picture(dump, measured, problems, compared=compared).savefig(
            picture, format="png", dpi=DPI
        )
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
            "choose another one with --output-dir, or change the permissions of this one"
        ) from None


def compare(
    dump: TensorStore, formats: Sequence[str], workers: int | None = None
) -> FirstLook | str:
    """Compare the formats by the results of matmuls; return the reason if this is impossible."""
    try:
        return first_look(dump, formats, workers=workers)
    except ValueError as error:
        return str(error)


def draw_picture(
    dump: TensorStore,
    measured: Measurements,
    problems: list[Problem],
    *,
    compared: FirstLook | str | None = None,
) -> Figure:
    """Draw the figure that is saved as `quick_analysis.png`.

    The upper part shows one heat map per format: the SQNR of the result of each GEMM, by layer. The
    lower part shows histograms of the operands' values and of their magnitudes.

    Args:
        compared: result of `compare`; by default with the formats of `default_formats`.
    """
    if compared is None:
        compared = compare(dump, default_formats(dump))
    with in_style():
        verdict, rows = [], 4
        if isinstance(compared, FirstLook):
            verdict = textwrap.wrap(" ".join(compared.sentences()), LETTERS)
            rows = min(compared.cells["place"].nunique(), MOST_ROWS)
        top = 0.85 + LINE * len(verdict) + (LINE if alarm(dump) else 0)
        maps, histograms = 0.95 + ROW * rows, 2.9
        width = WIDTH
        if isinstance(compared, FirstLook):
            panels = min(compared.cells["candidate"].nunique(), MOST_PANELS)
            width = max(WIDTH, PANEL * panels + 2.5)
        figure = Figure(figsize=(width, top + maps + histograms))
        height = figure.get_figheight()
        layout = ConstrainedLayoutEngine(
            rect=(0.015, 0.01, 0.97, 1 - top / height - 0.01), hspace=0.02, wspace=0.03
        )
        figure.set_layout_engine(layout)
        grid = figure.add_gridspec(2, 1, height_ratios=[maps, histograms])
        upper, lower = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
        if isinstance(compared, FirstLook):
            draw_comparison(compared, upper)
        else:
            why = "\n".join(textwrap.wrap(shown(compared), REASON)[:3])
            nothing(upper.subplots(), "Formats by the results of matmuls", why)
        left, right = lower.subplots(1, 2)
        operands, title = operands_of(measured)
        data, note = histogram_data(operands)
        plot_value_histogram(data, title=title, note=note, ax=left)
        data, note = magnitude_data(operands)
        plot_magnitude_histogram(data, title="By magnitude", note=note, ax=right)
        _headline(figure, dump, measured, problems, verdict)
    return figure


def draw_comparison(compared: FirstLook, figure: SubFigure) -> None:
    """Draw one heat map per format, the best format first, with one color scale for all.

    If there are too many places, only those with the lowest SQNR are drawn.
    """
    everything = compared.cells
    summary = by_candidate(everything).head(MOST_PANELS)
    worst = everything.groupby("place")["sqnr_db"].min().fillna(-np.inf)  # NaN: not finite
    drawn = worst.sort_values(kind="stable").index[:MOST_ROWS]
    places = [place for place in dict.fromkeys(everything["place"]) if place in drawn]
    layers = sorted(everything["layer_idx"].unique())
    cells = pd.MultiIndex.from_product([places, layers], names=["place", "layer_idx"])
    table = everything[everything["place"].isin(places)].rename(columns={"sqnr_db": "value"})
    finite = table.loc[np.isfinite(table["value"]), "value"]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    norm = Normalize(low, max(high, low + 1))
    axes = figure.subplots(1, len(summary), squeeze=False)[0]
    between = ", " if len(summary) <= WIDE_PANELS else "\n"
    for ax, row in zip(axes, summary.itertuples(), strict=True):
        own = table[table["candidate"] == row.candidate].set_index(["place", "layer_idx"])
        data = own["value"].reindex(cells).reset_index()
        name = f"{row.candidate} (this run)" if row.candidate == compared.own else row.candidate
        plot_heatmap(
            data.assign(row=data["place"], column=[layer_name(int(n)) for n in data["layer_idx"]]),
            label="",
            title=f"{name}\n{row.bits:.4g} bits{between}median {in_decibels(row.sqnr_db)}",
            norm=norm,
            bar=False,
            numbers=len(layers) * len(summary) <= NUMBERS,
            ax=ax,
        )
        names = [text.get_text() for text in ax.get_xticklabels()]
        every = -(-len(names) // LABELS)
        ax.set_xticks([at + 0.5 for at in range(0, len(names), every)], names[::every])
        ax.set_xlabel("layer")
        ax.set_yticks([at + 0.5 for at in range(len(places))], map(_brief, places))
        ax.tick_params(axis="y", labelleft=ax is axes[0])
    axes[0].set_ylabel("GEMM")
    bar = figure.colorbar(ScalarMappable(norm, "viridis"), ax=list(axes), pad=0.01, aspect=30)
    bar.set_label("SQNR of the GEMM's result (dB)")
    bar.outline.set_visible(False)
    figure.suptitle(
        f"Operands of {_brief(compared.sample, SAMPLE)}, quantized in each format (simulated)"
        + (f"; the {len(places)} weakest places" if len(places) < len(worst) else ""),
        x=0.005,
        ha="left",
        fontsize=9,
        color=FAINT,
    )


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


def _brief(name: str, longest: int = LONGEST) -> str:
    """Return a name cut to `longest` characters; names in files can have any length."""
    return name if len(name) <= longest else f"{name[: longest - 3]}..."


def _headline(
    figure: Figure,
    dump: TensorStore,
    measured: Measurements,
    problems: list[Problem],
    verdict: Sequence[str],
) -> None:
    """Write the title, the source of the data and the verdict above the plots.

    NaN and Inf values, unreadable files and unfinished runs are reported in red.
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
    facts += weights_of(dump)

    def write(inches: float, text: str, **style: Any) -> None:
        x = style.pop("x", 0.02)
        figure.text(x, 1 - inches / figure.get_figheight(), text, va="top", **style)

    write(0.16, title, fontsize=16, fontweight="bold")
    write(0.52, "   ·   ".join(facts), color=FAINT)
    for number, line in enumerate(verdict):
        write(0.8 + LINE * number, line)
    alarms = []
    if summary.nan or summary.inf:
        alarms.append(f"{summary.nan:,} NaN and {summary.inf:,} Inf values, not drawn")
    if problems:
        alarms.append(f"{len(problems)} files could not be read")
    if alarms:
        write(0.16, "\n".join(alarms), color=ALARM, ha="right", x=0.98)
    if ended := alarm(dump):
        write(0.8 + LINE * len(verdict), ended, color=ALARM)


def weights_of(dump: TensorStore) -> list[str]:
    """Return a phrase about the weights from which all runs started; empty if they are unknown."""
    cards = [dump.run_card(str(run)) for run in dump.records["run_id"].dropna().unique()]
    starts = {json.dumps(card.get("loaded"), sort_keys=True) for card in cards}
    if len(starts) != 1:
        return []
    loaded = json.loads(starts.pop())
    if not isinstance(loaded, dict) or type(loaded.get("iteration")) is not int:
        return []
    text = f"weights of iteration {loaded['iteration']}"
    if isinstance(loss := loaded.get("lm_loss"), float):
        text += f" (loss {loss:.2f})"
    return [text]
