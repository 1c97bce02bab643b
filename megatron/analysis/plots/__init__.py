"""One file a figure: tidy data in, Axes out. No loading, no statistics, no saving."""

from megatron.analysis.plots.magnitude_histogram import plot_magnitude_histogram
from megatron.analysis.plots.shares import plot_shares
from megatron.analysis.plots.value_histogram import plot_value_histogram

__all__ = ["plot_magnitude_histogram", "plot_shares", "plot_value_histogram"]
