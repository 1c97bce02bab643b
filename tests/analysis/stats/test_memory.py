"""Memory does not grow with a tensor."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from megatron.analysis.stats import pieces, tensor
from megatron.analysis.stats.layout import layout_of
from megatron.analysis.stats.plan import make_plan


def peak(x: torch.Tensor, names: list[str]) -> int:
    """Bytes that numpy takes at most while `x` is measured."""
    layout = layout_of(tuple(x.shape), layer_type="linear", tensor_name="input")
    tensor.measure(x, layout, make_plan(names))  # compiles
    tracemalloc.start()
    try:
        tensor.measure(x, layout, make_plan(names))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_are_not_kept_until_the_end(monkeypatch, dtype):
    monkeypatch.setattr(pieces, "PIECE", 1 << 14)
    x = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    names = ["mxfp8", "nvfp4"]
    growth = peak(x.repeat(4, 1), names) - peak(x, names)
    assert growth < 3072 * 16 + 50_000  # what is known of each token, in bits and in float64
