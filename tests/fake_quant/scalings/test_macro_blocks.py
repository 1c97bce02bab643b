"""Macro blocks against an independent definition, rational arithmetic and vectors of ALTO."""

import numpy as np
import pytest
import torch
from gmpy2 import mpq as Fraction

from megatron.fake_quant import dequantize, fake_quantize, quantize
from megatron.fake_quant.code_points import unpack_nibbles
from megatron.fake_quant.special_scalings import MacroScaling
from tests.fake_quant.inputs import (
    assert_same,
    every_bfloat16,
    random_bits_at_every_scale,
    rows_at_every_scale,
    with_special_blocks,
)
from tests.fake_quant.oracle import code_points
from tests.fake_quant.uses import check_every_use

#: Largest significand of a block's maximum, in units of 2^2, before the scale doubles.
TOPS = {"mxfp4_macro": 7.0, "mxfp4_macro_oas": 7.25}
names = pytest.mark.parametrize("name", TOPS)
E2M1 = code_points("e2m1")
F = np.float32


def expected(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the values and scale bytes of float32 macro blocks `[blocks, 128]`."""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(1, keepdims=True)
        special = ~np.isfinite(amax)[:, 0]
        mantissa = (F(6) / np.maximum(amax, F(1e-12))).view(np.int32) >> 15 & 255
        mantissa[special] = 0
        mantissa[np.isinf(amax * (1 + mantissa / F(256)).astype(F))] = 0
        factor = (1 + mantissa / 256).astype(F)
        blocks = (x * factor).astype(np.float64).reshape(len(x), 4, 32)
        blocks[special] = 0
        top = np.abs(blocks).max(2)
        exponent = np.frexp(top)[1] - 3
        reached = top / np.ldexp(1.0, exponent)  # 4 to 8
        # `even` doubles the scale from 7 on, and the top 7.25 beyond 7.25.
        beyond = reached >= 7 if TOPS[name] == 7 else reached > TOPS[name]
        exponent = (exponent + beyond).clip(-127, 127)
        exponent[top == 0] = -127
        scale = np.ldexp(1.0, exponent)[:, :, None]
        position = np.abs(blocks) / scale
        middles = (E2M1[1:] + E2M1[:-1]) / 2
        index = np.searchsorted(middles, position)
        tie = (index < 7) & (position == middles[index.clip(max=6)])
        numbers = np.copysign(E2M1[index + (tie & (index % 2 == 1))], blocks)
        values = (numbers * scale).astype(F).reshape(len(x), 128) / factor
        values[special] = np.nan
        stored = np.concatenate([exponent + 127, mantissa], axis=1)
        stored[special, :4] = 255
        return values, stored


def check(x: torch.Tensor, name: str) -> None:
    values, stored = expected(x.float().numpy(), name)
    y, found = fake_quantize(x, name), quantize(x, name)
    np.testing.assert_array_equal(found.scales.block()[:, 0].numpy(), stored)
    assert_same(y.float(), torch.from_numpy(values).to(x.dtype).float().numpy())
    assert_same(dequantize(found).float(), y.float().numpy())


INPUTS = {
    "rows at every scale": lambda: with_special_blocks(rows_at_every_scale(128)),
    "a million values over every binade": lambda: random_bits_at_every_scale(128, 1 << 20),
    "normal deviates": lambda: torch.randn(1 << 12, 128, generator=torch.manual_seed(5)),
    "bfloat16": lambda: every_bfloat16().view(-1, 128),
    "ends": lambda: (
        torch.tensor([3.4e38, 2.6e38, 2.5e38, 1e-12, 1e-13, 1e-45, 0.0, 6.0, 12.0])
        .unsqueeze(-1)
        .expand(-1, 128)
        .contiguous()
    ),
}


@names
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_it_matches_the_definition(make, name):
    check(make(), name)


@names
def test_the_mantissa_moves_the_maximum_to_6_in_rational_numbers(name):
    x = rows_at_every_scale(128)[::11]
    x = x[x.isfinite().all(1) & (x.abs().amax(1) > 1e-11) & (x.abs().amax(1) < 1e38)]
    stored = quantize(x, name).scales.block()[:, 0].tolist()
    for amax, scales in zip(x.abs().amax(1).tolist(), stored, strict=True):
        moved = Fraction(amax) * (256 + scales[4]) / 256
        exponent = 0
        while moved >= 8:
            moved, exponent = moved / 2, exponent + 1
        while moved < 4:
            moved, exponent = moved * 2, exponent - 1
        assert 6 * (1 - Fraction(1, 250)) < moved <= 6 * (1 + Fraction(1, 10**6))
        assert max(scales[:4]) == exponent + 127


def test_a_named_macro_block():
    """ALTO's macro_block_scaling, commit 74e251d, also finds the mantissa 39."""
    x = torch.tensor([1.3, *[0.1] * 31, *[0.7] * 64])
    found = quantize(x, "mxfp4_macro")
    assert found.scales.block().tolist() == [[125, 124, 124, 0, 39]]
    codes = unpack_nibbles(found.codes, 96)
    # 1.3 * (1 + 39/256) = 1.498 is 5.99 quarters, 0.7 is 6.45 eighths, and 0.1 is 0.46 quarters.
    assert codes.tolist() == [7, *[1] * 31, *[7] * 64]
    assert float(fake_quantize(x, "mxfp4_macro")[0]) == float(F(1.5) / F(1 + 39 / 256))


@names
@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_a_special_value_makes_its_macro_block_nan(special, name):
    x = torch.ones(3, 128)
    x[1, 70] = special
    y = fake_quantize(x.flatten(), name).view(3, 128)
    assert y.isnan().all(1).tolist() == [False, True, False]
    assert y[::2].isfinite().all()
    assert quantize(x, name).scales.block()[1, 0].tolist() == [255, 255, 255, 255, 0]


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="unknown scale rule 'up'; choose one of floor, rceil"):
        MacroScaling("up")


@names
def test_it_works_wherever_formats_are_used(name):
    check_every_use(name)
