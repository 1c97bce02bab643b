"""Multiply bfloat16 and float16 tensors fast on CPUs on which torch does not.

torch leaves these products to oneDNN, which multiplies bfloat16 only on CPUs with AVX-512 or newer
instructions, and float16 on fewer ones. On all other CPUs, such as those of most laptops, torch
uses scalar code. On an AMD EPYC 7003, it takes 60 to 250 times as long in bfloat16 as in float32
(torch 2.13; pytorch issue 146508 reports the same).

The functions of this module take the arguments of torch's functions of the same names. For such
tensors, they convert the operands to float32, multiply, and round the product to their dtype. This
is what torch's scalar code does in another order of the sums: it also adds in float32 and rounds
once. For all other tensors, they call torch. They are differentiable.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.jit._builtins import _register_builtin

#: Functions of oneDNN that return whether it multiplies a dtype on this CPU.
_CHECKS = {
    torch.bfloat16: "_is_mkldnn_bf16_supported",
    torch.float16: "_is_mkldnn_fp16_supported",
}
_ALWAYS_FAST = (torch.float32, torch.float64)
_CAST = (torch.float32, *_CHECKS)  #: dtypes that autocast converts


def _slow_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes that torch multiplies with scalar code on this CPU."""
    checks = {dtype: getattr(torch.ops.mkldnn, name, None) for dtype, name in _CHECKS.items()}
    return frozenset(dtype for dtype, check in checks.items() if check is None or not check())


SLOW_DTYPES = _slow_dtypes()  #: dtypes that this module multiplies in float32


def _through_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a matmul function of torch that multiplies slow dtypes in float32."""

    @functools.wraps(function)
    def multiplied(*args: Any, **kwargs: Any) -> Tensor:
        if getattr(args[0] if args else None, "dtype", None) in _ALWAYS_FAST and not _autocast():
            return function(*args, **kwargs)  # the usual case takes no more time than this check
        dtype = _dtype_of_product((*args, *kwargs.values()))
        if dtype not in SLOW_DTYPES or "out" in kwargs or "out_dtype" in kwargs:
            return function(*args, **kwargs)

        def wide(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return (value if value.dtype == dtype else value.to(dtype)).float()

        with _no_autocast():
            product = function(*map(wide, args), **{name: wide(x) for name, x in kwargs.items()})
        return product.to(dtype)

    return multiplied


def _dtype_of_product(values: tuple[Any, ...]) -> torch.dtype | None:
    """Return the dtype in which torch multiplies the tensors among `values`.

    Return None if it refuses to multiply them, or if one of them is not on the CPU.
    """
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    if _autocast() and all(tensor.dtype in _CAST for tensor in tensors):
        return torch.get_autocast_dtype("cpu")
    dtype = tensors[0].dtype
    return dtype if all(tensor.dtype == dtype for tensor in tensors) else None


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu")


def _no_autocast() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the CPU's autocast is off."""
    if _autocast():
        return torch.autocast("cpu", enabled=False)
    return contextlib.nullcontext()


matmul = _through_float32(torch.matmul)
mm = _through_float32(torch.mm)
bmm = _through_float32(torch.bmm)
addmm = _through_float32(torch.addmm)
baddbmm = _through_float32(torch.baddbmm)
linear = _through_float32(torch.nn.functional.linear)


def replacements() -> dict[str, Callable[..., Tensor]]:
    """Return the functions that replace those of torch, by their names without `torch.`.

    There are none on a CPU on which torch is fast.
    """
    if not SLOW_DTYPES:
        return {}
    functions = {"matmul": matmul, "mm": mm, "bmm": bmm, "addmm": addmm, "baddbmm": baddbmm}
    for name, function in functions.items():  # torch.jit.script finds operators by their function
        _register_builtin(function, f"aten::{name}")
    methods = [*functions, "__matmul__"]
    return {
        **functions,
        "nn.functional.linear": linear,
        **{f"Tensor.{name}": _through_float32(getattr(Tensor, name)) for name in methods},
    }
