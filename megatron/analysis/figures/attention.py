"""attention_maps/: probabilities, and the error of each head."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
import torch
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from megatron.analysis.figures.material import (
    Make,
    Material,
    NothingToDrawError,
    headline,
    sheet,
)
from megatron.analysis.plots import plot_attention_map, plot_heatmap
from megatron.fake_quant import fake_quantize

HEADS = 8  #: drawn of a layer
LAYERS = 8  #: drawn, evenly spaced
PIXELS = 512  #: of a map's side at most


def draw(material: Material) -> Iterator[tuple[str, Make]]:
    """probabilities_L<layer> and head_error."""
    table = material.tensors
    mine = table[table["tensor_name"] == "attention_probs"]
    if mine.empty:
        raise NothingToDrawError(
            "attention_probs were not collected; collect with --collect-tensors all,attention_probs"
        )
    # the last iteration, of one run: the newest
    last = mine[mine["run_id"] == mine["run_id"].iloc[-1]]
    last = last[last["iteration"] == last["iteration"].max()].drop_duplicates("layer_idx")
    last = last.sort_values("layer_idx")
    loaded = {int(row.layer_idx): by_head(material.load(row.tensor)) for row in last.itertuples()}
    every = -(-len(loaded) // LAYERS)
    for layer in list(loaded)[::every]:
        title = f"Layer {layer}: attention probabilities"
        yield f"probabilities_L{layer}", partial(probabilities, loaded[layer], title)
    if material.formats:
        yield "head_error", partial(head_error, loaded, material.formats)


def by_head(probs: Tensor) -> Tensor:
    """[batch, heads, queries, keys]; a tensor without a batch gets one."""
    if probs.dim() < 3:
        raise NothingToDrawError(f"attention_probs of shape {list(probs.shape)} have no heads")
    return probs.reshape(-1, *probs.shape[-3:])


def probabilities(probs: Tensor, title: str) -> Figure:
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
    figure.colorbar(axes[0].images[0], ax=axes, label="probability", fraction=0.02, extend="min")
    note = f"first sequence, {heads} of {probs.shape[1]} heads; bits: mean entropy of a query; "
    headline(figure, title, note + "grey: masked")
    return figure


def entropy(probs: Tensor) -> float:
    """Mean over queries, in bits."""
    p = probs.double()
    terms = torch.where(p > 0, p * torch.log2(p.clamp(min=1e-300)), 0.0)
    return float(-terms.sum(-1).mean())


def head_errors(probs: Tensor, fmt: str) -> list[float]:
    """SQNR in dB of each head's probabilities, quantized along keys as P V does."""
    error = fake_quantize(probs.contiguous(), fmt, axis=-1).double() - probs.double()
    noise = error.square().sum(dim=(0, 2, 3))
    signal = probs.double().square().sum(dim=(0, 2, 3))
    return [float(10 * torch.log10(s / n)) for s, n in zip(signal, noise, strict=True)]


def head_error(loaded: dict[int, Tensor], formats: tuple[str, ...]) -> Figure:
    """Layer by head, a panel a format."""
    heads = max(probs.shape[1] for probs in loaded.values())
    width = max(3.4, 1.4 + 0.45 * heads)
    columns = min(len(formats), 2 if width < 8 else 1)
    rows = -(-len(formats) // columns)
    figure, axes = sheet(width * columns, (0.4 * len(loaded) + 1.5) * rows + 0.8, rows, columns)
    for ax in axes[len(formats) :]:
        ax.set_visible(False)
    data = pd.DataFrame(
        [
            {"format": name, "row": f"L{layer}", "column": head, "value": value}
            for name in formats
            for layer, probs in loaded.items()
            for head, value in enumerate(head_errors(probs, name))
        ]
    )
    finite = data["value"][np.isfinite(data["value"])]
    norm = Normalize(finite.min(), finite.max()) if len(finite) else None
    for ax, name in zip(axes, formats, strict=False):
        mine = data[data["format"] == name]
        plot_heatmap(mine, label="SQNR (dB)", title=name, norm=norm, ax=ax)
        ax.set_xlabel("head")
    note = "SQNR of each head's probabilities, blocks along keys as in P V"
    headline(figure, "Error of each attention head", note)
    return figure
