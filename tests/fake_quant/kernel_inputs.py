"""Formats, tensors and memory layouts on which the kernels are compared with the reference."""

import torch
from torch import Tensor

from .inputs import random_bit_patterns

SEED = (1 << 61) + 12345678901
NAMES = [
    "mxfp8",
    "mxfp8_e5m2",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp4",
    "mxint8",
    "nvfp4",
    "hifp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "mxfp8:rceil",
    "mxfp4:ceil",
    "mxfp4:even",
    "mxint8:rceil",
    "mxfp8:2d",
    "nvfp4:2d",
    "mxfp4:sr",
    "mxint8:sr",
    "mxfp8:2d:sr",
    "nvfp4:sr",
    "nvfp4:2d:sr",
    "fp8_e5m2:sr",
    "hifp4",
    "hifp8:hr",
    "hifp8:hr:inf",
    "hifp8:inf",
    "hifp8:sr",
    "hifp8:sr:inf",
    "hifp8:t15",
    "hifp8:t224:pow2",
    "hifp8:hr:t15",
    "fp8_e4m3:pow2",
    "mx:e6m1:b16:rceil",
    "mx:e7m0:b7:floor",
    "mx:e3m4:b16:even:2d",
    "mx:e1m6:b32:ceil",
    "mx:e2m1:b600:floor",
    "mxint4",
    "mxint6:sr",
    "mx:e4m3:b4x8:rceil",
    "nvint4:2d:sr",
    "nv:e2m1:b4x16:e4m3",
    "nv:e2m1:b16:e6m2",
    "nvfp4:outer-row",
    "nvfp4:outer-1x128:sr",
    "nvfp4:outer-1x64:4over6-mae",
    "nvfp4:2d:outer-none:4over6-mse",
    "amdfp4:outer-1x64",
    "fp8_rowwise:sr",
]
#: further formats with CPU kernels; most of them have GPU kernels, too
CPU_NAMES = [
    "bf16",
    "fp16",
    "mxfp4:rceil:top7.25",
    "mxfp4:head3/4:sr",
    "mx:e4m3:row:rceil",
    "nvint4",
    "nvfp4:outer-none",
    "nvfp4:head16/17:sr",
    "amdfp4",
    "amdfp4:2d:outer-tensor:sr",
    "fp8_block",
    "fp8_block:2d:sr",
    "fp8_rowwise",
    "nv:e4m3:column:fp32:sr",
    "mx:e2m1:tensor:rceil:sr",
    "nvfp4:4over6-mae",
    "nvfp4:outer-none:4over6-mse",
    "nvfp4:4over6-mse:bound448:head16/17:sr",
    "mx9",
    "mx6:sr",
    "nf4",
    "mxfp4_macro_oas:sr",
    "if4_mae:sr",
    "mixfp4",
    "nvfp4:eden",
    "nv:e2m1:b4x16:e4m3:4over6-mse",
    "nv:e2m1:row:e4m3:4over6-mae",
    "nv:e4m3:b8x40:e6m2:outer-none:sr",
]


def every_scale() -> Tensor:
    """Return rows from below the subnormals to overflow, with zero blocks along both axes."""
    generator = torch.Generator().manual_seed(1)
    exponents = torch.randint(-150, 128, (256, 1), generator=generator)
    x = torch.ldexp(torch.randn(256, 300, generator=generator).double(), exponents).float()
    x[3:70] = 0.0
    x[:, 40:80] = -0.0
    return x


def specials() -> Tensor:
    x = torch.randn(256, 300, generator=torch.Generator().manual_seed(2))
    x[5, 7], x[100, 33], x[255, 299] = torch.nan, torch.inf, -torch.inf
    x[200] = -0.0
    return x


def zeros() -> Tensor:
    return torch.zeros(256, 300)


INPUTS = {
    "bit patterns": lambda: random_bit_patterns(256 * 300).view(256, 300),
    "every scale": every_scale,
    "specials": specials,
    "zeros": zeros,
}


def layouts(x: Tensor) -> dict[str, Tensor]:
    """Return views with different strides; 300 columns end in a shorter block of 12."""
    return {
        "contiguous": x,
        "transposed": x.t(),
        "three axes": x.view(4, 64, 300),
        "every second": x[:, ::2],
        "permuted": x.view(4, 64, 300).permute(2, 0, 1),
        "expanded": x[:1].expand(256, 300),
        "a row": x[10:11],
        "a vector": x.reshape(-1)[:70000],
    }


def views(kind: str, x: Tensor) -> dict[str, Tensor]:
    """Return the views of an input of one kind of `INPUTS` that are to be quantized.

    For specials and zeros, three layouts (by rows, columns and planes) are enough.
    """
    chosen = layouts(x)
    if kind in ("specials", "zeros"):
        return {name: chosen[name] for name in ("contiguous", "transposed", "permuted")}
    return chosen


_HALF_NANS = [torch.full((size,), torch.nan).half().view(torch.int16)[0] for size in (1, 64)]
#: In some releases of torch (2.6 is one), the bits of a NaN that is converted to float16 depend on
#: the size of the tensor.
HALF_NANS_DIFFER = bool(_HALF_NANS[0] != _HALF_NANS[1])


def bits(x: Tensor) -> Tensor:
    """Return the bits of a tensor, with the same bits for every NaN if `HALF_NANS_DIFFER`."""
    if x.dtype == torch.float16 and HALF_NANS_DIFFER:
        x = torch.where(x.isnan(), torch.nan, x)
    return x.contiguous().view(torch.int32 if x.dtype == torch.float32 else torch.int16)
