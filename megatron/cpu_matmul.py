"""Multiply bfloat16 and float16 matrices fast on CPUs on which torch is slow.

torch leaves these products to oneDNN, which multiplies bfloat16 only on CPUs with AVX-512 or newer
instructions. On other CPUs, such as those of most laptops, torch uses scalar code: on one core of
an AMD EPYC 7003, a product of two square matrices takes 60 to 250 times as long in bfloat16 as in
float32. The factor is 9 to 10 if the second matrix is transposed, and 3.5 if the first one is
(torch 2.13). PyTorch's issue 146508 contains similar reports.

On such CPUs, this module converts the operands to float32, multiplies, and rounds the product to
their dtype. torch's scalar code also adds in float32; the order of the sums differs. There are two
ways to use it:

- `matmul`, `bmm`, `baddbmm` and `addmm` call torch's functions with the same names. Tensors are
  positional arguments, and numbers are keyword arguments. The functions are differentiable, but
  autograd keeps the operands in float32 if torch's kernels are not replaced.
- `replace_kernels` replaces torch's own CPU kernels of the operators in `KERNELS` in the whole
  process. Operators, modules, `einsum` and gradients then multiply this way; products that are
  written to a given tensor (`out=`, `addmm_`) and those in code compiled by inductor do not.
  Autograd, autocast and overridden functions stay as they are. torch.profiler counts each product
  twice, and the operators no longer take named tensors.

On a CPU on which torch is fast in bfloat16, the functions only call torch's, and `replace_kernels`
has no effect.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _slow_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes that torch multiplies with scalar code on this CPU.

    float16 is not among them on a CPU that is fast in bfloat16, although it may be slow there.
    """
    check = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)  # None without oneDNN
    fast = check is not None and check()
    return frozenset() if fast else frozenset({torch.bfloat16, torch.float16})


SLOW_DTYPES = _slow_dtypes()  #: dtypes that this module multiplies in float32
_CAST = (torch.float32, torch.bfloat16, torch.float16)  #: dtypes that autocast converts here
#: Operators with which torch multiplies dense matrices.
KERNELS = ("mm", "bmm", "addmm", "baddbmm")
#: Registrations of the kernels; a kernel is in effect until its registration is deleted.
_libraries: list[torch.library.Library] = []


def _through_float32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a matmul function of torch so that it multiplies slow dtypes in float32."""

    @functools.wraps(function)
    def multiplied(*args: Tensor, **kwargs: Any) -> Tensor:
        if not SLOW_DTYPES or _libraries:
            return function(*args, **kwargs)
        dtype = args[0].dtype
        no_autocast: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if torch.is_autocast_enabled("cpu") and all(x.dtype in _CAST for x in args):
            dtype = torch.get_autocast_dtype("cpu")
            args = tuple(x.to(dtype) for x in args)
            no_autocast = torch.autocast("cpu", enabled=False)
        if not all(_is_slow(x) and x.dtype == dtype for x in args):
            return function(*args, **kwargs)
        with no_autocast:
            return function(*(x.float() for x in args), **kwargs).to(dtype)

    return multiplied


def _is_slow(x: Tensor) -> bool:
    return x.dtype in SLOW_DTYPES and x.device.type == "cpu"


matmul = _through_float32(torch.matmul)
bmm = _through_float32(torch.bmm)
addmm = _through_float32(torch.addmm)
baddbmm = _through_float32(torch.baddbmm)


def replace_kernels() -> None:
    """Let torch multiply slow dtypes in float32 from now on; further calls have no effect."""
    if not SLOW_DTYPES or _libraries:
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        # torch warns that the kernel of an operator is replaced, which is intended here.
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for name in KERNELS:
            kernel = _kernel(getattr(torch.ops.aten, name).out)
            library.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    _libraries.append(library)


def _kernel(out_of: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel that calls `out_of`, torch's own kernel that writes to a given tensor."""

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        # Tensor subclasses and modes have already intercepted this product; do not call them again.
        with torch._C.DisableTorchFunction():
            dtype, out = args[0].dtype, args[0].new_empty(0)
            if not all(x.dtype == dtype in SLOW_DTYPES for x in args if isinstance(x, Tensor)):
                return out_of(*args, **kwargs, out=out)
            wide = [x.float() if isinstance(x, Tensor) else x for x in args]
            return out_of(*wide, **kwargs, out=out.float()).to(dtype)

    return kernel
