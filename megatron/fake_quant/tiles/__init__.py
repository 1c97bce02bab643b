"""Compute attention in tiles, as flash-attention kernels do.

`tiling.py` describes the tiles as data, and `attention.py` is the entry point. `forward.py` and
`backward.py` compute the two passes with the operands and products of `matmul.py`. `checks.py`
refuses formats whose blocks a tile would cut.
"""
