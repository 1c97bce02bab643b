"""Define a table of all outputs: the contents, the required data and the module of each one.

A module is imported only when its output is drawn, so listing the outputs takes no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megatron.analysis.figures.figure_data import FigureData

    #: Type of the function `draw` that each output's module defines. It yields one pair per figure
    #: or text file: the name (with a suffix for a text file), and a function that draws the figure
    #: or returns the text. If the dump lacks the data for one figure, the function in its pair
    #: raises `NothingToDrawError`; the other figures are still drawn.
    Draw = Callable[[FigureData], Iterator[tuple[str, Callable[[], Figure | str]]]]


@dataclass(frozen=True)
class Output:
    """An output that `--figures` can select: a folder of figures, or individual files."""

    contents: str  #: description of the output for `--help`
    module: str  #: name of the module that draws the output, relative to `megatron.analysis`
    #: Slow properties of `FigureData` that the output needs.
    needs: tuple[str, ...] = ()
    #: Priority: outputs with higher values are started earlier, which shortens the total time.
    slowness: int = 0

    def load(self) -> Draw:
        """Import the module that draws the output, and return its function `draw`."""
        draw: Draw = import_module(f"megatron.analysis.{self.module}").draw
        return draw


SUMS, DEVIATIONS = "sums", "deviations"
QUICK, REPORT = "quick", "report"  #: outputs that are files instead of folders of figures
#: Outputs by name. The figures of an output are in a folder of the same name.
OUTPUTS = {
    QUICK: Output("quick_analysis.png and tensor_stats.txt, the first look", "quick", slowness=4),
    "distributions": Output("exponents, histograms, boxes", "figures.distributions", needs=(SUMS,)),
    "heatmaps": Output("numbers by layer and tensor", "figures.heatmaps", slowness=3),
    "comparisons": Output(
        "comparison of runs with different quantization types",
        "figures.comparisons",
        needs=(SUMS, DEVIATIONS),
        slowness=2,
    ),
    "quantization_analysis": Output(
        "formats on the same tensors", "figures.quantization_analysis", needs=(SUMS,)
    ),
    "statistics": Output("scale of each tensor; all numbers as CSV", "figures.statistics"),
    "attention_maps": Output(
        "attention and error of each head", "figures.attention_maps", slowness=1
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
