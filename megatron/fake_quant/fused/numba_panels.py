"""CPU kernel that converts an operand for the kernels that sum dot products.

A vector register holds the sums of several columns of the result. The rows of B that belong to
LANES columns form a panel: two arrays `[k, lane]`, one with values and one with exponents. A tile
of ROWS rows of A is converted in the same way. Each step is padded with zeros to a multiple of
UNROLLED products. A padded product has the exponent of two zeros. That is below the exponent of
every running sum, so it does not change the result.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.fake_quant.fused.numba_compile import called, kernel_compiler
from megatron.fake_quant.fused.numba_float64 import INFINITE_ELEMENT, exponent

LANES = 64  #: columns of the result per panel
ROWS = 16  #: rows of the result per tile
UNROLLED = 4  #: number of products of a dot product that are added at a time


class Packing(NamedTuple):
    """Constants with which elements and scales are converted and placed in a panel."""

    step: int  #: products per step
    parts: int  #: parts into which the products of a step are divided
    padded_step: int  #: products per step, including padding
    padded_part: int  #: products per part, including padding
    smallest: int  #: exponent of the smallest normal number of the element type
    block: int  #: elements per scale that the unit itself applies; 0 if there are none
    smallest_scale: int  #: exponent of the smallest normal scale
    scale_alone: bool  #: True to take a product's exponent from the scales alone
    zero: int  #: exponent of a zero element


class Panel(NamedTuple):
    """Rows of an operand in the form that kernels read; both arrays have the shape `[k, row]`."""

    values: Any  #: float64: elements times their scales
    exponents: Any  #: int16: exponents of these products, or of the scales alone


def _sources() -> list[Path]:
    """Return the source files from which the kernels that sum dot products are compiled."""
    here = Path(__file__).parent
    names = ("accumulate", "compile", "float64", "panels")
    accumulator = here.parent / "accumulate" / "accumulator.py"
    return [*(here / f"numba_{name}.py" for name in names), accumulator]


kernel = kernel_compiler("accumulate", Path(__file__).parent, _sources)


@called
def fill(panel: Any, rows: Any, scales: Any, packing: Any) -> None:
    """Convert rows of an operand to columns of a panel, and fill the other columns with zeros."""
    panel.values[:] = 0
    panel.exponents[:] = packing.zero
    factors, shifts = np.ones(len(rows)), np.zeros(len(rows), np.int16)
    for k in range(rows.shape[1]):
        if packing.block > 0 and k % packing.block == 0:
            for r in range(len(rows)):
                scale = np.float64(scales[r, k // packing.block])
                factors[r] = scale
                shifts[r] = min(exponent(scale, packing.smallest_scale), INFINITE_ELEMENT)
        step = k // packing.step
        inside = k - step * packing.step
        place = inside // packing.parts + inside % packing.parts * packing.padded_part
        place += step * packing.padded_step
        values, exponents = panel.values[place], panel.exponents[place]
        for r in range(len(rows)):
            x = np.float64(rows[r, k])
            values[r] = x * factors[r]
            own = min(exponent(x, packing.smallest), INFINITE_ELEMENT) if x != 0 else packing.zero
            exponents[r] = shifts[r] if packing.scale_alone else np.int16(own + shifts[r])


@kernel
def pack(elements: Any, scales: Any, packing: Any, panels: Any, start: Any, stop: Any) -> None:
    """Convert the operand `elements` `[batch, N, K]` to the panels `start` to `stop - 1`."""
    per_matrix = -(-elements.shape[1] // LANES)
    for item in range(start, stop):
        batch = item // per_matrix
        first = (item - batch * per_matrix) * LANES
        rows, row_scales = elements[batch, first : first + LANES], scales[batch, first:]
        fill(Panel(panels.values[item], panels.exponents[item]), rows, row_scales, packing)
