"""The table of outputs: a folder below `draw/`, and who makes what is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from matplotlib.figure import Figure

from megatron.analysis.figures import (
    attention,
    blocks,
    comparisons,
    distributions,
    heatmaps,
    hifp8,
    layers,
    overall,
    overflow,
    quantization,
)
from megatron.analysis.figures.figure_data import FigureData

#: Gives a figure's name and what draws it; or a file's name with its suffix, and what gives its
#: text. What draws says what it lacks by `NothingToDrawError`; the others are made all the same.
Draw = Callable[[FigureData], Iterator[tuple[str, Callable[[], Figure | str]]]]

#: By folder; `output_names.SAYS` has the same names, and what they hold.
OUTPUTS: dict[str, Draw] = {
    "distributions": distributions.draw,
    "heatmaps": heatmaps.draw,
    "comparisons": comparisons.draw,
    "quantization_analysis": quantization.draw,
    "statistics": overall.draw_statistics,
    "attention_maps": attention.draw,
    "hifp8_analysis": hifp8.draw,
    "overflow_analysis": overflow.draw,
    "layer_analysis": layers.draw_layers,
    "block_analysis": blocks.draw,
    "gradients": layers.draw_gradients,
    "global_statistics": overall.draw_global,
}
