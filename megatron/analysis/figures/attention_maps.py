"""Draw the figures in `attention_maps/`: attention probabilities and errors per head."""

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

from megatron.analysis.figures.attention_probabilities import (
    Layer,
    hidden_keys,
    layers_of,
    source_of,
)
from megatron.analysis.figures.figure_data import (
    FigureData,
    Make,
    NothingToDrawError,
    layer_name,
)
from megatron.analysis.figures.scale_maps import largest_finite
from megatron.analysis.figures.sheet import headline, label_edges, sheet, shown
from megatron.analysis.plots.attention_map import plot_attention_map
from megatron.analysis.plots.heatmap import plot_heatmap
from megatron.analysis.plots.style import decades
from megatron.analysis.stats.errors import decibels
from megatron.fake_quant import fake_quantize, get_format

HEADS = 8  #: maximum number of heads drawn per layer
LAYERS = 8  #: maximum number of layers drawn, evenly spaced
PIXELS = 512  #: maximum width and height of a map, in pixels
CHUNK = 1 << 20  #: approximate number of values to process at a time


def draw(figure_data: FigureData) -> Iterator[tuple[str, Make]]:
    """Yield the figures "probabilities_L<layer>" and "head_error".

    Only one layer is in memory at a time if each figure is drawn before the next one is requested.
    For a layer that cannot be loaded, the yielded function raises `NothingToDrawError`.
    """
    layers = layers_of(figure_data)
    source = source_of(layers)
    every = -(-len(layers) // LAYERS)
    loaded, unreadable, errors = 0, {}, []
    for layer in layers:
        number = layer.row.layer_idx
        name = f"probabilities_L{number}"
        try:
            probs = layer.probabilities(figure_data)
        except (ValueError, NothingToDrawError) as error:
            unreadable[name] = str(error)
            continue
        if loaded % every == 0:
            title = f"Layer {number}: attention compared with uniform attention"
            hidden = hidden_keys(figure_data, layer, probs[:1, :HEADS])
            warning = figure_data.alarm
            yield name, partial(probabilities, probs, title, source, hidden=hidden, warning=warning)
        loaded += 1
        errors += [
            {"format": fmt, "row": layer_name(number), "column": head, "value": value}
            for fmt in formats_of(figure_data, layer)
            for head, value in enumerate(head_errors(probs, fmt))
        ]
    if not loaded:
        raise NothingToDrawError(next(iter(unreadable.values())))
    yield from ((name, partial(_refuse, why)) for name, why in unreadable.items())
    if errors:
        yield "head_error", partial(head_error, pd.DataFrame(errors), source, figure_data.alarm)


def _refuse(why: str) -> Figure:
    raise NothingToDrawError(why)


def formats_of(figure_data: FigureData, layer: Layer) -> list[str]:
    """Return the formats whose errors on a layer's probabilities can be computed.

    Some formats cannot be evaluated on a saved tensor with missing parts.
    """
    if layer.key is not None:
        return list(figure_data.formats)
    uses = figure_data.uses
    computed = set(uses.loc[uses["tensor"] == layer.row.tensor, "quantized_format"])
    return [name for name in figure_data.formats if name in computed]


def probabilities(
    probs: Tensor, title: str, source: str, *, hidden: Tensor | None = None, warning: str = ""
) -> Figure:
    """Draw the attention of the first sequence compared with uniform attention, one map per head.

    A probability is multiplied by the number of visible keys, because a query with few visible keys
    gives each of them a large probability, whatever it attends to.

    Args:
        probs: probabilities [batch, heads, queries, keys].
        source: phrase that names the run and the iteration.
        hidden: keys that are masked, of shape [queries, keys]; None if the mask is not known.
            Probabilities of zero then count as masked.
        warning: line about unfinished runs, or an empty string.
    """
    heads = min(probs.shape[1], HEADS)
    columns = min(4, heads)
    rows = -(-heads // columns)
    figure, axes = sheet(3.0 * columns + 0.8, 3.0 * rows + 0.9, rows, columns)
    axes = shown(axes, heads)
    every = [-(-side // PIXELS) for side in probs.shape[-2:]]
    for head, ax in enumerate(axes):
        queries = probs[0, head, :: every[0]].float()
        visible = queries > 0 if hidden is None else ~hidden[:: every[0]]
        relative = torch.where(visible, queries * visible.sum(-1, keepdim=True), torch.nan)
        part = relative[:, :: every[1]].numpy()
        data = pd.DataFrame(
            part,
            index=np.arange(part.shape[0]) * every[0],
            columns=np.arange(part.shape[1]) * every[1],
        )
        plot_attention_map(data, title=f"head {head}, {entropy(probs[0, head]):.2f} bits", ax=ax)
    label_edges(axes)
    bar = figure.colorbar(
        axes[0].images[0],
        ax=axes,
        label="probability x number of visible keys",
        fraction=0.02,
        extend="both",
    )
    decades(bar.ax.yaxis)
    note = f"{source}; first sequence, {heads} of {probs.shape[1]} heads; bits: mean entropy of a "
    gray = "masked" if hidden is not None else "zero, because the mask is not known"
    headline(figure, title, f"{note}query; 1: as uniform attention; gray: {gray}", warning)
    return figure


def entropy(probs: Tensor) -> float:
    """Return the entropy in bits, averaged over the queries; `probs` has shape [queries, keys]."""
    total = 0.0
    for part in torch.split(probs, queries_at_once(probs)):
        p = part.double()
        terms = torch.where(p > 0, p * torch.log2(p.clamp(min=1e-300)), 0.0)
        total -= float(terms.sum())
    return total / probs.shape[0]


def queries_at_once(head: Tensor, multiple: int = 1) -> int:
    """Return how many queries to process at a time so that about `CHUNK` values are in memory.

    Args:
        head: probabilities of one head, shape [queries, keys].
        multiple: the result is a multiple of this number.
    """
    return max(CHUNK // (head.shape[-1] * multiple), 1) * multiple


def head_errors(probs: Tensor, fmt: str) -> list[float]:
    """Return the SQNR in dB of each head's probabilities; blocks run along keys, as in P @ V."""
    known = get_format(fmt)
    largest = largest_finite(probs) if known.has_tensor_scale or known.one_block else None
    ratios = []
    for head in range(probs.shape[1]):
        signal = noise = 0.0
        for sequence in probs[:, head]:
            squares = _error(sequence, fmt, largest)
            signal, noise = signal + squares[0], noise + squares[1]
        ratios.append(decibels(signal, noise) if signal else math.nan)
    return ratios


def _error(head: Tensor, fmt: str, largest: float | None) -> tuple[float, float]:
    """Return the sums of squares of one head's values and of their quantization errors.

    Values whose quantization error is not finite are excluded from both sums.

    Args:
        head: probabilities of one head, shape [queries, keys], processed in chunks of queries.
        largest: largest magnitude in the tensor, which determines the scale of the whole tensor;
            None if the format has no such scale.
    """
    known = get_format(fmt).with_own_amax()
    rows = min(max(known.block_size or 1, known.height), len(head))
    amax = torch.tensor(largest, dtype=torch.float32) if known.has_tensor_scale else None
    signal = noise = 0.0
    for number, part in enumerate(torch.split(head, queries_at_once(head, rows))):
        # The seed makes stochastic rounding reproducible.
        if known.one_block:  # A row in front that contains `largest` sets the scale of the chunk.
            assert largest is not None
            ahead = torch.full_like(part[:1], largest)
            quantized = fake_quantize(torch.cat([ahead, part]), known, seed=number, amax=amax)[1:]
        else:
            quantized = fake_quantize(part.contiguous(), known, seed=number, amax=amax)
        x = part.double().flatten()
        error = quantized.double().flatten().sub_(x)
        finite = error.isfinite()
        if not finite.all():
            x, error = x[finite], error[finite]
        signal, noise = signal + float(x @ x), noise + float(error @ error)
    return signal, noise


def head_error(data: pd.DataFrame, source: str, warning: str = "") -> Figure:
    """Draw the SQNR of each layer and head as a heatmap, one panel per format.

    Args:
        data: table with columns `format`, `row` (layer), `column` (head) and `value` (SQNR in dB).
        source: phrase that names the run and the iteration.
        warning: line about unfinished runs, or an empty string.
    """
    formats = list(dict.fromkeys(data["format"]))
    heads, layers = data["column"].max() + 1, data["row"].nunique()
    width = max(3.4, 1.4 + 0.45 * heads)
    columns = min(len(formats), 2 if width < 8 else 1)
    rows = -(-len(formats) // columns)
    figure, axes = sheet(
        width * columns, (0.4 * layers + 1.5) * rows + 0.8, rows, columns, categories=True
    )
    axes = shown(axes, len(formats))
    finite = data["value"][np.isfinite(data["value"])]
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 1.0)
    norm = Normalize(low, high if high > low else low + 1)
    for ax, name in zip(axes, formats, strict=True):
        cells = data[data["format"] == name]
        plot_heatmap(cells, label="SQNR (dB)", title=name, norm=norm, ax=ax)
        ax.set_xlabel("head")
    note = f"SQNR of each head's probabilities, blocks along keys as in P V; {source}"
    headline(figure, "Error of each attention head", note, warning)
    return figure
