"""Call other packages' implementations of number formats, for benchmarks/conformance.py.

The finders have the interface that `peers.py` describes. This file adds packages that
benchmarks/formats.py does not time: a reference in plain Python (gfloat), Transformer Engine's
kernels, which need a GPU, and packages whose source is in a given folder. It only calls the
packages and contains none of their code.
"""

import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import peers
from megatron.fake_quant import Format

#: Modules of fouroversix that are imported without the package's own `__init__`, because `__init__`
#: imports Triton kernels and model classes.
FOUROVERSIX_PACKAGES = (
    "fouroversix",
    "fouroversix.kernels",
    "fouroversix.quantize",
    "fouroversix.quantize.pytorch",
)
#: Modules of Transformer Engine that are imported without their own `__init__`. The last two are
#: replaced, because they need Transformer Engine's compiled library; the reference implementation
#: of NVFP4 takes only base classes and annotations from these two.
TRANSFORMER_ENGINE_PACKAGES = (
    "transformer_engine",
    "transformer_engine.pytorch",
    "transformer_engine.pytorch.custom_recipes",
    "transformer_engine.pytorch.custom_recipes.gemm",
    "transformer_engine.pytorch.quantized_tensor",
)


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
    """Return a function that maps a format (bf16 included) to the cast of ml_dtypes."""
    import ml_dtypes

    def cast(x: Tensor) -> Tensor:
        values = x.float().numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
        return torch.from_numpy(values).to(x.dtype)

    find = peers.ml_dtypes()
    return lambda fmt: cast if fmt.name == "bf16" else find(fmt)


def from_source(
    load: Callable[[], peers.Finder], root: Path, names: tuple[str, ...]
) -> peers.Finder:
    """Import a package from its source in the folder `root`, and return its `Finder`.

    Args:
        load: function that imports the package; it returns a function that maps a format to a cast.
        root: folder that contains the package.
        names: modules that are imported as empty ones, without running their own `__init__`.

    Raises:
        ImportError: if the folder does not contain the package.
    """
    package = names[0].partition(".")[0]
    if not (root / package).is_dir():
        raise ImportError(f"no package {package} in the given source")
    for name in names:
        module = types.ModuleType(name)
        module.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = module
    sys.path.append(str(root))
    return load()


def fouroversix(source: Path) -> peers.Finder:
    """Return a function that maps a format to fouroversix's PyTorch reference in `source`."""
    root = source / "src" if (source / "src").is_dir() else source
    return from_source(peers.fouroversix, root, FOUROVERSIX_PACKAGES)


class _Quantizer:
    """Base class that Transformer Engine's reference expects."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


def transformer_engine_reference(source: Path) -> peers.Finder:
    """Return a function that maps a format to a torch reference in Transformer Engine's source.

    The references are that of NVFP4 in its custom recipes, and that of FP8 with float32 scales in
    its tests.
    """

    def load() -> peers.Finder:
        sys.path.append(str(source / "tests" / "pytorch"))
        calls = _nvfp4_references() | _fp8_references()
        return lambda fmt: calls.get(fmt.name)

    return from_source(load, source, TRANSFORMER_ENGINE_PACKAGES)


def _nvfp4_references() -> dict[str, peers.Call]:
    """Return Transformer Engine's reference implementation of each NVFP4 format, by format name."""
    base = sys.modules["transformer_engine.pytorch.quantized_tensor"]
    base.Quantizer, base.QuantizedTensorStorage = _Quantizer, object
    gemm = sys.modules["transformer_engine.pytorch.custom_recipes.gemm"]
    gemm.MMParams, gemm.GEMMType = object, types.SimpleNamespace(FPROP=None)
    from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

    square = {"quant_tile_shape": (16, 16)}
    search = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256}
    options_by_name: dict[str, dict[str, Any]] = {
        "nvfp4": {},
        "nvfp4:2d": square,
        "nvfp4:outer-row": {"row_scaled_nvfp4": True},
        "nvfp4:4over6-mae": search,
        "nvfp4:4over6-mse": search | {"nvfp4_4over6_err_mode": "MSE"},
        "nvfp4:2d:4over6-mae": search | square,
    }

    def call(x: Tensor, options: dict[str, Any]) -> Tensor:
        element = reference_utils.Fp4Formats.E2M1
        quantizer = reference_nvfp4.NVFP4QuantizerRef(element, columnwise=False, **options)
        codes, scales, _, _, amax, _ = quantizer._quantize(x)
        encode = torch.full_like(amax, 6 * quantizer.nvfp4_e4m3_max) / amax
        decode = encode.clamp(max=torch.finfo(torch.float32).max).reciprocal()
        factors = scales.float().repeat_interleave(16, -1)[: len(x), : x.shape[1]]
        values = reference_nvfp4.cast_from_fp4x2(codes, torch.float32)
        return (values * factors * decode.view(-1, 1)).to(x.dtype)

    return {name: functools.partial(call, options=o) for name, o in options_by_name.items()}


def _fp8_references() -> dict[str, peers.Call]:
    """Return Transformer Engine's reference implementation of each FP8 format, by format name."""
    from references.blockwise_quantizer_reference import BlockwiseQuantizerReference
    from references.quantize_scale_calc import scale_from_amax_tensor

    def blockwise(x: Tensor, shape: tuple[int, int], powers: bool) -> Tensor:
        result = BlockwiseQuantizerReference().quantize(
            x,
            torch.float8_e4m3fn,
            quant_tile_shape=shape,
            pow_2_scales=powers,
            munge_scale_shapes=False,
        )
        factors = result.scale.repeat_interleave(shape[0], 0).repeat_interleave(128, 1)
        return (result.data.float() * factors[: len(x), : x.shape[1]]).to(x.dtype)

    def tensorwise(x: Tensor, dtype: torch.dtype) -> Tensor:
        amax = x.float().abs().amax().view(1)
        options = {"quant_dtype": dtype, "eps": 0.0, "pow_2_scales": False}
        scale, inverse, _ = scale_from_amax_tensor(torch.float32, amax, **options)
        return ((x.float() * scale).to(dtype).float() * inverse).to(x.dtype)

    calls: dict[str, peers.Call] = {
        "fp8_e4m3": functools.partial(tensorwise, dtype=torch.float8_e4m3fn),
        "fp8_e5m2": functools.partial(tensorwise, dtype=torch.float8_e5m2),
    }
    for suffix, shape in (("", (1, 128)), (":2d", (128, 128))):
        calls[f"fp8_block{suffix}"] = functools.partial(blockwise, shape=shape, powers=False)
        calls[f"fp8_block:ue8m0{suffix}"] = functools.partial(blockwise, shape=shape, powers=True)
    return calls


def transformer_engine() -> peers.Finder:
    """Return a function that maps a format to Transformer Engine's cast, which needs a GPU."""
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


#: Peers by name: the function that loads the peer, and the distribution that contains it.
PEERS: dict[str, tuple[Callable[[], peers.Finder], str]] = {
    **{name: loader for name, loader in peers.PEERS.items() if name != "torchao compiled"},
    "ml_dtypes": (ml_dtypes, "ml_dtypes"),
    "gfloat": (gfloat, "gfloat"),
    "Transformer Engine": (transformer_engine, "transformer-engine"),
}
#: Functions that load a peer from the source in a given folder, by the name of the peer.
SOURCES: dict[str, Callable[[Path], peers.Finder]] = {
    "fouroversix": fouroversix,
    "Transformer Engine": transformer_engine_reference,
}
