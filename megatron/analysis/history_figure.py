"""Draw the figure of the command `history`: how a run went, and where its tensors were unusual."""

from __future__ import annotations

import io

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from megatron.analysis.figures.sheet import headline, sheet
from megatron.analysis.plots.style import (
    ALARM,
    FAINT,
    decades,
    guide,
    in_style,
    quiet,
    right_of_title,
)
from megatron.fake_quant.gradient_rule import THRESHOLD

DPI = 120  #: resolution in dots per inch
WIDTH, ROW = 8.5, 2.0  #: width of the figure and height of a panel, in inches
LINE, MARK = "#2a6f97", "#e07a5f"  #: color of curves, and of what is unusual
FEW = 60  #: maximum number of iterations whose numbers are marked by dots
WIDE = 100  #: ratio of largest to smallest number above which an axis is logarithmic


def drawn(
    losses: pd.DataFrame | None,
    found: pd.DataFrame,
    gradients: pd.DataFrame,
    measured: NDArray[np.int64],
    since: int = 1,
) -> bytes:
    """Return the content of a PNG file with the figure of `history_figure`."""
    content = io.BytesIO()
    with in_style():
        history_figure(losses, found, gradients, measured, since).savefig(content, dpi=DPI)
    return content.getvalue()


def history_figure(
    losses: pd.DataFrame | None,
    found: pd.DataFrame,
    gradients: pd.DataFrame,
    measured: NDArray[np.int64],
    since: int = 1,
) -> Figure:
    """Draw the loss, the gradient norm and the number of operands outside their bands.

    If there are quantized gradients, the smallest ratio of a gradient to its noise is drawn below.

    Args:
        losses: result of `read_iterations`; None if the run has reported no losses.
        found: result of `excursions`.
        gradients: result of `gradients_of`.
        measured: the iterations with statistics.
        since: first iteration of which `found` contains operands outside their bands.
    """
    curves = {}
    if losses is not None:
        steps = losses["iteration"].to_numpy()
        curves = {
            "loss": (steps, losses["loss"].to_numpy(float)),
            "gradient norm": (steps, losses["grad_norm"].to_numpy(float)),
        }
    rows = len(curves) + 1 + (not gradients.empty)
    figure, axes = sheet(WIDTH, 0.9 + ROW * rows, rows, 1, sharex=True)
    for ax, (label, (steps, numbers)) in zip(axes, curves.items(), strict=False):
        if np.isnan(numbers).all():
            _nothing(ax, "not reported")
        elif len(_curve(ax, steps, numbers, "x", ALARM)):
            right_of_title(ax, "✕ NaN, infinite or not reported")
        ax.set(ylabel=label)
    _excursions(axes[len(curves)], found)
    if not gradients.empty:
        smallest = gradients.groupby("iteration")["gradient_to_noise"].min()
        ratios = smallest.to_numpy(float)
        exact = _curve(axes[-1], smallest.index.to_numpy(), ratios, "^", LINE)
        axes[-1].axhline(THRESHOLD, color=MARK, linestyle="--", linewidth=1)
        axes[-1].set(ylabel="smallest\ngradient /\nits noise")
        words = "▴ no error; " if len(exact) else ""
        right_of_title(axes[-1], f"{words}dashed: √3; a gradient below it is too noisy")
    everywhere = np.concatenate([measured, *(steps for steps, _ in curves.values())])
    first, last = int(everywhere.min()), int(everywhere.max())
    margin = max(0.5, 0.01 * (last - first))
    axes[-1].set_xlim(first - margin, last + margin)
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, min_n_ticks=1))
    axes[-1].set(xlabel="iteration")
    later = since > first
    title, note = "No operand left its band", ""
    if later:
        title += f" from iteration {since} on"
    if len(found):
        row = found.iloc[0]
        for ax in axes:
            ax.axvline(row.iteration, color=FAINT, linestyle=":", linewidth=1, zorder=0)
        title = f"Iteration {row.iteration} is the first in which an operand left its band"
        title += f", from {since} on" if later else ""
        note = f"dotted: {row.statistic} of {row.tensor} ({row.gemm}) of {row.module}, the first"
    headline(figure, title, note)
    return figure


def _curve(
    ax: Axes, steps: NDArray[np.int64], numbers: NDArray[np.float64], marker: str, color: str
) -> NDArray[np.int64]:
    """Draw a curve by iteration, and return the iterations whose numbers are not finite.

    Args:
        marker: marker at the top of the axes for numbers that are not finite.
        color: color of this marker.
    """
    finite = np.isfinite(numbers)
    shown = np.where(finite, numbers, np.nan)
    dots = "o" if len(steps) <= FEW else None
    ax.plot(steps, shown, color=LINE, linewidth=1.2, marker=dots, markersize=3)
    known, lost = numbers[finite], steps[~finite]
    if len(known) and known.min() > 0 and known.max() > WIDE * known.min():
        ax.set_yscale("log")
        decades(ax.yaxis)
    elif not len(known):
        ax.set_yticks([])
    if len(lost):
        top = ax.get_xaxis_transform()
        ax.plot(lost, np.ones(len(lost)), marker, color=color, transform=top, clip_on=False)
    guide(ax)
    quiet(ax)
    return lost


def _nothing(ax: Axes, why: str) -> None:
    """Write why a panel is empty; its x-axis stays as it is, because the panels share it."""
    ax.set_yticks([])
    text = ax.text(0.5, 0.5, why, color=FAINT, ha="center", va="center", transform=ax.transAxes)
    text.set_in_layout(False)
    quiet(ax)


def _excursions(ax: Axes, found: pd.DataFrame) -> None:
    """Draw the number of operands outside their bands by iteration, as lines of visible width."""
    operands = found.drop_duplicates(["iteration", "rank", "module", "operation", "gemm", "tensor"])
    counts = operands.groupby("iteration").size()
    ax.set(ylabel="operands\noutside\ntheir bands")
    if counts.empty:
        _nothing(ax, "none")
        return
    ax.vlines(counts.index, 0, counts.to_numpy(), color=MARK, linewidth=3)
    ax.set_ylim(0, 1.05 * counts.max())
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    guide(ax)
    quiet(ax)
