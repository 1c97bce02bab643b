"""Rounding to the elements of the block formats, without a scale."""

import numpy as np
import pytest
import torch

from megatron.fake_quant.elements import ELEMENTS, ElementFormat
from megatron.fake_quant.names import get_element
from megatron.fake_quant.rounding import round_to

from . import oracle
from .inputs import assert_same, every_bfloat16, random_bit_patterns

EVERY_SMALL_ELEMENT = [
    f"e{exponent}m{mantissa}" for exponent in range(1, 8) for mantissa in range(0, 8 - exponent)
]
NAMES = sorted({*ELEMENTS, *EVERY_SMALL_ELEMENT})
elements = pytest.mark.parametrize("name", NAMES)
elements_of_ml_dtypes = pytest.mark.parametrize("name", oracle.ML_DTYPES)


def rounded(x: float, name: str) -> float:
    return float(round_to(torch.tensor(x), get_element(name)))


# The numbers of the OCP MX specification v1.0, tables 1 to 5: bias, largest exponent and number,
# smallest normal and smallest subnormal number.
OCP_TABLE = {
    "e4m3": (7, 8, 448.0, 2**-6, 2**-9),
    "e5m2": (15, 15, 57344.0, 2**-14, 2**-16),
    "e3m2": (3, 4, 28.0, 2**-2, 2**-4),
    "e2m3": (1, 2, 7.5, 1.0, 2**-3),
    "e2m1": (1, 2, 6.0, 1.0, 0.5),
    "int8": (1, 0, 127 / 64, 1.0, 1 / 64),
}


@pytest.mark.parametrize(("name", "row"), OCP_TABLE.items())
def test_fields_are_those_of_the_specification(name, row):
    fmt = get_element(name)
    smallest_subnormal = 2.0 ** (fmt.emin - fmt.mantissa_bits)
    assert (fmt.bias, fmt.emax, fmt.max, 2.0**fmt.emin, smallest_subnormal) == row


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        # E2M1 is 0 .5 1 1.5 2 3 4 6: half-way cases go to the code whose mantissa bit is 0.
        ("e2m1", 0.25, 0.0),  # 0 (code 0) or .5 (code 1)
        ("e2m1", 0.75, 1.0),  # .5 (1) or 1 (2); nvidia-modelopt gives .5
        ("e2m1", 1.25, 1.0),  # 1 (2) or 1.5 (3)
        ("e2m1", 1.75, 2.0),  # 1.5 (3) or 2 (4); nvidia-modelopt gives 1.5
        ("e2m1", 2.5, 2.0),  # 2 (4) or 3 (5)
        ("e2m1", 3.5, 4.0),  # 3 (5) or 4 (6); nvidia-modelopt gives 3
        ("e2m1", 5.0, 4.0),  # 4 (6) or 6 (7)
        ("e2m1", 7.0, 6.0),  # 8 is not a number of E2M1: saturates
        # E4M3 has 8 steps per binade; 17 is half-way from 16 (mantissa 0) to 18, 19 from 18 to 20.
        ("e4m3", 17.0, 16.0),
        ("e4m3", 19.0, 20.0),
        ("e4m3", 464.0, 448.0),  # half-way to 480, which is the NaN code: ml_dtypes gives NaN
        ("e4m3", 2**-10, 0.0),  # half of the smallest subnormal 2^-9: 0 is even
        ("e4m3", 3 * 2**-10, 2**-8),  # half-way from 1 to 2 times 2^-9
        ("e4m3", np.nextafter(np.float32(2**-10), np.float32(1)), 2**-9),
        (
            "e4m3",
            15.5 * 2**-10,
            2**-6,
        ),  # half-way from the largest subnormal 7 * 2^-9 to 2^-6, even
        # E5M2 has 4 steps per binade; from 61440, half-way to 65536, torch's own cast gives Inf.
        ("e5m2", 61440.0, 57344.0),
        ("e5m2", 9.0, 8.0),
        ("e5m2", 11.0, 12.0),
        ("e5m2", 2**-17, 0.0),
        # E3M2 ends at 28, E2M3 at 7.5.
        ("e3m2", 26.0, 24.0),
        ("e3m2", 30.0, 28.0),
        ("e2m3", 7.25, 7.0),
        ("e2m3", 1 / 16, 0.0),
        # INT8 counts in 1/64. 1.5/64 is half-way from 1 to 2, 2.5/64 from 2 to 3.
        ("int8", 1.5 / 64, 2 / 64),
        ("int8", 2.5 / 64, 2 / 64),
        ("int8", 2.0, 127 / 64),
        ("int8", -2.0, -127 / 64),  # the code of -2 stays unused
        # E3M0 has powers of two only: 3 is half-way from 2 to 4, 1/8 from 0 to 1/4.
        ("e3m0", 3.0, 4.0),
        ("e3m0", 6.0, 8.0),
        ("e3m0", 1 / 8, 0.0),
        # Beyond every range.
        ("e4m3", 1e30, 448.0),
        ("e4m3", -np.inf, -448.0),
        ("e4m3", 1e-40, 0.0),
    ],
)
def test_named_corner_cases(name, x, expected):
    assert rounded(float(x), name) == expected
    assert rounded(-float(x), name) == -expected


@elements
def test_every_code_point_is_a_fixed_point(name):
    values = oracle.code_points(name)
    values = np.concatenate([values, -values[1:]])
    assert_same(round_to(torch.from_numpy(values).float(), get_element(name)), values)


@elements
def test_the_largest_code_point_is_the_maximum(name):
    fmt = get_element(name)
    assert oracle.code_points(name)[-1] == fmt.max
    integer = name.startswith("int")
    assert fmt.bits == (int(name[3:]) if integer else 1 + int(name[1]) + int(name[3]))


@elements_of_ml_dtypes
def test_rounding_matches_ml_dtypes_on_every_bfloat16(name):
    fmt = get_element(name)
    x = every_bfloat16().float()
    x = x[~x.isnan()]
    # Clamped first: on overflow E4M3 becomes NaN in ml_dtypes, and E5M2 Inf.
    clamped = x.clamp(-fmt.max, fmt.max).numpy()
    assert_same(round_to(x, fmt), clamped.astype(oracle.ML_DTYPES[name]).astype(np.float32))


@elements
def test_rounding_matches_the_table_of_code_points(name):
    x = torch.cat([every_bfloat16().float(), random_bit_patterns(1 << 17)])
    x = x[x.isfinite()]
    expected = oracle.round_element(x.double().numpy(), name)
    expected = expected + 0.0 if name.startswith("int") else expected  # one zero
    assert_same(round_to(x, get_element(name)), expected)


@elements
def test_rounding_matches_next_to_every_half_way_case(name):
    values = oracle.code_points(name)
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate(
        [np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))]
    )
    assert_same(round_to(torch.from_numpy(x), get_element(name)), oracle.round_element(x, name))


@elements
def test_rounding_is_odd_and_monotone(name):
    fmt = get_element(name)
    x = random_bit_patterns(1 << 16)
    x = x[~x.isnan()].sort().values
    y = round_to(x, fmt)
    assert (y.diff() >= 0).all()
    assert torch.equal(round_to(-x, fmt), -y)


def test_rounding_to_floats_scales_with_powers_of_two_in_the_normal_range():
    fmt = get_element("e4m3")
    x = torch.linspace(1, 2, 4097)
    assert torch.equal(round_to(x * 64, fmt), round_to(x, fmt) * 64)


@elements
def test_nan_stays_and_the_input_is_not_touched(name):
    x = torch.tensor([torch.nan, 1.3, -torch.inf])
    before = x.clone()
    y = round_to(x, get_element(name))
    assert y[0].isnan()
    assert y[1:].isfinite().all()
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


def test_an_element_is_described_by_its_fields_alone():
    """No branch depends on a name: an unregistered type rounds by its fields."""
    fives = ElementFormat("anything", exponent_bits=2, mantissa_bits=2, bias=1, max=5.0)
    x = torch.tensor([0.1, 0.4, 1.1, 2.25, 4.6, 77.0])
    assert round_to(x, fives).tolist() == [0.0, 0.5, 1.0, 2.0, 5.0, 5.0]
