"""Draw each configuration's loss gap against its matmul error, computed from saved operands."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from megatron.analysis.plots.style import (
    FAINT,
    color_of,
    decades,
    guide,
    nothing,
    quiet,
    text_size,
)
from megatron.analysis.plots.text import brief, list_below

_DISTANCES = (5, 12, 20, 30, 42, 56, 72)  #: distances of a name from its dot, in points
_ANGLES = np.radians((0, 180, 45, 135, 315, 225, 90, 270))  #: directions of a name from its dot


def plot_error_and_gap(
    data: pd.DataFrame,
    *,
    xlabel: str = "offline error",
    ylabel: str = "gap",
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw one dot per configuration, with the interval of its gap and its name.

    The axis of gaps is logarithmic if all gaps and intervals are positive. Otherwise, it is linear
    near zero: within the median half width of the intervals. Rows without a finite gap or a
    positive error are listed below the x axis.

    Args:
        data: table with columns `name`, `x` (an error), `y` (a gap), and its interval `low` and
            `high`, which may be NaN.
    """
    ax = plt.gca() if ax is None else ax
    drawn = data[np.isfinite(data["y"]) & np.isfinite(data["x"]) & (data["x"] > 0)]
    rest = data[~data.index.isin(drawn.index)]
    names = ", ".join(brief(str(name)) for name in rest["name"])
    note = f"not drawn (diverged, or without an offline error): {names}"
    if drawn.empty:
        nothing(ax, title)
        if len(rest):
            list_below(ax, note)
        return ax
    ax.set_xscale("log")
    ends = np.concatenate([drawn[name].dropna() for name in ("y", "low", "high")])
    if ends.min() > 0:
        ax.set_yscale("log")
        decades(ax.yaxis)
    else:
        half = ((drawn["high"] - drawn["low"]) / 2).dropna()
        near = float(half.median()) if len(half) else float(np.abs(ends).max()) / 10
        near = near if near > 0 else 1e-3
        ax.set_yscale("symlog", linthresh=near)
        ylabel += f" (linear within ±{near:.2g})"
        ax.yaxis.set_major_formatter(FuncFormatter(lambda gap, _: f"{gap:g}"))
        ax.axhline(0, color=FAINT, linewidth=1, zorder=1)
    for row in drawn.itertuples():
        color = color_of(str(row.name))
        if np.isfinite(row.low) and np.isfinite(row.high):
            ax.plot([row.x, row.x], [row.low, row.high], color=color, linewidth=1.4, zorder=2)
        ax.scatter([row.x], [row.y], s=26, color=color, zorder=3)
    ax.margins(x=0.12, y=0.08)
    decades(ax.xaxis)
    guide(ax, "both")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.set_title(title, loc="left")
    if len(rest):
        list_below(ax, note)
    quiet(ax)
    _name_all(ax, drawn)
    return ax


def _name_all(ax: Axes, points: pd.DataFrame) -> None:
    """Write the names so that they overlap neither each other nor the dots, where there is room.

    A name at some distance from its dot is connected with it by a thin line.
    """
    figure = ax.figure.figure
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    centers = ax.transData.transform(points[["x", "y"]].to_numpy(dtype=float))
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in centers]
    for row in points.dropna(subset=["low", "high"]).itertuples():
        (x, low), (_, high) = ax.transData.transform([(row.x, row.low), (row.x, row.high)])
        taken.append(Bbox.from_extents(x - 1, low, x + 1, high))
    frame = ax.get_window_extent()
    for (x, y), name in sorted(zip(map(tuple, centers), points["name"], strict=True)):
        text = ax.text(0, 0, brief(str(name)), fontsize=text_size(8), transform=ax.transAxes)
        size = text.get_window_extent()
        text.remove()
        best: tuple[float, Bbox, tuple[float, float]] | None = None
        for distance in _DISTANCES:
            for angle in _ANGLES:
                dx, dy = distance * np.cos(angle), distance * np.sin(angle)
                box = _placed(x + dx * scale, y + dy * scale, size, float(np.cos(angle)))
                cost = sum(_overlap(box, other) for other in taken) + _outside(box, frame)
                if best is None or cost < best[0] - 1e-9:
                    best = cost, box, (dx, dy)
        assert best is not None
        _, box, (dx, dy) = best
        taken.append(box)
        _write(ax, brief(str(name)), (x, y), (dx, dy))


def _write(ax: Axes, name: str, point: tuple[float, float], offset: tuple[float, float]) -> None:
    """Write a name next to a dot; `point` is in pixels, and `offset` is in points."""
    dx, dy = offset
    align = "left" if dx > 1e-6 else "right" if dx < -1e-6 else "center"
    far = np.hypot(dx, dy) > 1.5 * _DISTANCES[0]
    text = ax.annotate(
        name,
        tuple(ax.transData.inverted().transform(point)),
        xytext=offset,
        textcoords="offset points",
        ha=align,
        va="center",
        fontsize=text_size(8),
        arrowprops={"arrowstyle": "-", "color": FAINT, "linewidth": 0.6} if far else None,
        zorder=4,
    )
    text.set_in_layout(False)  # the layout must not move the axes after the names are placed


def _placed(x: float, y: float, size: Bbox, side: float) -> Bbox:
    """Return the box of a text that, depending on `side`, begins, ends or is centered at (x, y)."""
    left = x if side > 1e-6 else x - size.width if side < -1e-6 else x - size.width / 2
    return Bbox.from_bounds(left, y - size.height / 2, size.width, size.height)


def _overlap(first: Bbox, second: Bbox) -> float:
    """Return the area that two boxes share, in pixels."""
    width = min(first.x1, second.x1) - max(first.x0, second.x0)
    height = min(first.y1, second.y1) - max(first.y0, second.y0)
    return float(max(width, 0.0) * max(height, 0.0))


def _outside(box: Bbox, frame: Bbox) -> float:
    """Return the area of the part of a box that lies outside of a frame, in pixels."""
    return box.width * box.height - _overlap(box, frame)
