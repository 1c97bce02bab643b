#!/usr/bin/env python3
"""Print the signal-to-quantization-noise ratio of number formats, in dB.

    python=$(bash script/setup_env.sh)
    "$python" examples/python/compare_formats.py
    "$python" examples/python/compare_formats.py mxfp8 mx:e3m4:b16:rceil nvfp4:2d

Each format is applied to three tensors: normally distributed values; the same values with one
channel in 32 multiplied by 50, as in activations; and the same values divided by 2^18, as in
gradients. The ratio is computed over the other channels only, because the large ones would dominate
the noise of the whole tensor. Blocks are formed along the last axis.
`python -m megatron.fake_quant list` prints the names of formats.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to import from this repository

from megatron.console import run_main
from megatron.fake_quant import fake_quantize, get_format

FORMATS = ("mxfp8", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4", "hifp8", "fp8_e4m3")
ORDINARY = torch.arange(1024) % 32 != 0  #: mask of the channels that contain no outliers


def sqnr(x: Tensor, quantized: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio of `quantized` in dB, computed in float64."""
    signal, noise = x.double(), quantized.double() - x.double()
    return 10 * torch.log10(signal.square().sum() / noise.square().sum()).item()


def samples() -> dict[str, Tensor]:
    """Return the sample tensors by name, each with 512 rows of 1024 channels."""
    normal = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    outliers = torch.where(ORDINARY, normal, 50 * normal)
    return {"normal": normal, "outliers": outliers, "small": normal / 2**18}


def main(names: list[str]) -> int:
    if {"-h", "--help"} & set(names):
        print(__doc__)
        return 0
    try:
        formats = [get_format(name) for name in names or FORMATS]
    except ValueError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 2
    tensors = samples()
    print(f"{'SQNR in dB':16}", *(f"{name:>9}" for name in tensors))
    for fmt in formats:
        ratios = (
            sqnr(x[:, ORDINARY], fake_quantize(x, fmt)[:, ORDINARY]) for x in tensors.values()
        )
        print(f"{fmt.name:16}", *(f"{ratio:9.2f}" for ratio in ratios))
    return 0


if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
