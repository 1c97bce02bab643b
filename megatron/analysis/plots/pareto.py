"""Draw errors against costs, and connect the points of the Pareto front by a line."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from megatron.analysis.plots.style import (
    FAINT,
    colors_of,
    decades,
    guide,
    nothing,
    quiet,
    text_size,
)
from megatron.analysis.plots.text import brief, list_below


def plot_pareto(
    data: pd.DataFrame,
    *,
    xlabel: str,
    ylabel: str,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw one labeled dot per row, and a line through the points of the Pareto front.

    Points without a positive, finite error are listed below the x axis instead.

    Args:
        data: table with columns `name`, `x`, `y` (an error) and `front` (a bool).
    """
    ax = plt.gca() if ax is None else ax
    drawn = data[np.isfinite(data["y"].astype(float)) & (data["y"] > 0)]
    rest = data[~data.index.isin(drawn.index)]
    names = ", ".join(brief(str(name)) for name in rest["name"])
    note = f"not drawn, because the error is zero or not finite: {names}"
    if drawn.empty:
        nothing(ax, title)
        if len(rest):
            list_below(ax, note)
        return ax
    colors = colors_of(dict.fromkeys(map(str, data["name"])))
    front = drawn[drawn["front"]].sort_values("x")
    ax.plot(front["x"], front["y"], color=FAINT, linewidth=1, linestyle="--", zorder=1)
    ax.set_yscale("log")
    ax.margins(x=0.3, y=0.12)
    for row in drawn.itertuples():
        color = colors[str(row.name)]
        face, above = (color, 4) if row.front else ("white", 3)  # equal points: show the filled one
        ax.scatter(
            [row.x], [row.y], s=46, color=face, edgecolors=color, linewidths=1.4, zorder=above
        )
    for names, x, y in _labels(drawn):
        to_left = _is_crowded(drawn, x, y)
        ax.annotate(
            names,
            (x, y),
            xytext=(-7 if to_left else 7, 3),
            textcoords="offset points",
            ha="right" if to_left else "left",
            fontsize=text_size(8.5),
        )
    decades(ax.yaxis)
    guide(ax, "both")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    if len(rest):
        list_below(ax, note)
    ax.set_title(title, loc="left")
    return quiet(ax)


def _labels(points: pd.DataFrame) -> list[tuple[str, float, float]]:
    """Return each label's text and position; points that almost coincide share a label."""
    width = points["x"].max() - points["x"].min() or 1.0
    height = np.log(points["y"].max() / points["y"].min()) or 1.0
    labels: list[tuple[list[str], float, float]] = []
    for row in points.sort_values(["front", "y"], ascending=[False, True]).itertuples():
        for names, x, y in labels:
            near = abs(row.x - x) < 0.04 * width
            if near and abs(np.log(row.y / y)) < 0.03 * height:
                names.append(brief(str(row.name)))
                break
        else:
            labels.append(([brief(str(row.name))], row.x, row.y))
    return [("\n".join(names), x, y) for names, x, y in labels]


def _is_crowded(points: pd.DataFrame, x: float, y: float) -> bool:
    """Return whether a label to the right of a point would run into another point or the edge."""
    width = points["x"].max() - points["x"].min() or 1.0
    height = np.log(points["y"].max() / points["y"].min()) or 1.0
    ahead = (points["x"] - x) / width
    apart = (np.log(points["y"] / y) / height).abs()
    return bool(
        ((ahead > 0) & (ahead < 0.4) & (apart < 0.05)).any() or x > points["x"].max() - width / 4
    )
