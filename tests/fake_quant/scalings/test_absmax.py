"""NF4 against bitsandbytes' table and thresholds, and against rational arithmetic."""

import numpy as np
import pytest
import torch
from gmpy2 import mpq as Fraction

from megatron.fake_quant import Format, dequantize, fake_quantize, get_format, quantize
from megatron.fake_quant.code_points import unpack_nibbles
from megatron.fake_quant.elements import TABLES, TableElement
from megatron.fake_quant.inspect.format_properties import ties
from megatron.fake_quant.special_scalings import AbsmaxScaling
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

#: Thresholds between the 16 numbers, as bitsandbytes' kernels have them (dQuantizeNF4 of csrc).
THRESHOLDS = np.array(
    [
        *(-0.8480964004993439, -0.6106329262256622, -0.4599952697753906, -0.33967943489551544),
        *(-0.23460740596055984, -0.13791173323988914, -0.045525018125772476, 0.03979014977812767),
        *(0.1202552504837513, 0.2035212516784668, 0.2920137718319893, 0.3893125355243683),
        *(0.5016634166240692, 0.6427869200706482, 0.8614784181118011),
    ],
    np.float32,
)
NUMBERS = np.array(TABLES["nf4"], np.float32)


def expected(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the values, codes and scales of a matrix of width 64, by the definition."""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(1, keepdims=True)
        amax[~np.isfinite(amax)] = np.nan
        reciprocal = np.float32(1) / amax
        scaled = np.where(np.isinf(reciprocal), x / amax, x * reciprocal)
        scaled[np.isnan(scaled)] = 0
        codes = np.searchsorted(THRESHOLDS, scaled)
        return NUMBERS[codes] * amax, codes, amax[:, 0]


def check(x: torch.Tensor) -> None:
    values, codes, scales = expected(x.float().numpy())
    found = quantize(x, "nf4")
    y = fake_quantize(x, "nf4")
    assert_same(y.float(), torch.from_numpy(values).to(x.dtype).float().numpy())
    assert_same(dequantize(found).float(), y.float().numpy())
    assert_same(found.scales.block()[:, 0], scales)
    finite = np.isfinite(scales)
    np.testing.assert_array_equal(unpack_nibbles(found.codes, 64).numpy()[finite], codes[finite])


def test_the_numbers_are_exact_in_float32_and_their_middles_are_the_thresholds():
    assert NUMBERS.astype(np.float64).tolist() == list(TABLES["nf4"])
    middles = (NUMBERS[1:].astype(np.float64) + NUMBERS[:-1]) / 2
    np.testing.assert_array_equal(middles.astype(np.float32), THRESHOLDS)


@pytest.mark.parametrize("make", [every_bfloat16, every_float16], ids=["bfloat16", "float16"])
def test_every_half_precision_value(make):
    """Blocks hold neighbors and, shuffled, all values."""
    x = make()
    check(x.view(-1, 64))
    finite = x[x.isfinite()]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(8))]
    check(shuffled[: len(finite) // 64 * 64].view(-1, 64))


INPUTS = {
    "four million bit patterns": lambda: random_bit_patterns(1 << 22).view(-1, 64),
    "a million values over every binade": lambda: random_bits_at_every_scale(64, 1 << 20),
    "rows at every scale": lambda: with_special_blocks(rows_at_every_scale(64)),
    "next to every threshold": lambda: torch.from_numpy(
        np.stack(
            [
                np.resize([1, *THRESHOLDS, *np.nextafter(THRESHOLDS, way, dtype=np.float32)], 64)
                for way in np.array([-1, 1], np.float32)
            ]
        ).astype(np.float32)
    ),
}


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_float32_values(make):
    check(make())


def test_results_are_the_nearest_numbers_in_rational_arithmetic():
    """The scale of these blocks is a power of two, so that scaling is exact."""
    x = rows_at_every_scale(64)[::97].clamp(-(2.0**100), 2.0**100)
    x[:, 0] = 2.0 ** torch.frexp(x.abs().amax(1)).exponent
    table = [Fraction(number) for number in NUMBERS.tolist()]
    checked = 0
    for row, found in zip(x.tolist(), fake_quantize(x, "nf4").tolist(), strict=True):
        scale = Fraction(row[0])
        if not scale > 2.0**-100:
            continue
        for value, result in zip(row, found, strict=True):
            distance = abs(Fraction(result) / scale - Fraction(value) / scale)
            nearest = min(abs(number - Fraction(value) / scale) for number in table)
            # A threshold is rounded to float32, by less than 2^-25.
            assert distance - nearest <= Fraction(1, 2**24)
            checked += 1
    assert checked > 1000


def test_named_blocks():
    """The codes are those of bitsandbytes 0.50.2 on the CPU."""
    x = torch.tensor([-3.0, 0.1, 0.2, 1.0, -1.0, 2.5, 1.5, -0.0])
    found = quantize(x, "nf4")
    assert found.scales.block().tolist() == [3.0]
    assert unpack_nibbles(found.codes, 8).tolist() == [0, 7, 8, 11, 4, 14, 12, 7]
    assert not torch.signbit(dequantize(found))[-1]


def test_special_blocks():
    x = torch.ones(4, 64)
    x[1, 7], x[2, 9], x[3] = torch.nan, torch.inf, 0.0
    y = fake_quantize(x, "nf4")
    assert y.isnan().all(1).tolist() == [False, True, True, False]
    assert (y[3] == 0).all()
    assert quantize(x, "nf4").scales.block()[:, 0].isnan().tolist() == [False, True, True, False]
    tiny = torch.tensor([2.0**-149, 2.0**-130])
    assert fake_quantize(tiny, "nf4").tolist() == [0.0, 2.0**-130]


def test_stochastic_rounding_and_unknown_tables_are_refused():
    with pytest.raises(ValueError, match="nf4 does not take 'sr'; it has no variants"):
        get_format("nf4:sr")
    with pytest.raises(ValueError, match=r"no stochastic rounding with .*; choose nearest"):
        Format("own", TableElement("nf4"), AbsmaxScaling(), "stochastic")
    with pytest.raises(ValueError, match="unknown table of values 'nf3'; choose one of nf4"):
        TableElement("nf3")
    assert ties(TableElement("nf4")) == "to the lower number"


def test_it_works_wherever_formats_are_used():
    check_every_use("nf4")
