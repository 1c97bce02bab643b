"""Call other public packages' implementations of the number formats, for comparison with ours.

Each loader imports one package and returns a finder. The finder takes one of our formats. It
returns None if the package does not have the format, and otherwise a function that quantizes a
contiguous matrix along the last axis and dequantizes it to the input's dtype. This file only calls
the packages and contains none of their code. If a package is not installed, its import raises an
error, which the caller reports.

Three of the packages (torch, ml_dtypes and en_dtypes) quantize only single elements. For ml_dtypes,
numpy code in this file computes the block scales.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron.fake_quant import Format

ULPS = 4  #: difference in units in the last place up to which only the last bits differ

Call = Callable[[Tensor], Tensor]
Finder = Callable[[Format], Call | None]


def unlike(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of the values that differ, and of those that differ by more than last bits.

    Zeros of either sign are equal, and so are all NaNs.

    Raises:
        ValueError: if the tensors have different dtypes or shapes.
    """
    if theirs.dtype != ours.dtype or theirs.shape != ours.shape:
        raise ValueError(f"returns {theirs.dtype} of shape {tuple(theirs.shape)}")
    differ = (theirs != ours) & ~(theirs.isnan() & ours.isnan())
    a, b = theirs[differ].double(), ours[differ].double()
    info = torch.finfo(ours.dtype)
    far = differ.clone()
    far[differ] = ~((a - b).abs() <= ULPS * info.eps * b.abs().clamp(min=info.tiny))
    return differ, far


def mx_of(fmt: Format) -> tuple[str, int, str] | None:
    """Return a format's element type, block size and scale rule, or None if it is not OCP MX."""
    scaling, rounding = fmt.scaling, getattr(fmt, "rounding", "nearest")
    if getattr(scaling, "rule", None) is None or rounding != "nearest":
        return None
    if getattr(scaling, "method", "mx") != "mx" or getattr(scaling, "height", 1) > 1:
        return None
    if getattr(scaling, "top", None) is not None or getattr(scaling, "headroom", "1") != "1":
        return None
    return fmt.element.name, scaling.size, scaling.rule


def torchao() -> Finder:
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.mx_formats import mx_tensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    elements = {
        "e4m3": torch.float8_e4m3fn,
        "e5m2": torch.float8_e5m2,
        "e3m2": mx_tensor.DTYPE_FP6_E3M2,
        "e2m3": mx_tensor.DTYPE_FP6_E2M3,
        "e2m1": torch.float4_e2m1fn_x2,
    }

    def nvfp4(x: Tensor) -> Tensor:
        scale = per_tensor_amax_to_scale(x.abs().amax())
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(x.dtype)

    def tensorwise(dtype: torch.dtype) -> Call:
        return lambda x: hp_tensor_to_float8_dynamic(
            x, dtype, LinearMMConfig()
        ).to_original_precision()

    def mx(element: object, size: int, rule: str) -> Call:
        mode = mx_tensor.ScaleCalculationMode[rule.upper()]

        def call(x: Tensor) -> Tensor:
            scale, codes = mx_tensor.to_mx(x, element, size, mode)
            return mx_tensor.to_dtype(codes, scale, element, size, x.dtype)

        return call

    named = {
        "nvfp4": nvfp4,
        "fp8_e4m3": tensorwise(torch.float8_e4m3fn),
        "fp8_e5m2": tensorwise(torch.float8_e5m2),
    }

    def find(fmt: Format) -> Call | None:
        element, size, rule = mx_of(fmt) or (None, 0, "")
        return mx(elements[element], size, rule) if element in elements else named.get(fmt.name)

    return find


def torchao_compiled() -> Finder:
    """Return a function that maps a format to torchao's cast, compiled with torch.compile.

    On CPUs, torch.compile does not support the E8M0 dtype, so formats with the scale rule "floor"
    fail; the other scale rules work.
    """
    eager = torchao()

    def find(fmt: Format) -> Call | None:
        call = eager(fmt)
        torch._dynamo.reset()  # Otherwise, torch silently stops compiling after eight formats.
        return None if call is None else torch.compile(call)

    return find


def quark() -> Finder:
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx

    elements = {
        "e4m3": "fp8_e4m3",
        "e5m2": "fp8_e5m2",
        "e3m2": "fp6_e3m2",
        "e2m3": "fp6_e2m3",
        "e2m1": "fp4",
        "int8": "int8",
    }

    def find(fmt: Format) -> Call | None:
        element, size, rule = mx_of(fmt) or (None, 0, "")
        if element not in elements or rule not in ("floor", "ceil", "even"):
            return None
        name = elements[element]
        return lambda x: fake_quantize_mx(x, -1, size, rule, mx_element_dtype=name)

    return find


def modelopt() -> Finder:
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    def mxfp8(x: Tensor) -> Tensor:
        codes, scale = MXFP8QTensor.quantize(x)
        return codes.dequantize(scale=scale)

    def mxfp4(x: Tensor) -> Tensor:
        codes, scale = MXFP4QTensor.quantize(x, 32)
        return codes.dequantize(scale=scale, block_sizes=[32])

    def nvfp4(x: Tensor) -> Tensor:
        codes, scale, tensor_scale = NVFP4QTensor.quantize(x, 16)
        return codes.dequantize(scale=scale, double_scale=tensor_scale, block_sizes=[16])

    calls = {("e4m3", 32, "rceil"): mxfp8, ("e2m1", 32, "rceil"): mxfp4, "nvfp4": nvfp4}
    return lambda fmt: calls.get(mx_of(fmt) or fmt.name)


def ml_dtypes() -> Finder:
    import ml_dtypes

    elements = {
        "e4m3": ml_dtypes.float8_e4m3fn,
        "e5m2": ml_dtypes.float8_e5m2,
        "e3m2": ml_dtypes.float6_e3m2fn,
        "e2m3": ml_dtypes.float6_e2m3fn,
        "e2m1": ml_dtypes.float4_e2m1fn,
    }

    def find(fmt: Format) -> Call | None:
        element, size, rule = mx_of(fmt) or (None, 0, "")
        if element not in elements or rule != "floor":
            return None
        dtype = elements[element]
        largest = float(ml_dtypes.finfo(dtype).max)
        emax = np.frexp(largest)[1]

        def call(x: Tensor) -> Tensor:
            blocks = x.float().numpy().reshape(x.shape[0], -1, size)
            exponent = np.frexp(np.abs(blocks).max(-1, keepdims=True))[1] - emax
            exponent = np.maximum(exponent, -127)
            scaled = np.ldexp(blocks, -exponent).clip(
                -largest, largest
            )  # The casts of ml_dtypes do not saturate.
            values = np.ldexp(scaled.astype(dtype).astype(np.float32), exponent)
            return torch.from_numpy(values.reshape(x.shape)).to(x.dtype)

        return call

    return find


def en_dtypes() -> Finder:
    from en_dtypes import hifloat8

    def call(x: Tensor) -> Tensor:
        values = x.float().numpy().astype(hifloat8).astype(np.float32)
        return torch.from_numpy(values).to(x.dtype)

    return lambda fmt: call if fmt.name in ("hifp8", "hifp8:inf") else None


def torch_cast() -> Finder:
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}

    def find(fmt: Format) -> Call | None:
        dtype = dtypes.get(fmt.name)
        return dtype and (lambda x: x.to(dtype, copy=True).to(x.dtype))

    return find


#: Other packages (peers) to compare with, by name: the function that loads the peer, and the
#: distribution that contains it.
PEERS: dict[str, tuple[Callable[[], Finder], str]] = {
    "torch": (torch_cast, "torch"),
    "torchao": (torchao, "torchao"),
    "torchao compiled": (torchao_compiled, "torchao"),
    "quark": (quark, "amd-quark"),
    "modelopt": (modelopt, "nvidia-modelopt"),
    "ml_dtypes": (ml_dtypes, "ml_dtypes"),
    "en_dtypes": (en_dtypes, "en_dtypes"),
}
#: Other packages (peers) that are based on numpy and cannot access a GPU's memory.
ONLY_ON_CPU = ("ml_dtypes", "en_dtypes")


def along(call: Call, axis: str) -> Call:
    """Return a function that applies `call` along the "last" or the "first" axis of a matrix.

    For the first axis, the matrix is transposed before and after the call, and the peer's time
    includes both transpositions. quark has an axis argument, but using it takes longer.
    """
    return call if axis == "last" else lambda x: call(x.t().contiguous()).t().contiguous()


TENSORWISE = (
    "torchao divides by the scale where ours multiplies by its reciprocal: last bits differ, and a "
    "value halfway between two codes can be rounded to the other one"
)
OTHER_ORDER = (
    "multiplies the scales in another order: last bits differ, and a value or a block's scale "
    "halfway between two codes can be rounded to the other one"
)
#: Reasons why values of peers (other packages) differ from ours, by peer and format; "mx" means all
#: MX formats.
WHY: dict[tuple[str, str], str] = {
    ("quark", "mx"): (
        "quark takes log2 of a block's maximum in the input's dtype; close to a power of two it "
        "rounds to a whole number, and the scale is one power of two off"
    ),
    ("modelopt", "mx"): (
        "modelopt rounds the E2M1 ties at 0.75, 1.75 and 3.5 toward zero, not to even"
    ),
    ("modelopt", "nvfp4"): f"modelopt {OTHER_ORDER}; a block scale that rounds to 0 becomes 2^-9",
    ("torchao", "nvfp4"): (
        f"torchao {OTHER_ORDER}; block scales below 2^-6 are raised to that, so blocks of small "
        "values lose their range"
    ),
    ("torchao", "fp8_e4m3"): TENSORWISE,
    ("torchao", "fp8_e5m2"): TENSORWISE,
    ("en_dtypes", "hifp8"): "en_dtypes returns Inf from 40960 on, where ours saturates to 32768",
}


def why(peer: str, fmt: Format) -> str:
    """Return why a peer's values differ from ours, or a message that the reason is not known."""
    family = "mx" if mx_of(fmt) else fmt.name
    return WHY.get((peer.removesuffix(" compiled"), family), "the reason is not known")
