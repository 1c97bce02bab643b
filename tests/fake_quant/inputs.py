"""Inputs that cover the corner cases of all formats, and the comparison of results."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.fake_quant import get_format, reference
from megatron.fake_quant.block_layout import BlockLayout


def every_bfloat16() -> Tensor:
    """Return all 65,536 bfloat16 values, NaN and Inf included."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)


def every_float16() -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16)


def random_bit_patterns(count: int = 1 << 20) -> Tensor:
    """Return float32 values of every kind, with each bit drawn independently."""
    generator = torch.Generator().manual_seed(20240926)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def rows_at_every_scale(width: int = 32) -> Tensor:
    """Return normal deviates in rows scaled by powers of two, from underflow to overflow."""
    generator = np.random.default_rng(0)
    exponents = np.repeat(np.arange(-155, 130), 8)
    rows = generator.standard_normal((len(exponents), width))
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ldexp(rows, exponents[:, None]).astype(np.float32))


def random_bits_at_every_scale(width: int, count: int = 1 << 22, spread: int = 8) -> Tensor:
    """Return random signs and mantissas; a row's exponents lie within `spread` of its largest.

    Together the rows cover the exponents of float32, including its subnormals.
    """
    generator = np.random.default_rng(20260731)
    rows = count // width
    top = np.arange(rows) % (254 + spread)
    exponents = top[:, None] - generator.integers(0, spread, (rows, width))
    bits = generator.integers(0, 1 << 23, (rows, width)) | exponents.clip(0, 254) << 23
    bits |= generator.integers(0, 2, (rows, width)) << 31
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def with_special_blocks(x: Tensor) -> Tensor:
    """Return a matrix with some values replaced by NaN and Inf, and some runs of 64 by zeros."""
    x = x.clone()
    for row, special in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[row, 5::192] = special
    x[3:6, :64] = torch.tensor([0.0, -0.0]).repeat(32)
    x[6] = 0.0
    return x


def by_definition(x: Tensor, name: str, axis: int = -1, seed: int | None = None) -> Tensor:
    """Return `fake_quantize` by the reference, never by a fused kernel."""
    fmt = get_format(name)
    return reference.fake_quantize(x, fmt, BlockLayout.of(tuple(x.shape), fmt, axis), seed)


def next_to(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the finite float32 numbers at `values` and one and two ulps on either side."""
    with np.errstate(over="ignore"):
        at = values.astype(np.float32)
    below, above = (np.nextafter(at, np.float32(end)) for end in (0, np.inf))
    further = [np.nextafter(below, np.float32(0)), np.nextafter(above, np.float32(np.inf))]
    found = np.concatenate([at, below, above, *further])
    return np.unique(found[np.isfinite(found)])


def assert_same(found: Tensor, expected: NDArray[np.floating]) -> None:
    """Assert equal numbers and equal signs of zeros; any NaN equals any other.

    `expected` may have a wider dtype than `found`. It is rounded to float32, with overflow to Inf.
    """
    assert found.dtype == torch.float32
    with np.errstate(over="ignore"):
        wanted = expected.astype(np.float32)
    values = found.numpy()
    np.testing.assert_array_equal(values, wanted)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(values)[numbers], np.signbit(wanted)[numbers])
