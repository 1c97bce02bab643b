"""HiFloat8 against its table of codes, en_dtypes, and cases worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.elements import HiFloat8

from . import oracle
from .inputs import (
    assert_same,
    every_bfloat16,
    every_float16,
    next_to,
    random_bit_patterns,
)

en_dtypes = pytest.importorskip("en_dtypes", reason="en_dtypes has no wheel for Python 3.13")

SATURATING = get_format("hifp8")
TO_INF = replace(SATURATING, element=HiFloat8(overflow="inf"))


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        # |E| up to 3: 3 mantissa bits. Between 1 and 2 the step is 1/8; ties go away from zero.
        (1.0, 1.0),
        (1.0625, 1.125),  # half-way from 1 to 1.125; to even would give 1
        (1.1875, 1.25),  # half-way from 1.125 to 1.25
        (1.0624, 1.0),
        (1.9375, 2.0),  # half-way to the next binade
        (0.1328125, 0.140625),  # 2^-3 * (1 + 1/16): half-way from mantissa 0 to 1, E = -3
        (15.5, 16.0),  # E = 3: from 15 to 16, half-way
        # |E| from 4 to 7: 2 mantissa bits. 16 20 24 28 32.
        (16.0, 16.0),
        (18.0, 20.0),
        (17.9, 16.0),
        (0.0703125, 0.078125),  # 2^-4 * (1 + 1/8), half-way to 2^-4 * 1.25
        (0.9375 * 2**-3, 2**-3),  # E = -4: 1.875 * 2^-4, half-way from 1.75 to 2
        # |E| from 8 to 15: 1 mantissa bit. 256 384 512.
        (319.9, 256.0),
        (320.0, 384.0),
        (448.0, 512.0),
        (1.25 * 2**-15, 1.5 * 2**-15),
        # E from -22 to -16: powers of two only.
        (1.5 * 2**-16, 2**-15),
        (1.49 * 2**-16, 2**-16),
        (1.5 * 2**-22, 2**-21),
        (1.49 * 2**-22, 2**-22),
        # Underflow: 2^-23 is half-way from 0 to 2^-22 and goes up.
        (2**-23, 2**-22),
        (1.99 * 2**-23, 2**-22),
        (np.nextafter(np.float32(2**-23), np.float32(0)), 0.0),
        (1.5 * 2**-24, 0.0),
        (1e-45, 0.0),
        # Overflow: 1.25 * 2^15 = 40960 is half-way from 32768 to the code of Inf.
        (32767.0, 32768.0),
        (24576.0, 24576.0),
        (28672.0, 32768.0),
        (40959.0, 32768.0),
    ],
)
def test_named_corner_cases(x, expected):
    both_signs = torch.tensor([x, -x], dtype=torch.float32)
    for fmt in (SATURATING, TO_INF):
        found = fake_quantize(both_signs, fmt)
        assert found.tolist() == [expected, -expected]
        assert not found[found == 0].signbit().any()


@pytest.mark.parametrize("x", [40960.0, 65504.0, 1e38, np.inf])
def test_overflow_saturates_or_becomes_inf(x):
    both_signs = torch.tensor([x, -x])
    assert fake_quantize(both_signs, SATURATING).tolist() == [32768.0, -32768.0]
    assert fake_quantize(both_signs, TO_INF).tolist() == [np.inf, -np.inf]


@pytest.mark.parametrize("fmt", [SATURATING, TO_INF])
def test_nan_stays_nan_of_either_sign_and_payload_and_touches_no_neighbor(fmt):
    bits = torch.tensor([0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1, -(1 << 22)], dtype=torch.int32)
    x = torch.cat([torch.ones(1), bits.view(torch.float32), torch.ones(1)])
    assert fake_quantize(x, fmt).isnan().tolist() == [False, *[True] * 5, False]


def test_zero_has_no_sign():
    assert not fake_quantize(torch.tensor([0.0, -0.0, -1e-30]), "hifp8").signbit().any()


def test_the_table_of_codes_is_that_of_en_dtypes():
    ours = oracle.hifloat8_codes()
    theirs = np.arange(256, dtype=np.uint8).view(en_dtypes.hifloat8).astype(np.float64)
    np.testing.assert_array_equal(ours, theirs)
    positive = ours[np.isfinite(ours) & (ours > 0)]
    assert len(positive) == 126
    assert (positive.min(), positive.max()) == (2**-22, 2**15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_point_is_a_fixed_point_in_every_dtype(dtype):
    values = oracle.hifloat8_codes().astype(np.float32)
    finite = values[np.isfinite(values)]
    assert len(finite) == 253
    x = torch.from_numpy(finite).to(dtype)
    assert torch.equal(x.float(), torch.from_numpy(finite))  # they all exist in float16
    assert_same(fake_quantize(x, "hifp8").float(), finite)
    assert_same(fake_quantize(torch.from_numpy(values), TO_INF), values)


def around_every_threshold() -> torch.Tensor:
    codes = oracle.hifloat8_codes()
    table = np.sort(codes[np.isfinite(codes) & (codes >= 0)])
    middle = (table[1:] + table[:-1]) / 2
    positive = next_to(np.concatenate([middle, table, [40960.0, 49152.0]]))
    return torch.from_numpy(np.concatenate([positive, -positive]))


INPUTS = {
    "every bfloat16": every_bfloat16,
    "every float16": every_float16,
    "four million float32 bit patterns": lambda: random_bit_patterns(1 << 22),
    "two ulps around every threshold": around_every_threshold,
}
inputs = pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)


@inputs
def test_it_matches_en_dtypes(make):
    """en_dtypes overflows to Inf; saturation is checked against the table of codes below."""
    x = make()
    with np.errstate(invalid="ignore"):
        expected = x.float().numpy().astype(en_dtypes.hifloat8).astype(np.float32)
    found = fake_quantize(x, TO_INF)
    assert found.dtype == x.dtype
    assert_same(found.float(), expected)


@inputs
@pytest.mark.parametrize("fmt", [SATURATING, TO_INF], ids=["saturate", "inf"])
def test_it_matches_the_table_of_codes(make, fmt):
    x = make()
    expected = oracle.fake_quantize_hifloat8(x.float().numpy(), overflow=fmt.element.overflow)
    assert_same(fake_quantize(x, fmt).float(), expected)


@pytest.mark.parametrize("fmt", [SATURATING, TO_INF])
def test_it_is_idempotent_odd_and_monotone(fmt):
    x = random_bit_patterns(1 << 18)
    x = x[~x.isnan()].sort().values
    y = fake_quantize(x, fmt)
    assert torch.equal(fake_quantize(y, fmt), y)
    assert torch.equal(fake_quantize(-x, fmt), -y)
    assert (y[1:] >= y[:-1]).all()


def test_it_does_not_scale_with_powers_of_two():
    """The precision of HiFloat8 tapers: 1.125 has a code, but 16 * 1.125 has none."""
    x = torch.tensor(1.125)
    assert fake_quantize(x, "hifp8") == 1.125
    assert fake_quantize(16 * x, "hifp8") == 20.0


def test_an_unknown_overflow_is_refused():
    with pytest.raises(ValueError, match=r"overflow 'wrap'; choose one of saturate, inf"):
        HiFloat8(overflow="wrap")
