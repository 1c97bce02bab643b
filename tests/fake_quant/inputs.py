"""Inputs that reach every corner, and how results are compared."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.fake_quant import get_format, reference
from megatron.fake_quant.block_layout import BlockLayout


def every_bfloat16() -> Tensor:
    """All 65,536 of them, NaN and Inf among them, as bfloat16."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)


def every_float16() -> Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16)


def random_bit_patterns(count: int = 1 << 20) -> Tensor:
    """Float32 of every kind: each bit is drawn by itself."""
    generator = torch.Generator().manual_seed(20240926)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator, dtype=torch.int64)
    return bits.to(torch.int32).view(torch.float32)


def rows_at_every_scale(width: int = 32) -> Tensor:
    """Normal deviates, each row times one power of two, from below the subnormals to overflow."""
    generator = np.random.default_rng(0)
    exponents = np.repeat(np.arange(-155, 130), 8)
    rows = generator.standard_normal((len(exponents), width))
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.ldexp(rows, exponents[:, None]).astype(np.float32))


def random_bits_at_every_scale(width: int, count: int = 1 << 22, spread: int = 8) -> Tensor:
    """Random mantissas and signs; a row's exponents lie within `spread` below one of its own.

    The rows' exponents cover float32, with its subnormals.
    """
    generator = np.random.default_rng(20260731)
    rows = count // width
    top = np.arange(rows) % (254 + spread)
    exponents = top[:, None] - generator.integers(0, spread, (rows, width))
    bits = generator.integers(0, 1 << 23, (rows, width)) | exponents.clip(0, 254) << 23
    bits |= generator.integers(0, 2, (rows, width)) << 31
    return torch.from_numpy(bits.astype(np.uint32).view(np.float32))


def with_special_blocks(x: Tensor) -> Tensor:
    """Some values of a matrix replaced by NaN and Inf, some runs of 64 by zeros."""
    x = x.clone()
    for row, special in enumerate((torch.nan, torch.inf, -torch.inf)):
        x[row, 5::192] = special
    x[3:6, :64] = torch.tensor([0.0, -0.0]).repeat(32)
    x[6] = 0.0
    return x


def by_definition(x: Tensor, name: str, axis: int = -1, seed: int | None = None) -> Tensor:
    """`fake_quantize` by the plain torch operations that define it, not by a fused kernel."""
    fmt = get_format(name)
    return reference.fake_quantize(x, fmt, BlockLayout.of(tuple(x.shape), fmt, axis), seed)


def next_to(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """The float32 at `values` and one and two ulps to either side, as far as they are finite."""
    with np.errstate(over="ignore"):
        at = values.astype(np.float32)
    below, above = (np.nextafter(at, np.float32(end)) for end in (0, np.inf))
    further = [np.nextafter(below, np.float32(0)), np.nextafter(above, np.float32(np.inf))]
    found = np.concatenate([at, below, above, *further])
    return np.unique(found[np.isfinite(found)])


def assert_same(found: Tensor, expected: NDArray[np.floating]) -> None:
    """Equal as numbers, any NaN equal to any other, and zeros with equal signs.

    `expected` may be wider than `found`: it is rounded to float32, where overflow is Inf.
    """
    assert found.dtype == torch.float32
    with np.errstate(over="ignore"):
        wanted = expected.astype(np.float32)
    values = found.numpy()
    np.testing.assert_array_equal(values, wanted)
    numbers = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(values)[numbers], np.signbit(wanted)[numbers])
