"""Draw how the relative error grows along the execution of one pass, and over the iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.analysis.diff.summary import Point, Summary
from megatron.analysis.figures.sheet import headline, legend, share_y, sheet
from megatron.analysis.plots.lines import plot_lines
from megatron.analysis.plots.style import ALARM, FAINT, RULE, nothing

TITLES = {"linear": "Linear layers", "attention": "Attention"}
LEGEND_COLUMNS = 5  #: number of columns of the legend; small, because the names are long
MOST_TICKS = 24  #: maximum number of layers that are labeled on the axis
_ERROR = "relative error ‖B - A‖ / ‖A‖"


def growth_figure(summary: Summary) -> Figure:
    """Return a figure of the errors by layer type, the local errors and the errors by iteration."""
    drawn = set() if summary.first_pass is None else {p.layer_type for p in summary.points}
    types = [name for name in TITLES if name in drawn]
    with_local = any(not math.isnan(point.local) for point in summary.points)
    several = len(summary.iterations) > 1
    count = max(len(types), 1) + with_local + several
    figure, axes = sheet(12, 1.4 + 3.1 * count, count, 1)
    if summary.first_pass is None:
        nothing(axes[0], "Growth along the network", "no value differs")
    for ax, layer_type in zip(axes, types, strict=False):
        _panel(ax, layer_type, summary)
    alike = [ax for ax in axes[: len(types)] if ax.get_yscale() == "log"]
    share_y(alike)
    if with_local:
        _local_errors(axes[len(types)], summary)
    if several:
        _iterations(axes[-1], summary)
    legend(figure, axes, columns=LEGEND_COLUMNS)
    headline(figure, "Error growth in execution order", _note(summary))
    return figure


def _note(summary: Summary) -> str:
    if summary.first_pass is None:
        return "all values are equal"
    iteration, batch = summary.first_pass
    return (
        f"iteration {iteration}, micro-batch {batch}, the first pass in which a value differs; of "
        "several ranks, the largest error counts; dashed lines are gradients; a local error is "
        "what an operation adds to the errors of its operands"
    )


def _panel(ax: Axes, layer_type: str, summary: Summary) -> None:
    points = [point for point in summary.points if point.layer_type == layer_type]
    title = TITLES[layer_type]
    if not any(point.error for point in points):
        nothing(ax, title, "all values are equal")
        return
    _lines(ax, [(point.tensor_name, point.position, point.error) for point in points], title)
    _label_layers(ax, summary.points)
    first = summary.first
    if first is not None and first.position <= summary.points[-1].position:
        ax.axvline(first.position, color=ALARM, linestyle=":", label="first difference", zorder=0)


def _local_errors(ax: Axes, summary: Summary) -> None:
    """Draw the error that each operation adds, with linear layers and attention in one panel."""
    values = [
        (f"{point.tensor_name} of {point.layer_type}", point.position, point.local)
        for point in summary.points
        if not math.isnan(point.local)
    ]
    _lines(ax, values, "Local errors", ylabel="local error / ‖A‖")
    _label_layers(ax, summary.points)


def _lines(
    ax: Axes, values: Sequence[tuple[str, int, float]], title: str, *, ylabel: str = _ERROR
) -> None:
    """Draw one line per group on a logarithmic axis.

    Args:
        ax: axes to draw on.
        values: group, position and error of each point.
        title: title of the axes.
        ylabel: label of the y-axis.
    """
    data = pd.DataFrame(values, columns=["group", "x", "value"])
    plot_lines(data, xlabel="", ylabel=ylabel, title=title, logarithmic=True, narrow=1.0, ax=ax)


def _label_layers(ax: Axes, points: Sequence[Point]) -> None:
    """Label the x-axis with the layers, and separate the forward from the backward pass."""
    starts: list[tuple[int, str, int | None]] = []
    for point in points:
        if not starts or starts[-1][1:] != (point.operation, point.layer_idx):
            starts.append((point.position, point.operation, point.layer_idx))
    for position, operation, _ in starts:
        is_boundary = operation == "backward" and position == _first_backward(points)
        ax.axvline(
            position - 0.5,
            color=FAINT if is_boundary else RULE,
            linewidth=1.2 if is_boundary else 0.6,
            zorder=0,
        )
    every = max(1, -(-len(starts) // MOST_TICKS))
    labeled = starts[::every]
    names = ["-" if layer in (None, -1) else str(layer) for _, _, layer in labeled]
    ax.set_xticks([position for position, _, _ in labeled], names)
    ax.set_xlim(points[0].position - 0.5, points[-1].position + 0.5)
    ax.set_xlabel("layer, in execution order: forward pass, then backward pass")
    for operation in ("forward", "backward"):
        positions = [point.position for point in points if point.operation == operation]
        if positions:
            middle = (positions[0] + positions[-1]) / 2
            ax.annotate(
                operation,
                (middle, 1),
                xycoords=ax.get_xaxis_transform(),
                ha="center",
                va="bottom",
                color=FAINT,
                fontsize=9,
            )


def _first_backward(points: Sequence[Point]) -> int | None:
    return next((point.position for point in points if point.operation == "backward"), None)


def _iterations(ax: Axes, summary: Summary) -> None:
    data = pd.DataFrame(
        {
            "group": "largest of all tensors",
            "x": list(summary.iterations),
            "value": [group.error for group in summary.iterations.values()],
        }
    )
    title = "Largest relative error by iteration"
    plot_lines(data, xlabel="iteration", ylabel=_ERROR, title=title, logarithmic=True, ax=ax)
