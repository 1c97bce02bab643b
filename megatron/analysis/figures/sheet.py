"""Create figures, and write the title, notes and legend around their axes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.analysis.plots.style import ALARM, FAINT

LETTERS = 15  #: maximum number of characters per inch in the lines of a note


def sheet(
    width: float, height: float, rows: int = 1, columns: int = 1, **kw: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of axes, and the list of these axes.

    No window is opened.

    Args:
        width: width of the figure in inches.
        height: height of the figure in inches.
        rows: number of rows of axes.
        columns: number of columns of axes.
        kw: keyword arguments passed to `Figure.subplots`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.03)  # type: ignore[union-attr,call-arg]
    axes = figure.subplots(rows, columns, squeeze=False, **kw)
    return figure, list(axes.flat)


def share_y(axes: Sequence[Axes]) -> None:
    """Set the same y range for all axes that have data, and keep y labels only on the first."""
    drawn = [ax for ax in axes if ax.has_data()]
    limits = [ax.get_ylim() for ax in drawn]
    for ax in drawn:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    for ax in drawn[1:]:
        ax.set_ylabel("")
        ax.tick_params(axis="y", which="both", labelleft=False)


def legend(figure: Figure, axes: Iterable[Axes], *, columns: int = 8) -> None:
    """Add one legend for all axes at the bottom of the figure.

    Args:
        columns: maximum number of legend columns.
    """
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(columns, len(handles)),
        )


def headline(
    figure: Figure, title: str, note: str = "", warning: str = "", *, letters: int = LETTERS
) -> None:
    """Write the title of a figure, a note below it, and a warning in red.

    Args:
        letters: maximum number of characters per inch; fewer for text with many wide letters.
    """
    width = int(figure.get_figwidth() * letters)
    lines = [(line, FAINT) for line in textwrap.wrap(note, width)]
    lines += [(line, ALARM) for line in textwrap.wrap(warning, width)]
    # Constrained layout reserves space only for the title, so empty lines are added to the title to
    # make room for the notes.
    text = title + "\n" * len(lines)
    figure.suptitle(text, x=0.012, ha="left", fontsize=13, fontweight="bold")
    for number, (line, color) in enumerate(lines):
        figure.text(
            0.012,
            1 - (0.34 + 0.17 * number) / figure.get_figheight(),
            line,
            ha="left",
            va="top",
            fontsize=9,
            color=color,
        )
