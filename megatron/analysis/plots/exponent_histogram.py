"""How many values lie in each binade, and which of them the formats reach."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from megatron.analysis.plots.style import (
    FAINT,
    colour_of,
    guide,
    nothing,
    percent,
    powers_of_two,
    quiet,
)

LANE = 0.085  #: of the height of the axes, for the range of one format
LANES = 0.45  #: of it at most, for all of them


def plot_exponent_histogram(
    data: pd.DataFrame,
    ranges: pd.DataFrame | None = None,
    *,
    title: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw the share of values in each binade, one outline per group, above the formats' ranges.

    Args:
        data: columns `group`, `exponent`, `share`: of the group's values with a magnitude from
            2**exponent up to below 2**(exponent + 1); exponents without gaps.
        ranges: columns `format`, `smallest`, `normal`, `largest`: exponents between which a format
            has numbers, from `normal` on in full precision. Each format has a bar below the
            histogram; a thin line from `lowest` to `highest` is the range of all block scales.
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
            color=colour_of(str(name)),
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
    if lanes:  # beside the formats' names
        longest = max(len(str(lane["format"])) for lane in lanes)
        ax.yaxis.labelpad = max(ax.yaxis.labelpad, 5.0 * longest - 26)
    ax.set_title(title, loc="left")
    return quiet(ax)


def _range(ax: Axes, lane: dict[str, float], y: float, seen: tuple[int, int], size: float) -> None:
    """One format's bar, thin where it has subnormal numbers; its name stands at the left. Where
    there are many, each has `size` times the usual height.
    """
    colour = colour_of(str(lane["format"]))
    # without `lowest` and `highest` there is no line
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
                [left, right], [y, y], color=colour, linewidth=width * size, solid_capstyle="butt"
            )
    ax.annotate(
        str(lane["format"]),
        (0, y),
        xycoords=ax.get_yaxis_transform(),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="center",
        color=colour,
        annotation_clip=False,
        fontsize=8 * max(size, 0.6),
    )
