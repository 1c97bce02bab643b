"""Figures from the statistics of a dump: one module per folder below the output folder.

The other modules hold what these share: `figure_data` (tables and sums), `sheet` (the figure around
the axes), `exponent_histograms`, `sums`, `deviations` and `scale_maps`.
"""
