"""One file a figure: tidy data in, Axes out. No loading, no statistics, no saving."""

from megatron.analysis.plots.attention_map import plot_attention_map
from megatron.analysis.plots.block_map import plot_block_map
from megatron.analysis.plots.boxes import plot_boxes
from megatron.analysis.plots.code_usage import plot_code_usage
from megatron.analysis.plots.counts import plot_counts
from megatron.analysis.plots.density import plot_density
from megatron.analysis.plots.dots import plot_dots
from megatron.analysis.plots.error_by_magnitude import plot_error_by_magnitude
from megatron.analysis.plots.exponent_histogram import plot_exponent_histogram
from megatron.analysis.plots.heatmap import plot_heatmap
from megatron.analysis.plots.lines import plot_lines
from megatron.analysis.plots.magnitude_histogram import plot_magnitude_histogram
from megatron.analysis.plots.quantiles import plot_quantiles
from megatron.analysis.plots.scales import plot_scales
from megatron.analysis.plots.shares import plot_shares
from megatron.analysis.plots.stacked_shares import plot_stacked_shares
from megatron.analysis.plots.value_histogram import plot_value_histogram

__all__ = [
    "plot_attention_map",
    "plot_block_map",
    "plot_boxes",
    "plot_code_usage",
    "plot_counts",
    "plot_density",
    "plot_dots",
    "plot_error_by_magnitude",
    "plot_exponent_histogram",
    "plot_heatmap",
    "plot_lines",
    "plot_magnitude_histogram",
    "plot_quantiles",
    "plot_scales",
    "plot_shares",
    "plot_stacked_shares",
    "plot_value_histogram",
]
