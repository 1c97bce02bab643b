"""attention_maps/: probabilities, and the error of each head."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from megatron.analysis.figures.figure_data import (
    FigureData,
    Make,
    NothingToDrawError,
    headline,
    sheet,
)
from megatron.analysis.figures.heatmaps import layer_name
from megatron.analysis.figures.scale_maps import largest_finite
from megatron.analysis.plots import plot_attention_map, plot_heatmap
from megatron.analysis.plots.style import decades
from megatron.analysis.stats.errors import decibels
from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.formats import TensorScaling, TwoLevelScaling

HEADS = 8  #: drawn of a layer
LAYERS = 8  #: drawn, evenly spaced
PIXELS = 512  #: of a map's side at most
CHUNK = 1 << 20  #: values that are computed on at a time


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """probabilities_L<layer> and head_error. One layer is in memory at a time, if each figure is
    drawn when it comes; a layer that cannot be loaded is left out.
    """
    rows = latest(figure_data)
    where = whose(rows)
    every = -(-len(rows) // LAYERS)
    loaded, lacking, errors = 0, {}, []
    for row in rows.itertuples():
        name = f"probabilities_L{row.layer_idx}"
        try:
            probs = by_head(figure_data.load(row.tensor))
        except (ValueError, NothingToDrawError) as error:
            lacking[name] = str(error)
            continue
        if loaded % every == 0:
            title = f"Layer {row.layer_idx}: attention probabilities"
            yield name, partial(probabilities, probs, title, where, figure_data.alarm)
        loaded += 1
        errors += [
            {"format": fmt, "row": layer_name(row.layer_idx), "column": head, "value": value}
            for fmt in formats_of(figure_data, row.tensor)
            for head, value in enumerate(head_errors(probs, fmt))
        ]
    if not loaded:
        raise NothingToDrawError(next(iter(lacking.values())))
    yield from ((name, partial(_lacks, why)) for name, why in lacking.items())
    if errors:
        yield "head_error", partial(head_error, pd.DataFrame(errors), where, figure_data.alarm)


def _lacks(why: str) -> Figure:
    raise NothingToDrawError(why)


def latest(figure_data: FigureData) -> pd.DataFrame:
    """A row a layer: of the newest run's last iteration."""
    table = figure_data.tensors
    mine = table[table["tensor_name"] == "attention_probs"]
    if mine.empty:
        raise NothingToDrawError(
            "attention_probs were not collected; collect with --collect-tensors all,attention_probs"
        )
    runs = mine["run_id"].fillna("")
    newest = [run for run in figure_data.store.runs() if run in set(runs)][-1]
    mine = mine[runs == newest]
    last = mine[mine["iteration"] == mine["iteration"].max()]
    return last.drop_duplicates("layer_idx").sort_values("layer_idx")


def whose(rows: pd.DataFrame) -> str:
    """Return a phrase that names the run and the iteration of the rows that `latest` chose."""
    first = rows.iloc[0]
    run = f"{first['quant_type']} run {first['run_id'] or '(unknown)'}"
    return f"{run} (the newest), iteration {first['iteration']} (its last)"


def formats_of(figure_data: FigureData, tensor: int) -> list[str]:
    """Those that the statistics have of a tensor: not all can be computed of a part of one."""
    uses = figure_data.uses
    mine = set(uses.loc[uses["tensor"] == tensor, "quantized_format"])
    return [name for name in figure_data.formats if name in mine]


def by_head(probs: Tensor) -> Tensor:
    """[batch, heads, queries, keys]; a tensor without a batch gets one."""
    if probs.dim() < 3:
        raise NothingToDrawError(f"attention_probs of shape {list(probs.shape)} have no heads")
    if not probs.numel():
        raise NothingToDrawError(f"attention_probs of shape {list(probs.shape)} have no values")
    return probs.reshape(-1, *probs.shape[-3:])


def probabilities(probs: Tensor, title: str, where: str, warning: str = "") -> Figure:
    """The first sequence's heads."""
    heads = min(probs.shape[1], HEADS)
    columns = min(4, heads)
    rows = -(-heads // columns)
    figure, axes = sheet(3.0 * columns + 0.8, 3.0 * rows + 0.9, rows, columns)
    for ax in axes[heads:]:
        ax.set_visible(False)
    every = [-(-side // PIXELS) for side in probs.shape[-2:]]
    for head, ax in zip(range(heads), axes, strict=False):
        part = probs[0, head, :: every[0], :: every[1]].float().numpy()
        data = pd.DataFrame(
            part,
            index=np.arange(part.shape[0]) * every[0],
            columns=np.arange(part.shape[1]) * every[1],
        )
        plot_attention_map(data, title=f"head {head}, {entropy(probs[0, head]):.2f} bits", ax=ax)
        if head < heads - columns:
            ax.set_xlabel("")
        if head % columns:
            ax.set_ylabel("")
    bar = figure.colorbar(
        axes[0].images[0], ax=axes, label="probability", fraction=0.02, extend="min"
    )
    decades(bar.ax.yaxis)
    note = f"{where}; first sequence, {heads} of {probs.shape[1]} heads; bits: mean entropy of a "
    headline(figure, title, f"{note}query; grey: masked", warning)
    return figure


def entropy(probs: Tensor) -> float:
    """Mean over queries, in bits; [queries, keys]."""
    total = 0.0
    for part in torch.split(probs, queries_at_once(probs)):
        p = part.double()
        terms = torch.where(p > 0, p * torch.log2(p.clamp(min=1e-300)), 0.0)
        total -= float(terms.sum())
    return total / probs.shape[0]


def queries_at_once(head: Tensor, multiple: int = 1) -> int:
    """As many as have `CHUNK` values, in whole blocks of `multiple`."""
    return max(CHUNK // (head.shape[-1] * multiple), 1) * multiple


def head_errors(probs: Tensor, fmt: str) -> list[float]:
    """SQNR in dB of each head's probabilities, quantized along keys as P V does."""
    scaling = get_format(fmt).scaling
    of_tensor = isinstance(scaling, (TensorScaling, TwoLevelScaling))
    largest = largest_finite(probs) if of_tensor else None
    found = []
    for head in range(probs.shape[1]):
        signal = noise = 0.0
        for sequence in probs[:, head]:
            more = _error(sequence, fmt, largest)
            signal, noise = signal + more[0], noise + more[1]
        found.append(decibels(signal, noise) if signal else math.nan)
    return found


def _error(head: Tensor, fmt: str, largest: float | None) -> tuple[float, float]:
    """Sums of squares of one sequence's values and of their errors, some queries at a time.

    Args:
        head: [queries, keys]. largest: magnitude that the tensor's scale comes from, if it has one.
    """
    size = get_format(fmt).block_size or 1
    signal = noise = 0.0
    for number, part in enumerate(torch.split(head, queries_at_once(head, size))):
        if largest is not None:  # in rows of its own: of whole blocks, where they are square
            ahead = part.new_zeros(size, part.shape[1])
            ahead[0, 0] = largest
            part = torch.cat([ahead, part])
        # a seed, so that stochastic rounding comes out the same each time
        became = fake_quantize(part.contiguous(), fmt, axis=-1, seed=number)
        if largest is not None:
            part, became = part[size:], became[size:]
        x = part.double().flatten()
        error = became.double().flatten().sub_(x)
        known = error.isfinite()
        if not known.all():
            x, error = x[known], error[known]
        signal, noise = signal + float(x @ x), noise + float(error @ error)
    return signal, noise


def head_error(data: pd.DataFrame, where: str, warning: str = "") -> Figure:
    """Layer by head, a panel a format.

    Args:
        data: columns `format`, `row` (layer), `column` (head), `value` (SQNR in dB).
    """
    formats = list(dict.fromkeys(data["format"]))
    heads, layers = data["column"].max() + 1, data["row"].nunique()
    width = max(3.4, 1.4 + 0.45 * heads)
    columns = min(len(formats), 2 if width < 8 else 1)
    rows = -(-len(formats) // columns)
    figure, axes = sheet(width * columns, (0.4 * layers + 1.5) * rows + 0.8, rows, columns)
    for ax in axes[len(formats) :]:
        ax.set_visible(False)
    finite = data["value"][np.isfinite(data["value"])]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    norm = Normalize(low, high if high > low else low + 1)
    for ax, name in zip(axes, formats, strict=False):
        mine = data[data["format"] == name]
        plot_heatmap(mine, label="SQNR (dB)", title=name, norm=norm, ax=ax)
        ax.set_xlabel("head")
    note = f"SQNR of each head's probabilities, blocks along keys as in P V; {where}"
    headline(figure, "Error of each attention head", note, warning)
    return figure
