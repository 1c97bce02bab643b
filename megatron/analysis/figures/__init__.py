"""Figures drawn from the statistics of a dump, with one module per output folder.

The other modules hold shared code: `figure_data` (tables and sums), `sheet` (layout, title and
legend of a figure), `exponent_histograms`, `sums`, `deviations` and `scale_maps`.
"""
