"""MX9 and MX6 against rational arithmetic, an independent definition and vectors of ALTO."""

import numpy as np
import pytest
import torch
from gmpy2 import mpq as Fraction

from megatron.fake_quant import dequantize, fake_quantize, get_format, quantize
from megatron.fake_quant.inspect import format_properties
from tests.fake_quant.inputs import (
    assert_same,
    every_bfloat16,
    every_float16,
    random_bit_patterns,
    random_bits_at_every_scale,
    rows_at_every_scale,
    with_special_blocks,
)
from tests.fake_quant.uses import check_every_use

#: Number of bits of an element after its sign.
BITS = {"mx9": 7, "mx6": 4}
names = pytest.mark.parametrize("name", BITS)


def expected(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the values, codes and scale bytes of a matrix of width 16, by exact float64 steps."""
    bits = BITS[name]
    with np.errstate(invalid="ignore"):
        blocks = x.astype(np.float64).reshape(len(x), 8, 2)
    special = ~np.isfinite(blocks).all((1, 2))
    blocks[special] = 0
    # The exponent of zero and of subnormal numbers is -127.
    exponent = np.frexp(np.abs(blocks))[1] - 1
    exponent[(exponent < -126) | (blocks == 0)] = -127
    shared = exponent.max((1, 2))
    lower = exponent.max(2) < shared[:, None]
    step = np.maximum(shared[:, None] - lower - (bits - 1), -126)[:, :, None]
    largest = (1 << bits) - 1
    multiples = np.rint(np.ldexp(blocks, -step)).clip(-largest, largest)
    values = np.ldexp(multiples, step) + 0.0
    values[special] = np.nan
    codes = multiples.astype(np.int64) & (2 * largest + 1)
    stored = np.stack([shared + 127, lower @ (1 << np.arange(8))], axis=1)
    stored[special, 0] = 255
    return values.reshape(x.shape), codes.reshape(x.shape), stored


def check(x: torch.Tensor, name: str) -> None:
    values, codes, stored = expected(x.float().numpy(), name)
    found = quantize(x, name)
    finite = np.isfinite(values).all(1)
    assert_same(
        fake_quantize(x, name).float(), torch.from_numpy(values).to(x.dtype).float().numpy()
    )
    assert_same(dequantize(found).float(), fake_quantize(x, name).float().numpy())
    np.testing.assert_array_equal(found.codes.numpy()[finite], codes[finite])
    scales = found.scales.block()[:, 0].numpy()
    np.testing.assert_array_equal(scales[:, 0], stored[:, 0])
    np.testing.assert_array_equal(scales[finite], stored[finite])


@names
@pytest.mark.parametrize("make", [every_bfloat16, every_float16], ids=["bfloat16", "float16"])
def test_every_half_precision_value(make, name):
    """Blocks hold neighbors and, shuffled, all values."""
    x = make()
    check(x.view(-1, 16), name)
    finite = x[x.isfinite()]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(8))]
    check(shuffled[: len(finite) // 16 * 16].view(-1, 16), name)


INPUTS = {
    "four million bit patterns": lambda: random_bit_patterns(1 << 22).view(-1, 16),
    "a million values over every binade": lambda: random_bits_at_every_scale(16, 1 << 20),
    "rows at every scale": lambda: with_special_blocks(rows_at_every_scale(64)).view(-1, 16),
}


@names
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_float32_values(make, name):
    check(make(), name)


@names
def test_it_matches_rational_numbers(name):
    x = rows_at_every_scale(16)[::7]
    x = x[x.isfinite().all(1) & (x.abs() >= 2.0**-126).any(1)]
    assert len(x) > 200
    largest = (1 << BITS[name]) - 1
    for row, found in zip(x.tolist(), fake_quantize(x, name).tolist(), strict=True):
        power = Fraction(1)
        top = max(map(abs, map(Fraction, row)))
        while power > top:
            power /= 2
        while 2 * power <= top:
            power *= 2
        for i, value in enumerate(row):
            pair = row[i // 2 * 2 : i // 2 * 2 + 2]
            scale = power if max(map(abs, map(Fraction, pair))) >= power else power / 2
            step = max(scale * 2 / (largest + 1), Fraction(1, 2**126))
            multiple = max(-largest, min(largest, round(Fraction(value) / step)))
            assert Fraction(found[i]) == multiple * step


@pytest.mark.parametrize(
    ("name", "values", "scales", "codes", "expected"),
    [
        # The bytes and codes are those of ALTO's kernels, commit 74e251d.
        (
            "mx6",
            [1.5, 0.99, -0.99, 0.03, 1.0, -1.97, 0.0625, 0.09375],
            [127, 0b11111010],
            [12, 8, 17, 0, 8, 17, 1, 2],
            [1.5, 1.0, -0.9375, 0.0, 1.0, -1.875, 0.0625, 0.125],
        ),
        (
            "mx9",
            [1.5, 0.99, -0.9975, 0.003, 1.0, -1.999, 0.00390625, 0.01171875],
            [127, 0b11111010],
            [96, 63, 129, 0, 64, 129, 0, 2],
            [1.5, 0.984375, -0.9921875, 0.0, 1.0, -1.984375, 0.0, 0.015625],
        ),
    ],
)
def test_named_blocks(name, values, scales, codes, expected):
    """A short block has a clamped value in a lower pair, and ties to even in both directions."""
    found = quantize(torch.tensor(values), name)
    assert found.scales.block().tolist() == [scales]
    assert found.codes.tolist() == codes
    assert dequantize(found).tolist() == expected


@names
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_a_special_value_makes_its_block_nan_and_no_other(special, name):
    x = torch.ones(3, 16)
    x[1, 7] = special
    y = fake_quantize(x.flatten(), name).view(3, 16)
    assert y.isnan().all(1).tolist() == [False, True, False]
    assert y.isfinite().all(1).tolist() == [True, False, True]


@names
def test_the_ends_of_the_scales(name):
    lowest = 2.0 ** (BITS[name] - 1 - 126)
    assert format_properties.scale_range(get_format(name).scaling) == (lowest, 2.0**127)
    x = torch.tensor([2.0**-126, 2.0**-127, 1.5 * 2.0**-126, 2.0**-149])
    assert fake_quantize(x, name).tolist() == [2.0**-126, 0.0, 2.0**-125, 0.0]
    assert quantize(torch.zeros(3), name).scales.block().tolist() == [[0, 0]]
    largest = torch.full((16,), torch.finfo(torch.float32).max)
    assert fake_quantize(largest, name).tolist() == [2.0**127 * (2 - 2.0 ** (1 - BITS[name]))] * 16


@names
def test_stochastic_rounding_gives_neighbors_with_the_right_mean(name):
    x = torch.full((1 << 14,), 1.3).view(-1, 16)
    y = fake_quantize(x, f"{name}:sr", seed=3).double()
    step = 2.0 ** (1 - BITS[name])
    assert ((y - x).abs() < step).all()
    assert abs(float(y.mean()) - float(x[0, 0])) < 5 * step / 2 / 128


def test_there_are_no_other_variants():
    with pytest.raises(ValueError, match="mx9 does not take '2d'; it takes sr"):
        get_format("mx9:2d")


@names
def test_it_works_wherever_formats_are_used(name):
    check_every_use(name)
