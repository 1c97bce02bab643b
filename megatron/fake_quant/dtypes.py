"""The dtypes that can be quantized, and the check of a tensor before it is quantized."""

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(x: Tensor, what: str) -> None:
    """Refuse anything but a dense tensor of a known dtype; `what` is the verb of the message.

    Raises:
        ValueError: if the type, layout or dtype is wrong; the message names the accepted ones.
    """
    if not isinstance(x, Tensor):
        raise ValueError(
            f"cannot {what} a {type(x).__name__}; give a torch.Tensor (torch.fx.symbolic_trace "
            "passes proxies: use torch.export or make_fx, which pass tensors)"
        )
    # Dynamo cannot trace x.layout in a backward pass; there the operators' fake rules check it.
    if x.is_nested or (not torch.compiler.is_compiling() and x.layout is not torch.strided):
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ValueError(
            f"cannot {what} a {kind} tensor; give a dense one, such as x.to_dense(), or the parts "
            "of a nested one, x.unbind()"
        )
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"cannot {what} a tensor of {x.dtype}; give one of {names}, for instance by x.float()"
        )
