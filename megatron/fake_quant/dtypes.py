"""The dtypes of the tensors that are quantized."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_dtype(x: Tensor, what: str) -> None:
    """Refuse a tensor of another dtype; `what` is what cannot be done to it.

    Raises:
        ValueError: names the dtype and those that will do.
    """
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"cannot {what} a tensor of {x.dtype}; give one of {names}, for instance by x.float()"
        )
