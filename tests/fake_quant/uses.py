"""Checks that a format works wherever formats are used, for formats without kernels."""

import io
from contextlib import redirect_stdout

import numpy as np
import torch

from megatron.analysis.stats import tensor
from megatron.analysis.stats.format_groups import AXES, group_formats
from megatron.analysis.stats.matrix_view import matrix_view_of
from megatron.analysis.stats.result_columns import arrays_of, format_numbers
from megatron.fake_quant import dequantize, fake_quantize, get_format, quantize
from megatron.fake_quant.__main__ import main
from megatron.fake_quant.quantize import checked


def check_every_use(name: str) -> None:
    """Check axes and packing, tracing, statistics and the commands that describe a format."""
    check_axes(name)
    check_tracing(name)
    check_statistics(name)
    check_commands(name)


def check_axes(name: str) -> None:
    """Check that blocks run along any axis, and that codes and scales give the same values."""
    x = torch.randn(5, 19, 37, generator=torch.Generator().manual_seed(1))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for axis in range(-1, 3):
            moved = x.to(dtype).movedim(axis, -1).contiguous()
            alone = fake_quantize(moved, name).movedim(-1, axis)
            assert torch.equal(fake_quantize(x.to(dtype), name, axis), alone)
            packed = quantize(x.to(dtype), name, axis)
            assert torch.equal(dequantize(packed), alone)
            assert packed.codes.dtype == torch.uint8
            assert packed.scales.block().shape[:2] == moved.shape[:2]
    assert torch.equal(dequantize(quantize(x[0, 0], name)), fake_quantize(x[0, 0], name))


def check_tracing(name: str) -> None:
    """Check torch.compile, torch.export and torch.vmap, of both entry points."""
    x = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(2))
    expected = fake_quantize(x, name)

    class Packed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return dequantize(quantize(x, name))

    torch.compiler.reset()  # a function is compiled for a limited number of formats
    compiled = torch.compile(fake_quantize, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, name), expected)
    assert torch.equal(torch.export.export(Packed(), (x,)).module()(x), expected)
    one_by_one = torch.stack([fake_quantize(sample, name) for sample in x])
    assert torch.equal(torch.vmap(Packed())(x), one_by_one)
    meta = quantize(x.to("meta"), name)
    packed = quantize(x, name)
    assert (meta.codes.shape, meta.codes.dtype) == (packed.codes.shape, packed.codes.dtype)
    for part, real in packed.scales.parts().items():
        described = meta.scales.parts()[part]
        assert (described.shape, described.dtype) == (real.shape, real.dtype)


def check_statistics(name: str) -> None:
    """Check the errors that the statistics of a tensor report, along both axes."""
    x = torch.randn(33, 70, generator=torch.Generator().manual_seed(3)).exp().sub_(1)
    x[4, 9], x[11] = torch.nan, 0.0
    matrix = matrix_view_of(tuple(x.shape), layer_type="linear", tensor_name="input")
    values, found = tensor.measure(x, matrix, group_formats([name]))
    assert list(found) == [(name, axis) for axis in AXES]
    assert arrays_of(values, found).formats.keys() == found.keys()
    for dim, axis in ((-1, "row"), (0, "column")):
        y = fake_quantize(x, name, dim)
        kept = y.isfinite() & x.isfinite()
        error = (y - x.double())[kept]
        errors = found[name, axis]
        numbers = format_numbers(get_format(name), errors)
        np.testing.assert_allclose(numbers["mse"], float(error.square().mean()), rtol=1e-10)
        assert numbers["compared"] == int(kept.sum())
        assert numbers["poisoned"] == int((x.isfinite() & ~y.isfinite()).sum())
        assert numbers["underflow"] == float((y == 0)[kept & (x != 0)].double().mean())
        assert 0 <= numbers["saturated"] <= 1
        assert errors.codes.sum() == kept.sum()
        _, layout = checked(x, name, dim)
        blocks = layout.to_blocks(x)
        assert numbers["blocks"] == blocks[..., 0].numel() == errors.scales.sum()
        assert numbers["nan_blocks"] == int(blocks.isnan().any(-1).sum()) == 1
        assert numbers["zero_blocks"] == int((blocks == 0).all(-1).sum())
        assert -1 <= numbers["headroom"] < 2


def check_commands(name: str) -> None:
    """Check that the commands of `python -m megatron.fake_quant` print something about a format."""
    for command in ("list", "describe", "table"):
        printed = io.StringIO()
        with redirect_stdout(printed):
            assert main([command, name]) == 0
        assert len(printed.getvalue().splitlines()) > 2
