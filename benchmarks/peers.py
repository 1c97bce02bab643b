"""Call other public packages' implementations of the number formats, for comparison with ours.

Each loader imports one package and returns a finder. The finder takes one of our formats. It
returns None if the package does not have the format, and otherwise a function that quantizes a
contiguous matrix along the last axis and dequantizes it to the input's dtype. This file only calls
the packages and contains none of their code. If a package is not installed, its import raises an
error, which the caller reports.

Three of the packages (torch, ml_dtypes and en_dtypes) quantize only single elements. For ml_dtypes,
numpy code in this file computes the block scales.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from megatron.fake_quant import Format

ULPS = 4  #: maximum difference in the last bits, in units in the last place

Call = Callable[[Tensor], Tensor]
Finder = Callable[[Format], Call | None]


def unlike(theirs: Tensor, ours: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks of where two tensors differ, and of where they differ beyond the last bits.

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
    """Return a format's element type, block size and scale rule; None if it is no OCP MX format."""
    scaling, rounding = fmt.scaling, getattr(fmt, "rounding", "nearest")
    if getattr(scaling, "rule", None) is None or rounding != "nearest":
        return None
    if getattr(scaling, "method", "mx") != "mx" or getattr(scaling, "height", 1) > 1:
        return None
    if getattr(scaling, "top", None) is not None or getattr(scaling, "headroom", "1") != "1":
        return None
    return fmt.element.name, scaling.size, scaling.rule


def torchao() -> Finder:
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.prototype.blockwise_fp8_training import kernels
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

    def rowwise(x: Tensor) -> Tensor:
        return (
            hp_tensor_to_float8_dynamic(
                x,
                torch.float8_e4m3fn,
                LinearMMConfig(),
                scaling_granularity=ScalingGranularity.AXISWISE,
                axiswise_dim=-1,
            )
            .to_original_precision()
            .to(x.dtype)
        )

    def blockwise(x: Tensor) -> Tensor:
        codes, scales = kernels.torch_blockwise_scale_act_quant_lhs(x)
        return (codes.float() * scales.repeat_interleave(128, -1)).to(x.dtype)

    def squares(x: Tensor) -> Tensor:
        codes, scales = kernels.torch_blockwise_scale_weight_quant(x)
        factors = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (codes.float() * factors).to(x.dtype)

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
        "fp8_rowwise": rowwise,
        "fp8_block": blockwise,
        "fp8_block:2d": squares,
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
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import (
        fake_quantize_mx,
        fake_quantize_mx6_mx9,
    )
    from quark.torch.quantization.config.config import AmdFP4Spec
    from quark.torch.quantization.tensor_quantize import FakeQuantizeBase

    elements = {
        "e4m3": "fp8_e4m3",
        "e5m2": "fp8_e5m2",
        "e3m2": "fp6_e3m2",
        "e2m3": "fp6_e2m3",
        "e2m1": "fp4",
        "int8": "int8",
    }

    def amdfp4(x: Tensor) -> Tensor:
        spec = AmdFP4Spec(ch_axis=-1, group_size=16).to_quantization_spec()
        return FakeQuantizeBase.get_fake_quantize(spec)(x)

    def shared_exponents(bits: int) -> Call:
        return lambda x: fake_quantize_mx6_mx9(x, -1, 16, quant_bit=bits, sub_block_size=2)

    named = {"amdfp4": amdfp4, "mx6": shared_exponents(5), "mx9": shared_exponents(8)}

    def find(fmt: Format) -> Call | None:
        element, size, rule = mx_of(fmt) or (None, 0, "")
        if element not in elements or rule not in ("floor", "ceil", "even"):
            return named.get(fmt.name)
        name = elements[element]
        return lambda x: fake_quantize_mx(x, -1, size, rule, mx_element_dtype=name)

    return find


def modelopt() -> Finder:
    from modelopt.torch.quantization.qtensor import (
        FP8QTensor,
        MXFP4QTensor,
        MXFP8QTensor,
        NVFP4QTensor,
    )

    def mxfp8(x: Tensor) -> Tensor:
        codes, scale = MXFP8QTensor.quantize(x)
        return codes.dequantize(scale=scale)

    def mxfp4(x: Tensor) -> Tensor:
        codes, scale = MXFP4QTensor.quantize(x, 32)
        return codes.dequantize(scale=scale, block_sizes=[32])

    def nvfp4(x: Tensor) -> Tensor:
        codes, scale, tensor_scale = NVFP4QTensor.quantize(x, 16)
        return codes.dequantize(scale=scale, double_scale=tensor_scale, block_sizes=[16])

    def fp8(axis: int | None = None, sizes: dict[int, int] | None = None) -> Call:
        def call(x: Tensor) -> Tensor:
            codes, scale = FP8QTensor.quantize(x, axis=axis, block_sizes=sizes)
            return codes.dequantize(scale=scale, block_sizes=sizes)

        return call

    calls = {
        ("e4m3", 32, "rceil"): mxfp8,
        ("e2m1", 32, "rceil"): mxfp4,
        "nvfp4": nvfp4,
        "fp8_e4m3": fp8(),
        "fp8_rowwise": fp8(axis=0),
        "fp8_block": fp8(sizes={-1: 128}),
        "fp8_block:2d": fp8(sizes={-1: 128, -2: 128}),
    }
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


def bitsandbytes() -> Finder:
    from bitsandbytes import functional

    def call(x: Tensor) -> Tensor:
        codes, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4")
        return functional.dequantize_4bit(codes, state)

    return lambda fmt: call if fmt.name == "nf4" else None


def fouroversix() -> Finder:
    """Return a function that maps a format to fouroversix's PyTorch reference implementation.

    fouroversix is either installed by pip or imported from its source. The function of the
    reference is called `quantize_to_fp4` up to release 1.0 and `quantize` in newer sources, which
    also have 6-bit elements.
    """
    from fouroversix.quantize import dequantize_utils
    from fouroversix.quantize.pytorch import reference
    from fouroversix.utils import DataType, ScaleRule

    known = {
        "mx:e2m1:b32:rceil": ("mxfp4", "static_6"),
        "nvfp4": ("nvfp4", "static_6"),
        "nvfp4:2d": ("nvfp4", "static_6"),
        "nvfp4:4over6-mae": ("nvfp4", "mae"),
        "nvfp4:4over6-mse": ("nvfp4", "mse"),
        "nvfp4:2d:4over6-mae": ("nvfp4", "mae"),
        "nvint4": ("nvint4", "static_6"),
        "if4": ("if4", "mse"),
        "if4_mae": ("if4", "mae"),
    }
    newer = hasattr(reference, "quantize")
    function = reference.quantize if newer else reference.quantize_to_fp4
    if newer:
        from fouroversix.quantize.pytorch import fp6

        known |= {
            "nv:e2m3:b16:e4m3": ("nvfp6_e2m3", "static_6"),
            "nv:e3m2:b16:e4m3": ("nvfp6_e3m2", "static_6"),
        }

    def elements(kind: DataType, codes: Tensor, scales: Tensor) -> Tensor:
        if kind.value in ("nvfp6_e2m3", "nvfp6_e3m2"):
            decode = getattr(fp6, f"convert_{kind.value[-4:]}_to_high_precision")
            return decode(codes).float()
        if kind.value == "nvint4":
            return dequantize_utils.unpack_packed_int4(codes, torch.float32)
        if kind.value == "if4":
            scales = scales.reshape(len(codes), -1)
            return dequantize_utils.unpack_packed_if4(codes, scales, torch.float32)
        return dequantize_utils.unpack_packed_fp4(codes).float()

    def call(x: Tensor, name: str) -> Tensor:
        kind, rule = DataType(known[name][0]), ScaleRule(known[name][1])
        codes, scales, amax = function(
            x,
            fp4_format=kind,
            scale_rule=rule,
            block_scale_2d=":2d" in name,
            use_blackwell_scale_layout=False,
        )
        values = elements(kind, codes, scales)
        if kind.scale_type.value == "nv_if":  # The sign bit is not part of the scale.
            scales = (scales.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn)
        factors = scales.float().reshape(len(x), -1).repeat_interleave(kind.block_size, -1)
        values = values.reshape(x.shape) * factors
        if kind.scale_type.value != "mx":
            largest = kind.quantized_value_type.get_maximum_value(rule)
            target = largest * kind.scale_type.get_maximum_value(rule)
            encode = torch.full_like(amax, target) / amax
            values = values * torch.where(amax == 0, amax, encode.reciprocal())
        return values.to(x.dtype)

    return lambda fmt: functools.partial(call, name=fmt.name) if fmt.name in known else None


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
    "bitsandbytes": (bitsandbytes, "bitsandbytes"),
    "fouroversix": (fouroversix, "fouroversix"),
}
#: Other packages (peers) that are based on numpy and cannot access a GPU's memory.
ONLY_ON_CPU = ("ml_dtypes", "en_dtypes")


def along(call: Call, axis: str) -> Call:
    """Return a function that applies `call` along the "last" or the "first" axis of a matrix.

    For the first axis, the matrix is transposed before and after the call, and the peer's time
    includes both transpositions. quark has an axis argument, but using it takes longer.
    """
    return call if axis == "last" else lambda x: call(x.t().contiguous()).t().contiguous()
