"""Draw the results of a study: the verdict in one picture, and the error budget in another."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from megatron.analysis.figures.figure_data import layer_name
from megatron.analysis.figures.sheet import headline
from megatron.analysis.outputs.render import DPI
from megatron.analysis.plots.heatmap import plot_heatmap
from megatron.analysis.plots.pareto import plot_pareto
from megatron.analysis.plots.style import in_style
from megatron.analysis.plots.text import brief
from megatron.analysis.stats.errors import decibels
from megatron.analysis.study.engine import Study
from megatron.analysis.study.proposal import Proposal, rows_of
from megatron.analysis.study.verdict import (
    OPERAND_NAMES,
    by_candidate,
    cells,
    weakest,
    with_names,
)

LONGEST_CANDIDATE = 24  #: maximum length of a name below a column, in characters
_ROW = 0.3  #: height of a row of a heat map, in inches


def draw_verdict(
    result: Study,
    sentences: Sequence[str],
    proposal: Proposal | None = None,
    *,
    image: str = "png",
) -> bytes:
    """Return the picture of the verdict.

    The left plot shows bits per value against error, also for the mixture of formats of a proposal.
    The right one shows where the weakest candidate loses: one row per place, one column per layer.
    """
    table = cells(result.rows)
    name = weakest(by_candidate(table))
    summary = points_of(result, proposal)
    own = table[table["candidate"] == name].sort_values("layer_idx", kind="stable")
    layers = own["layer_idx"].nunique()
    rows = own["place"].nunique()
    with in_style():
        width = min(7.5 + 0.55 * max(layers, 4), 22)
        figure = Figure(figsize=(width, max(2.2 + _ROW * rows, 4.8)), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[5.0, max(width - 6.5, 2.5)])
        points = summary.assign(
            name=summary["candidate"], x=summary["bits"], y=10 ** (summary["sqnr_db"] / -20)
        )
        plot_pareto(
            points,
            xlabel="bits per value, with scales",
            ylabel="relative error of the median GEMM result",
            title="Bits against error (filled: Pareto front)",
            ax=left,
        )
        plot_heatmap(
            pd.DataFrame(
                {
                    "row": own["place"],
                    "column": [layer_name(int(layer)) for layer in own["layer_idx"]],
                    "value": own["sqnr_db"],
                }
            ),
            label="SQNR of the result (dB)",
            title=f"Where {brief(name, 24)} loses",
            ax=right,
        )
        headline(figure, "Formats by the results of matmuls", " ".join(sentences))
        return _saved(figure, image)


def points_of(result: Study, proposal: Proposal | None = None) -> pd.DataFrame:
    """Return the table of `by_candidate` for all candidates and, if given, for a proposal.

    The proposal has the name of its file.
    """
    rows = result.rows
    if proposal is not None:
        rows = pd.concat([rows, rows_of(proposal, rows)], ignore_index=True)
    return by_candidate(cells(rows))


def draw_budget(result: Study, image: str = "png") -> bytes | None:
    """Draw the error budget (one operand quantized at a time); return None if it was not measured.

    A cell shows the SQNR of a GEMM's result if only one operand is quantized.
    """
    if result.budgets.empty:
        return None
    table = with_names(result.budgets)
    labels = [
        OPERAND_NAMES.get((row.operation, row.operand), row.operand) for row in table.itertuples()
    ]
    table = table.assign(row=[f"{p}: {x}" for p, x in zip(table["place"], labels, strict=True)])
    means = table.groupby(["row", "candidate"], sort=False)["alone"].mean().reset_index()
    means["value"] = [decibels(1.0, alone) for alone in means["alone"]]
    order = {each.name: at for at, each in enumerate(result.candidates)}
    means = means.assign(at=means["candidate"].map(order))
    means = means.sort_values("at", kind="stable")
    with in_style():
        height = 1.8 + 0.24 * means["row"].nunique()
        width = 5.0 + 0.8 * means["candidate"].nunique()
        figure = Figure(figsize=(width, height), layout="constrained")
        plot_heatmap(
            means.rename(columns={"candidate": "column"})[["row", "column", "value"]],
            longest=LONGEST_CANDIDATE,
            label="SQNR of the result (dB)",
            ax=figure.subplots(),
        )
        headline(
            figure,
            "Error budget: only one operand is quantized",
            "mean squared error over layers and passes; compare the two operands of a GEMM",
        )
        return _saved(figure, image)


def _saved(figure: Figure, image: str) -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format=image, dpi=DPI)
    return content.getvalue()
