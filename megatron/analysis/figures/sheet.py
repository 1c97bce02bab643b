"""Create figures, and write the title, notes and legend around their axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.analysis.figures.page import current_page
from megatron.analysis.plots.style import ALARM, FAINT, decades, text_size
from megatron.analysis.plots.text import text_lines

MARGIN = 0.012  #: space beside title and notes, as a fraction of the figure's width
LETTER = 0.5  #: average width of a character, as a fraction of the font size
HANDLE = 4.5  #: width of a legend entry's line and margins, in characters

_captions: WeakKeyDictionary[Figure, str] = WeakKeyDictionary()


def sheet(
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    *,
    categories: bool = False,
    **kw: Any,
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a grid of axes, and the list of these axes.

    No window is opened. The current page may set a different size and fewer columns of axes.

    Args:
        width: width of the figure on the screen in inches.
        height: height of the figure on the screen in inches.
        rows: number of rows of axes.
        columns: number of columns of axes.
        categories: whether the height depends on the number of categories on the y-axis.
        kw: keyword arguments passed to `Figure.subplots`.
    """
    panels = rows * columns
    width, height, rows, columns = current_page().fit(
        width, height, rows, columns, categories=categories
    )
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.03)  # type: ignore[union-attr,call-arg]
    axes = list(figure.subplots(rows, columns, squeeze=False, **kw).flat)
    for ax in axes[panels:]:
        ax.set_visible(False)
    return figure, axes[:panels]


def shown(axes: Sequence[Axes], count: int) -> list[Axes]:
    """Return the first `count` axes, and hide the other ones."""
    for ax in axes[count:]:
        ax.set_visible(False)
    return list(axes[:count])


def label_edges(axes: Sequence[Axes], *, x: bool = True, y_ticks: bool = False) -> None:
    """Keep axis labels only at the edges of a grid of axes.

    Labels of the y-axis stay in the first column.

    Args:
        x: whether labels of the x-axis stay only on the lowest axes of each column; otherwise, they
            stay everywhere.
        y_ticks: whether the tick labels of the y-axis, too, stay only in the first column.
    """
    lowest = {_column(ax): ax for ax in axes}  # the axes of lower rows are later in the list
    for ax in axes:
        if _column(ax) > 0:
            ax.set_ylabel("")
            if y_ticks:
                ax.tick_params(axis="y", which="both", labelleft=False)
        if x and lowest[_column(ax)] is not ax:
            ax.set_xlabel("")


def share_y(axes: Sequence[Axes]) -> None:
    """Set the same y range and scale for all axes that have data.

    The labels of the y-axis stay on the first axes of each row that have data.
    """
    drawn = [ax for ax in axes if ax.has_data()]
    limits = [ax.get_ylim() for ax in drawn]
    logarithmic = any(ax.get_yscale() == "log" for ax in drawn)
    labeled: set[int] = set()
    for ax in drawn:
        if logarithmic and ax.get_yscale() != "log":
            raise ValueError("one of the axes is linear and another one logarithmic")
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        if logarithmic:
            decades(ax.yaxis)  # the ticks that need labels depend on the range
        row = _row(ax)
        if row in labeled:
            ax.set_ylabel("")
            ax.tick_params(axis="y", which="both", labelleft=False)
        labeled.add(row)


def _column(ax: Axes) -> int:
    place = ax.get_subplotspec()
    return 0 if place is None else int(place.colspan.start)


def _row(ax: Axes) -> int:
    place = ax.get_subplotspec()
    return 0 if place is None else int(place.rowspan.start)


def legend(figure: Figure, axes: Iterable[Axes], *, columns: int = 8) -> None:
    """Add one legend for all axes at the bottom of the figure.

    Args:
        columns: maximum number of legend columns; a narrow figure has fewer.
    """
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    if handles:
        longest = max(map(len, handles)) + HANDLE
        inches = longest * LETTER * text_size(9) / 72
        fitting = max(1, int(figure.get_figwidth() / inches))
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(columns, len(handles), fitting),
        )


def headline(figure: Figure, title: str, note: str = "", warning: str = "") -> None:
    """Write the title of a figure, a note below it, and a warning in red.

    If the current page has no headlines, only the caption is recorded.
    """
    _captions[figure] = ". ".join(text for text in (title, note, warning) if text) + "."
    page = current_page()
    if not page.headlines:
        return
    scale = page.font_size / 10
    inches = (1 - 2 * MARGIN) * figure.get_figwidth()
    lines = [(line, FAINT) for line in text_lines(note, inches, text_size(9))]
    lines += [(line, ALARM) for line in text_lines(warning, inches, text_size(9))]
    # Constrained layout reserves space only for the title, so empty lines are added to the title to
    # make room for the notes.
    title = "\n".join(text_lines(title, inches, text_size(13), bold=True))
    text = title + "\n" * len(lines)
    figure.suptitle(text, x=MARGIN, ha="left", fontsize=text_size(13), fontweight="bold")
    first = 0.34 + 0.22 * title.count("\n")
    for number, (line, color) in enumerate(lines):
        figure.text(
            MARGIN,
            1 - scale * (first + 0.17 * number) / figure.get_figheight(),
            line,
            ha="left",
            va="top",
            fontsize=text_size(9),
            color=color,
        )


def caption(figure: Figure) -> str:
    """Return the title, note and warning of a figure as one line of text; "" if it has none."""
    return _captions.get(figure, "")
