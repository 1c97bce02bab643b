"""Draw the share of values in each binade, and a bar for the range of each format below."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from megatron.analysis.plots.style import (
    FAINT,
    color_of,
    guide,
    nothing,
    percent,
    powers_of_two,
    quiet,
    text_size,
)

LANE = 0.085  #: height of one format's range bar, as a fraction of the axes' height
LANES = 0.45  #: maximum height of all range bars together, as a fraction of the axes' height


def plot_exponent_histogram(
    data: pd.DataFrame,
    ranges: pd.DataFrame | None = None,
    *,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the share of values in each binade as one outline per group, above the range bars.

    Args:
        data: table with columns `group`, `exponent` and `share`, which is the share of the group's
            values whose magnitude is at least 2**exponent and below 2**(exponent + 1). The
            exponents have no gaps.
        ranges: table with columns `format`, `smallest`, `normal` and `largest`: the exponents of a
            format's smallest, smallest normal and largest number. Each format has a bar below the
            histogram. If the table has columns `lowest` and `highest`, a thin line between them
            shows the range over all block scales.
    """
    ax = plt.gca() if ax is None else ax
    if data.empty:
        return nothing(ax, title)
    lanes = [] if ranges is None else ranges.to_dict("records")
    for name, part in data.groupby("group", sort=False):
        exponents = part["exponent"].tolist()
        dashed = "--" if str(name).startswith("grad_") else "-"
        ax.stairs(
            part["share"],
            [*exponents, exponents[-1] + 1],
            color=color_of(str(name)),
            linewidth=1.4,
            linestyle=dashed,
            label=str(name),
        )
    top = 1.1 * max(float(data["share"].max()), 1e-9)
    low, high = int(data["exponent"].min()), int(data["exponent"].max()) + 1
    below = min(LANE * len(lanes), LANES)
    depth = below / (1 - below) * top
    for place, lane in enumerate(lanes):
        y = -depth * (place + 0.65) / len(lanes)
        _range(ax, lane, y, (low, high), min(1.0, LANES / (LANE * len(lanes))))
    if lanes:
        ax.axhline(0, color=FAINT, linewidth=0.8)
    ax.set_xlim(low, high)
    ax.set_ylim(-depth, top)
    powers_of_two(ax.xaxis)
    ax.set_yticks([tick for tick in ax.get_yticks() if 0 <= tick <= top])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: percent(y)))
    guide(ax)
    ax.set(xlabel="magnitude", ylabel="share of values in a binade")
    if lanes:  # leave space for the names of the formats between the y-axis and its label
        longest = max(len(str(lane["format"])) for lane in lanes)
        ax.yaxis.labelpad = max(ax.yaxis.labelpad, 5.0 * longest - 26)
    ax.set_title(title, loc="left")
    return quiet(ax)


def _range(ax: Axes, lane: dict[str, float], y: float, seen: tuple[int, int], size: float) -> None:
    """Draw a format's name, and its range as a bar that is thinner for subnormal numbers.

    Args:
        lane: row of the table `ranges`.
        y: vertical position of the bar.
        seen: exponents at the two ends of the x-axis.
        size: factor for the height of the bar; below 1 if there are many bars.
    """
    color = color_of(str(lane["format"]))
    # If the table lacks the columns `lowest` and `highest`, the thin line is as long as the bar
    # and hidden behind it.
    lane = {"lowest": lane["smallest"], "highest": lane["largest"]} | lane
    parts = (
        ("lowest", "highest", 1.0),
        ("smallest", "normal", 3.0),
        ("normal", "largest", 7.0),
    )
    for start, end, width in parts:
        left, right = max(lane[start], seen[0]), min(lane[end], seen[1])
        if right > left:
            ax.plot(
                [left, right], [y, y], color=color, linewidth=width * size, solid_capstyle="butt"
            )
    ax.annotate(
        str(lane["format"]),
        (0, y),
        xycoords=ax.get_yaxis_transform(),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        color=color,
        annotation_clip=False,
        fontsize=text_size(8) * max(size, 0.8),
    )
