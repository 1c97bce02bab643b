"""Formats, matmuls and tensors for tests of torch.compile and of transforms."""

import math

import pytest
import torch
from torch import Tensor

from megatron.fake_quant import Hadamard, fake_quantize, get_format
from megatron.fake_quant.matmul.gemm_formats import GemmFormats
from megatron.fake_quant.matmul.operand import Operand

from .kernel_inputs import SEED

#: One format per kernel, scaling and rounding mode.
KINDS = [
    "mxfp8",
    "nvfp4:2d",
    "hifp8:hr",
    "hifp4",
    "fp8_e4m3",
    "bf16",
    "mxfp4:sr",
    "hifp8:sr:t15",
    "nvfp4:eden",
]
kinds = pytest.mark.parametrize("name", KINDS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
HADAMARD, RANDOM = Hadamard(16, "nvfp4"), Hadamard(16, "random")
GEMMS = {
    "mxfp8": GemmFormats.uniform(get_format("mxfp8")),
    "nvfp4 rotated": GemmFormats(*[Operand(get_format("nvfp4"), HADAMARD)] * 6),
    "stochastic": GemmFormats.uniform(get_format("mxfp4:sr")),
    "straight-through": GemmFormats(
        Operand(get_format("mxfp8"), HADAMARD),
        Operand(get_format("hifp8"), HADAMARD),
        straight_through=True,
    ),
    "requantized": GemmFormats(
        Operand(get_format("mxfp4:sr"), HADAMARD),
        Operand(get_format("mxfp8"), HADAMARD),
        dgrad_c=Operand(get_format("mxfp4")),
        dgrad_b=Operand(get_format("nvfp4"), source="dequantized"),
        wgrad_c=Operand(None, HADAMARD),
        wgrad_a=Operand(get_format("mxfp4:sr"), HADAMARD, source="dequantized"),
    ),
    "random signs": GemmFormats(
        Operand(get_format("mxfp8"), RANDOM),
        Operand(get_format("nvfp4"), RANDOM),
        dgrad_b=Operand(None, source="dequantized"),
        wgrad_c=Operand(get_format("mxfp4:sr"), RANDOM),
        wgrad_a=Operand(get_format("mxfp8"), RANDOM),
    ),
    "random signs, straight-through": GemmFormats(
        Operand(get_format("mxfp8"), RANDOM), Operand(None, RANDOM), straight_through=True
    ),
    "mean split": GemmFormats(
        Operand(get_format("mxfp4"), HADAMARD, split="mean"),
        Operand(get_format("mxfp8"), HADAMARD, split="mean"),
        dgrad_c=Operand(get_format("mxfp4:sr"), split="mean"),
        wgrad_c=Operand(get_format("mxfp4"), RANDOM, split="mean"),
        wgrad_a=Operand(get_format("mxfp4"), RANDOM, "dequantized", "mean"),
    ),
    "one operand": GemmFormats(fprop_b=Operand(get_format("mxfp8")), straight_through=True),
}


def tensor(*shape: int, seed: int = 0) -> Tensor:
    """Return random values with a run of negative zeros where there is room."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if x.numel() > 200:
        x.view(-1)[20:90] = -0.0
    return x


def special(x: Tensor) -> Tensor:
    """Return `x` with a NaN and an Inf."""
    x = x.clone()
    x.view(-1)[7], x.view(-1)[150] = math.nan, -math.inf
    return x


def seed_of(name: str) -> int | None:
    return SEED if get_format(name).stochastic else None


def quantizer(name: str, axis: int = -1):
    """Return a function of a tensor alone."""
    return lambda x: fake_quantize(x, name, axis, seed=seed_of(name))
