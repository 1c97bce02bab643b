"""Give CPU kernels access to the memory of a tensor, as a numpy array."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class _Memory:
    """Wrapper through which numpy reads the memory of a tensor without `Tensor.numpy`.

    `Tensor.numpy` would forbid to resize the tensor's storage from then on. Selective recomputation
    frees the memory of an activation by resizing its storage to zero.
    """

    def __init__(self, flat: Tensor) -> None:
        self.tensor = flat  # keeps the tensor's memory alive as long as the array exists
        self.__array_interface__ = {
            "data": (flat.data_ptr(), False),
            "shape": (flat.numel(),),
            "typestr": f"<i{flat.element_size()}",
            "version": 3,
        }


def bits_in_memory(flat: Tensor) -> NDArray[np.integer[Any]]:
    """Return the bits of the values of a contiguous vector, as integers that share its memory."""
    array: NDArray[np.integer[Any]] = np.asarray(_Memory(flat))
    return array
