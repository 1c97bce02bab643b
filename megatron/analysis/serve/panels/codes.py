"""Draw the block scales of a tensor in a format, and how often each code occurs."""

from __future__ import annotations

import numpy as np
import pandas as pd

from megatron.analysis.plots.block_map import scale_ticks
from megatron.analysis.plots.style import ALARM, color_of
from megatron.analysis.serve import charts
from megatron.analysis.serve.charts import array, axis, color_bar, layout
from megatron.analysis.serve.contents import NotShownError, codes_in_order
from megatron.analysis.serve.panels.subject import Shown, Subject
from megatron.fake_quant import get_format


def scales(subject: Subject) -> Shown:
    """Draw the block scales of the tensor in a format as an image."""
    fmt = subject.address.format
    table = subject.contents.scales(subject.catalog, subject.tensor, fmt)
    values = table.to_numpy(dtype=float)
    known = get_format(fmt)
    if known.block_scale == "E8M0":
        finite = values[np.isfinite(values)]
        low, high = (finite.min(), finite.max()) if finite.size else (0, 1)
        ticks = charts.power_ticks(float(low), float(high), 6)
    else:
        pairs = scale_ticks(values)
        ticks = {"tickvals": [p for p, _ in pairs], "ticktext": [t for _, t in pairs]}
    rows, size = [int(i) for i in table.index], int(known.block_size or 1)
    trace = {
        "type": "heatmap",
        "z": array(values),
        "x0": size / 2 - 0.5,
        "dx": size,
        "y0": 0,
        "dy": rows[1] - rows[0] if len(rows) > 1 else 1,
        "colorscale": charts.MAGMA,
        "colorbar": color_bar("scale", ticks),
        "hovertemplate": "row %{y}, from column %{x}: 2^%{z:.2f}<extra></extra>",
        "hoverongaps": False,
    }
    figure = {
        "data": [trace],
        "layout": layout(
            300,
            xaxis=axis("position along the row", showgrid=False),
            yaxis=axis("row", autorange="reversed", showgrid=False),
        ),
    }
    note = f"Blocks of {known.block_size} values along the rows; empty: blocks of zeros."
    if len(rows) > 1 and rows[1] - rows[0] > 1:
        note += f" One in {rows[1] - rows[0]} rows is shown."
    return Shown(figure, note, table)


def codes(subject: Subject) -> Shown:
    """Draw how often each code occurs, sorted by the numbers that the codes stand for."""
    fmt = subject.address.format
    order, values = codes_in_order(fmt)
    part = subject.in_format(fmt)
    if not len(order) or part is None or not part.codes.any():
        raise NotShownError(f"the codes of {fmt} are not counted")
    counts = part.codes[order]
    shares = 100 * counts / max(int(part.codes.sum()), 1)
    names = ["-0" if v == 0 and np.signbit(v) else f"{v:.4g}" for v in values]
    unused = np.flatnonzero(counts == 0)
    positions = np.arange(len(order))
    every = 1 if len(order) <= 16 else len(order) // 8
    figure = {
        "data": [
            {
                "type": "bar",
                "x": positions.tolist(),
                "y": array(shares),
                "marker": {"color": color_of(fmt), "line": {"width": 0}},
                "customdata": names,
                "hovertemplate": "%{customdata}: %{y:.3g} %<extra></extra>",
                "name": "share",
            },
            {
                "type": "scatter",
                "mode": "markers",
                "x": unused.tolist(),
                "y": [0] * len(unused),
                "marker": {"color": ALARM, "symbol": "line-ns-open", "size": 8},
                "customdata": [names[i] for i in unused],
                "hovertemplate": "%{customdata}: never used<extra></extra>",
                "name": "never used",
            },
        ],
        "layout": layout(
            270,
            bargap=0.08 if len(order) <= 64 else 0,
            xaxis=axis(
                "number before the scale" if get_format(fmt).scaling is not None else "number",
                tickvals=positions[::every].tolist(),
                ticktext=names[::every],
            ),
            yaxis=axis("% of the values", rangemode="tozero"),
        ),
    }
    used = int((counts > 0).sum())
    legend = "; red: never used" if used < len(order) else ""
    note = f"{used} of {len(order)} codes are used{legend}."
    return Shown(figure, note, pd.DataFrame({"code": order, "number": values, "count": counts}))
