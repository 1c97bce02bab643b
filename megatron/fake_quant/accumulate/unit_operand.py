"""Define an operand as a matrix unit reads it: elements, and the scales that the unit applies."""

import math
from typing import NamedTuple

from torch import Tensor

from megatron.fake_quant.accumulate.accumulator import ZERO_EXPONENT


class UnitOperand(NamedTuple):
    """Matrix of elements with their block scales; the last axis is the reduction axis.

    A scale that applies to the sum, such as that of a whole tensor or row, is not included.
    """

    elements: Tensor  #: float32 `[..., R, K]`, on the grid of the element type
    #: exponent of the element type's smallest normal number; see `element_types.py`
    smallest_exponent: int = ZERO_EXPONENT
    #: float32 `[..., R, ceil(K / scale_block)]`; None if the unit has none, or if all scales are 1
    #: in both operands of a product
    scales: Tensor | None = None

    def flat(self) -> "UnitOperand":
        """Return this operand with its leading dimensions joined into one."""
        batches = math.prod(self.elements.shape[:-2])
        scales = self.scales
        return self._replace(
            elements=self.elements.reshape(batches, *self.elements.shape[-2:]),
            scales=None if scales is None else scales.reshape(batches, *scales.shape[-2:]),
        )

    def batch(self, index: int) -> "UnitOperand":
        """Return the matrix at one position of the first dimension."""
        scales = None if self.scales is None else self.scales[index]
        return self._replace(elements=self.elements[index], scales=scales)
