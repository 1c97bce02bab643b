"""Call other packages' number formats for benchmarks/conformance.py.

The finders have the interface that `peers.py` describes. This file adds packages that
benchmarks/formats.py does not time: a reference in plain Python (gfloat), one without a release
(fouroversix), and one that needs a GPU (Transformer Engine). For torchao, it adds formats that
train with float32 block scales. It only calls the packages and contains none of their code.
"""

import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import peers
from megatron.fake_quant import Format

#: Modules of fouroversix that are imported without the package's own `__init__`, because that one
#: imports Triton kernels and model classes.
FOUROVERSIX_PACKAGES = (
    "fouroversix",
    "fouroversix.kernels",
    "fouroversix.quantize",
    "fouroversix.quantize.pytorch",
)


def torchao() -> peers.Finder:
    """Return the finder of `peers.torchao`, with FP8 by rows and by blocks of 128 values."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    def rowwise(x: Tensor) -> Tensor:
        return hp_tensor_to_float8_dynamic(
            x,
            torch.float8_e4m3fn,
            LinearMMConfig(),
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=-1,
        ).to_original_precision()

    def blockwise(x: Tensor) -> Tensor:
        from torchao.prototype.blockwise_fp8_training import kernels

        codes, scales = kernels.torch_blockwise_scale_act_quant_lhs(x)
        return (codes.float() * scales.repeat_interleave(128, -1)).to(x.dtype)

    find = peers.torchao()
    more = {"fp8_rowwise": rowwise, "fp8_block": blockwise}
    return lambda fmt: more.get(fmt.name) or find(fmt)


def gfloat() -> peers.Finder:
    import gfloat
    from gfloat import formats

    infos = {
        "mxfp8": formats.format_info_mxfp8_e4m3,
        "mxfp8_e5m2": formats.format_info_mxfp8_e5m2,
        "mxfp6_e3m2": formats.format_info_mxfp6_e3m2,
        "mxfp6_e2m3": formats.format_info_mxfp6_e2m3,
        "mxfp4": formats.format_info_mxfp4_e2m1,
        "mxint8": formats.format_info_mxint8,
    }

    def call(x: Tensor, info: object) -> Tensor:
        blocks = x.double().numpy().reshape(-1, info.k)
        values = [gfloat.quantize_block(info, b, gfloat.compute_scale_amax) for b in blocks]
        return torch.from_numpy(np.array(values).reshape(x.shape)).to(x.dtype)

    casts = {"bf16": formats.format_info_bfloat16, "fp16": formats.format_info_binary16}

    def cast(x: Tensor, info: object) -> Tensor:
        values = gfloat.round_ndarray(info, x.double().numpy(), gfloat.RoundMode.TiesToEven)
        return torch.from_numpy(values).to(x.dtype)

    def find(fmt: Format) -> peers.Call | None:
        if fmt.name in casts:
            return functools.partial(cast, info=casts[fmt.name])
        return functools.partial(call, info=infos[fmt.name]) if fmt.name in infos else None

    return find


def ml_dtypes() -> peers.Finder:
    """Return the finder of `peers.ml_dtypes`, with its casts to bfloat16."""
    import ml_dtypes

    def cast(x: Tensor) -> Tensor:
        values = x.float().numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
        return torch.from_numpy(values).to(x.dtype)

    find = peers.ml_dtypes()
    return lambda fmt: cast if fmt.name == "bf16" else find(fmt)


def fouroversix(source: Path) -> peers.Finder:
    """Return the finder of fouroversix's PyTorch reference in the folder `source`."""
    root = next(
        (path for path in (source / "src", source) if (path / "fouroversix").is_dir()), None
    )
    if root is None:
        raise ImportError(f"no package fouroversix in {source.name}")
    for name in FOUROVERSIX_PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.path.append(str(root))
    from fouroversix.quantize import dequantize_utils
    from fouroversix.quantize.pytorch import fp6, reference
    from fouroversix.utils import DataType, ScaleRule

    def fp4(codes: Tensor, scales: Tensor) -> Tensor:
        return dequantize_utils.unpack_packed_fp4(codes).float()

    def int4(codes: Tensor, scales: Tensor) -> Tensor:
        return dequantize_utils.unpack_packed_int4(codes, torch.float32)

    def if4(codes: Tensor, scales: Tensor) -> Tensor:
        shape = codes.shape[0], -1
        return dequantize_utils.unpack_packed_if4(codes, scales.reshape(shape), torch.float32)

    static = ScaleRule.static_6
    #: By format: type, scale rule, function that decodes elements, and whether blocks are square.
    known: dict[str, tuple[DataType, ScaleRule, Callable[[Tensor, Tensor], Tensor], bool]] = {
        "mx:e2m1:b32:rceil": (DataType.mxfp4, static, fp4, False),
        "nvfp4": (DataType.nvfp4, static, fp4, False),
        "nvfp4:2d": (DataType.nvfp4, static, fp4, True),
        "nvfp4:4over6-mae": (DataType.nvfp4, ScaleRule.mae, fp4, False),
        "nvfp4:4over6-mse": (DataType.nvfp4, ScaleRule.mse, fp4, False),
        "nvint4": (DataType.nvint4, static, int4, False),
        "if4": (DataType.if4, ScaleRule.mse, if4, False),
        "if4_mae": (DataType.if4, ScaleRule.mae, if4, False),
        "nv:e2m3:b16:e4m3": (
            DataType.nvfp6_e2m3,
            static,
            lambda codes, _: fp6.convert_e2m3_to_high_precision(codes).float(),
            False,
        ),
        "nv:e3m2:b16:e4m3": (
            DataType.nvfp6_e3m2,
            static,
            lambda codes, _: fp6.convert_e3m2_to_high_precision(codes).float(),
            False,
        ),
    }

    def call(x: Tensor, name: str) -> Tensor:
        dtype, rule, elements, square = known[name]
        codes, scales, amax = reference.quantize(
            x,
            fp4_format=dtype,
            scale_rule=rule,
            block_scale_2d=square,
            use_blackwell_scale_layout=False,
        )
        values = elements(codes, scales)
        if dtype.scale_type.value == "nv_if":  # The sign bit is not part of the scale.
            scales = (scales.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn)
        factors = scales.float().reshape(len(x), -1).repeat_interleave(dtype.block_size, -1)
        values = values.reshape(x.shape) * factors
        if dtype.scale_type.value != "mx":
            largest = dtype.quantized_value_type.get_maximum_value(rule)
            target = largest * dtype.scale_type.get_maximum_value(rule)
            encode = torch.full_like(amax, target) / amax
            values = values * torch.where(amax == 0, amax, encode.reciprocal())
        return values.to(x.dtype)

    return lambda fmt: functools.partial(call, name=fmt.name) if fmt.name in known else None


def transformer_engine() -> peers.Finder:
    """Return the finder of Transformer Engine's kernels, which need a GPU."""
    if not torch.cuda.is_available():
        raise ImportError("needs a CUDA device")
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer
    from transformer_engine.pytorch.tensor.nvfp4_tensor import NVFP4Quantizer

    rows = {"rowwise": True, "columnwise": False}
    makers = {
        "mx:e4m3:b32:rceil": lambda: MXFP8Quantizer(DType.kFloat8E4M3, **rows),
        "mx:e5m2:b32:rceil": lambda: MXFP8Quantizer(DType.kFloat8E5M2, **rows),
        "nvfp4": lambda: NVFP4Quantizer(**rows),
        "nvfp4:2d": lambda: NVFP4Quantizer(**rows, with_2d_quantization=True),
        "nvfp4:4over6-mae": lambda: NVFP4Quantizer(
            **rows, nvfp4_use_4over6=True, nvfp4_e4m3_max=256
        ),
        "fp8_block": lambda: Float8BlockQuantizer(
            DType.kFloat8E4M3, **rows, force_pow_2_scales=False, block_scaling_dim=1
        ),
    }

    def find(fmt: Format) -> peers.Call | None:
        if (make := makers.get(fmt.name)) is None:
            return None
        return lambda x: make()(x.cuda()).dequantize(dtype=x.dtype).cpu()

    return find


#: By the name of each peer: the function that loads it, and the distribution that contains it.
PEERS: dict[str, tuple[Callable[[], peers.Finder], str]] = {
    "torch": (peers.torch_cast, "torch"),
    "torchao": (torchao, "torchao"),
    "modelopt": (peers.modelopt, "nvidia-modelopt"),
    "quark": (peers.quark, "amd-quark"),
    "en_dtypes": (peers.en_dtypes, "en_dtypes"),
    "ml_dtypes": (ml_dtypes, "ml_dtypes"),
    "gfloat": (gfloat, "gfloat"),
    "Transformer Engine": (transformer_engine, "transformer-engine"),
}
