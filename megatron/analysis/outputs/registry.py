"""The table of outputs: what each one holds, what it needs and which module draws it.

The module of an output is loaded when it is drawn, so that listing the outputs takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megatron.analysis.figures.figure_data import FigureData

    #: The `draw` of a module of figures. It yields each figure's name with a function that draws
    #: it, or a file's name and suffix with a function that returns its text. A function that lacks
    #: data raises `NothingToDrawError`, and the other figures are still drawn.
    Draw = Callable[[FigureData], Iterator[tuple[str, Callable[[], Figure | str]]]]


@dataclass(frozen=True)
class Output:
    """One name of `--figures`: a folder of figures, or files of its own."""

    contents: str  #: shown by `--help`
    module: str  #: module below `megatron.analysis` that draws the output
    #: Properties of `FigureData` that the output reads and that take long to compute.
    needs: tuple[str, ...] = ()
    #: Outputs with a higher value are started earlier, so that no slow one is left for the end.
    slowness: int = 0

    def load(self) -> Draw:
        """Import the module that draws the folder, and return its function `draw`."""
        draw: Draw = import_module(f"megatron.analysis.{self.module}").draw
        return draw


SUMS, DEVIATIONS = "sums", "deviations"
QUICK, REPORT = "quick", "report"  #: the outputs that are files, not folders of figures
#: The outputs by name, which is also the name of a folder of figures.
OUTPUTS = {
    QUICK: Output("quick_analysis.png and tensor_stats.txt, the first look", "quick"),
    "distributions": Output(
        "exponents, histograms, boxes, Q-Q", "figures.distributions", needs=(SUMS,)
    ),
    "heatmaps": Output("layer by tensor, layer by iteration", "figures.heatmaps", slowness=3),
    "comparisons": Output(
        "runs of different types against each other",
        "figures.comparisons",
        needs=(SUMS, DEVIATIONS),
        slowness=2,
    ),
    "quantization_analysis": Output(
        "formats on the same tensors", "figures.quantization_analysis", needs=(SUMS,)
    ),
    "statistics": Output("scale of each tensor; all numbers as CSV", "figures.statistics"),
    "attention_maps": Output(
        "probabilities, error of each head", "figures.attention_maps", slowness=1
    ),
    "hifp8_analysis": Output(
        "HiFloat8's precision regions, codes", "figures.hifp8_analysis", needs=(SUMS,)
    ),
    "overflow_analysis": Output(
        "underflow, saturation, NaN and Inf", "figures.overflow_analysis", needs=(SUMS,)
    ),
    "layer_analysis": Output("values by layer and iteration", "figures.layer_analysis"),
    "block_analysis": Output(
        "scale maps, headroom, range, codes", "figures.block_analysis", needs=(SUMS,)
    ),
    "gradients": Output("gradients by layer and magnitude", "figures.gradients", needs=(SUMS,)),
    "global_statistics": Output(
        "everything in numbers, JSON and text", "figures.global_statistics"
    ),
    REPORT: Output("report.html, to click through", "report", needs=(DEVIATIONS,), slowness=4),
}
IMAGES = ("png", "svg", "pdf")  #: file formats of figures
