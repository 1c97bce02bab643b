"""Draw the figures of a dump for a paper or a notebook, one at a time.

    from megatron.analysis import figures

    data = figures.load("enhanced_tensor_logs", formats=["mxfp8"], select={"layer": [0, 1]})
    print(figures.names(data))
    figure = figures.figure(
        data, "quantization_analysis/sqnr_by_tensor", width="single", style="paper"
    )
    figures.save(figure, "sqnr.pdf")
    print(figures.caption(figure))

`python -m megatron.analysis draw` draws the same figures; its options `--select`, `--width`,
`--font-size` and `--style` have the same meaning. Each module of this package draws one output
folder. The other modules hold shared code: `figure_data` (tables and sums), `page` (width, font
size and style), `sheet` (layout, title and legend of a figure), `exponent_histograms`, `sums`,
`deviations` and `scale_maps`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.analysis.figures.public import figure, load, names, save
    from megatron.analysis.figures.sheet import caption

__all__ = ["caption", "figure", "load", "names", "save"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, because importing pandas and torch takes seconds."""
    if name == "caption":
        from megatron.analysis.figures.sheet import caption

        return caption
    if name in __all__:
        from megatron.analysis.figures import public

        return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
