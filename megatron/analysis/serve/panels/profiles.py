"""Draw the magnitudes of the channels and the tokens of a tensor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.serve import charts
from megatron.analysis.serve.charts import array, axis, layout
from megatron.analysis.serve.contents import Profile
from megatron.analysis.serve.panels.subject import SECOND, Shown, Subject

POINTS = 1500  #: maximum number of points of a profile


def channels(subject: Subject) -> Shown:
    """Draw the largest magnitude and the rms of each channel."""
    return _profile(subject, 0, "channel")


def tokens(subject: Subject) -> Shown:
    """Draw the largest magnitude and the rms of each token or row."""
    return _profile(subject, 1, subject.row_name)


def _profile(subject: Subject, number: int, what: str) -> Shown:
    own = subject.contents.profiles(subject.catalog, subject.tensor)[number]
    data = _profile_traces(own, "largest magnitude", "rms", "#1f7a7a", "#8bb8b8")
    if subject.beside is not None:
        other = subject.contents.profiles(subject.catalog, subject.beside)[number]
        data += _profile_traces(
            other, "largest magnitude, second", "rms, second", SECOND, "#e3b1c1"
        )
    values = np.concatenate([own.amax, own.rms])
    positive = values[(values > 0) & np.isfinite(values)]
    low, high = (float(positive.min()), float(positive.max())) if len(positive) else (0.1, 1.0)
    median = float(np.median(own.amax[own.amax > 0])) if (own.amax > 0).any() else 0.0
    outliers = int((own.amax > 6 * median).sum()) if median else 0
    figure = {
        "data": data,
        "layout": layout(
            270,
            showlegend=True,
            margin={"t": 30},
            hovermode="x unified",
            xaxis=axis(what),
            yaxis=charts.log_axis("magnitude", low, high),
        ),
    }
    dead = int((own.amax == 0).sum())
    note = f"{len(own.amax):,} {what.partition(' ')[0]}s; {outliers} above 6 times the median"
    note += f"; {dead} hold only zeros." if dead else "."
    if len(own.amax) > POINTS:
        note += f" Each point is the largest of {-(-len(own.amax) // POINTS)} values."
    table = pd.DataFrame({"index": np.arange(len(own.amax)), "amax": own.amax, "rms": own.rms})
    return Shown(figure, note, table)


def _profile_traces(own: Profile, first: str, second: str, dark: str, pale: str) -> list[Any]:
    traces = []
    for name, values, color in ((second, own.rms, pale), (first, own.amax, dark)):
        x, y = _thinned(values)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": x.tolist(),
                "y": array(np.where(y > 0, y, np.nan)),
                "line": {"color": color, "width": 1.3},
                "hovertemplate": f"%{{y:.4g}} {name}<extra></extra>",
            }
        )
    return traces


def _thinned(values: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Split values into at most `POINTS` groups; return the position and value of each maximum."""
    step = -(-len(values) // POINTS)
    if step <= 1:
        return np.arange(len(values)), values
    padded = np.pad(values, (0, -len(values) % step), constant_values=0).reshape(-1, step)
    best = padded.argmax(1)
    return np.arange(len(padded)) * step + best, padded[np.arange(len(padded)), best]
