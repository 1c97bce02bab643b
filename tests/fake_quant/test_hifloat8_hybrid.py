"""HiFloat8's hybrid rounding against Huawei's public script, the paper's rule and hand cases."""

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron.fake_quant import fake_quantize

from . import oracle, references
from .inputs import (
    assert_same,
    by_definition,
    every_bfloat16,
    every_float16,
    next_to,
    random_bit_patterns,
    random_bits_at_every_scale,
)

NAMES = {"saturate": "hifp8:hr", "inf": "hifp8:hr:inf"}
overflows = pytest.mark.parametrize("overflow", NAMES)
ULP = 2.0**-19  #: distance to the next float32 number at 16


@pytest.mark.parametrize(
    ("dtype", "x", "expected"),
    [
        # |E| below 4 rounds to nearest, ties away from zero, as without :hr.
        ("float32", 1.0625, 1.125),
        ("float32", 15.5, 16.0),
        ("float32", 15.4375, 15.0),
        ("bfloat16", 0.1328125, 0.140625),  # E = -3
        # SR14 applies from 16 on, where the step is 4. T is the low 14 bits of the mantissa, in
        # units of 2^-19 (ULP). F is the distance to the lower number, in units of 2^-14 steps.
        # Values with F >= T go up, including exact ones, for which F = T = 0.
        ("float32", 16.0, 20.0),
        ("float32", 24.0, 28.0),
        ("float32", 2.0**-4, 2.0**-4 * 1.25),
        ("float32", 16 + ULP, 16.0),  # F 0, T 1
        ("float32", 16 + 2**14 * ULP, 20.0),  # F 2^-7 * 2^14, T 0
        ("float32", 17 + 4096 * ULP, 20.0),  # F 2^12 + 2^-9 * 2^14 = 4128, T 4096
        ("float32", 17 + 4129 * ULP, 16.0),  # F 4128 (and a bit), T 4129
        ("float32", 17 + 4128 * ULP, 20.0),  # F = T
        ("float32", 20 - ULP, 20.0),  # F and T all ones
        ("float32", 28.0, 32.0),  # a carry into the next binade
        # At E = -23, F begins at 2^13, half-way.
        ("float32", 2.0**-23, 2.0**-22),
        ("float32", 2.0**-23 * (1 + 2**13 * 2**-23), 2.0**-22),  # T 8192, F 8192 + 8
        ("float32", 2.0**-23 * (1 + 8201 * 2**-23), 0.0),  # T 8201, F 8192 + 8
        ("float32", 2.0**-23 * (1 - 2**-24), 0.0),
        # SR2 in bfloat16: the spacing at 16 is 1/8. T = 1 for an even mantissa, 3 for an odd one.
        ("bfloat16", 16.0, 16.0),  # F 0
        ("bfloat16", 16.75, 16.0),  # F 0
        ("bfloat16", 17.0, 20.0),  # F 1, even
        ("bfloat16", 17.125, 16.0),  # F 1, odd
        ("bfloat16", 18.875, 16.0),  # F 2, odd
        ("bfloat16", 19.125, 20.0),  # F 3, odd
        # SR2 in float16: the spacing at 16 is 1/64.
        ("float16", 17.0, 20.0),
        ("float16", 17 + 1 / 64, 16.0),
        ("float16", 19 + 1 / 64, 20.0),
        # Subnormals of float16 are multiples of 2^-24, which is the value of their last bit.
        ("float16", 1 * 2.0**-24, 0.0),
        ("float16", 2 * 2.0**-24, 2.0**-22),  # F 2, T 1
        ("float16", 3 * 2.0**-24, 2.0**-22),  # F 3, T 3
        ("float16", 5 * 2.0**-24, 2.0**-22),  # 1.25 * 2^-22: F 1, T 3
        ("float16", 6 * 2.0**-24, 2.0**-21),  # F 2, T 1
        ("float16", 7 * 2.0**-24, 2.0**-21),  # F 3, T 3
        ("float16", 10 * 2.0**-24, 2.0**-20),  # 1.25 * 2^-21: F 1, T 1
        # The range ends at the same value as without :hr.
        ("bfloat16", 32768.0, 32768.0),
        ("bfloat16", 28672.0, 32768.0),  # F 2 of the way from 24576, even
    ],
)
def test_named_corner_cases(dtype, x, expected):
    both_signs = torch.tensor([x, -x], dtype=torch.float64).to(getattr(torch, dtype))
    assert both_signs[0].double() == x
    for name in NAMES.values():
        found = fake_quantize(both_signs, name)
        assert found.tolist() == [expected, -expected]
        assert not found[found == 0].signbit().any()


def test_overflow():
    """Overflow starts at 40960, as without :hr; SR14 may already round up from 32768 on."""
    x = torch.tensor([40960.0, 1e30, torch.inf, 32768.0, -32768.0])
    assert fake_quantize(x, "hifp8:hr").tolist() == [32768.0] * 4 + [-32768.0]
    assert fake_quantize(x, "hifp8:hr:inf").tolist() == [torch.inf] * 4 + [-torch.inf]
    assert fake_quantize(x.bfloat16()[3:], "hifp8:hr:inf").tolist() == [32768.0, -32768.0]
    assert fake_quantize(torch.tensor([torch.nan]), "hifp8:hr").isnan().all()


def script_values(dtype: str, overflow: str) -> np.ndarray:
    """Return the values of Huawei's script.

    It turns a carry at 2^15 into Inf even when it should saturate; Ascend's own emulation and the
    package do not."""
    values = oracle.hifloat8_codes()[references.HYBRID[f"{dtype}/{overflow}"]].astype(np.float32)
    return values.clip(-(2.0**15), 2.0**15) if overflow == "saturate" else values


@overflows
def test_float32_is_that_of_huawei_s_script(overflow):
    x = torch.from_numpy(references.HYBRID["float32/bits"].view(np.float32))
    assert_same(fake_quantize(x, NAMES[overflow]), script_values("float32", overflow))


@overflows
def test_float16_is_that_of_huawei_s_script_where_nothing_carries_over(overflow):
    """The script loses carries out of a binade.

    It compares the fraction with 2^bits instead of 2^bits - 1. In subnormals it takes the last bit
    as 0, whereas Ascend's simulator and the package read the stored bit.
    """
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
    found = fake_quantize(x, NAMES[overflow]).float().numpy()
    expected = script_values("float16", overflow)
    magnitude = np.abs(x.float().numpy())
    with np.errstate(invalid="ignore"):
        carried = np.frexp(np.abs(found))[1] != np.frexp(magnitude)[1]
        nearest = (magnitude >= 2**-3) & (magnitude < 2**4)
        compared = nearest | (magnitude >= 2**15) | (~carried & (magnitude >= 2**-14))
    assert compared.sum() > 52000
    assert_same(torch.from_numpy(found[compared]), expected[compared])


def around_every_threshold() -> torch.Tensor:
    codes = oracle.hifloat8_codes()
    table = np.sort(codes[np.isfinite(codes) & (codes >= 0)])
    between = [table[:-1] + (table[1:] - table[:-1]) * quarter / 4 for quarter in range(4)]
    positive = next_to(np.concatenate([*between, [32768.0, 36864.0, 40960.0, 49152.0]]))
    return torch.from_numpy(np.concatenate([positive, -positive]))


def thresholds_of_sr14() -> torch.Tensor:
    """Return values where F, the upper 14 discarded bits, is near T, the lower mantissa bits.

    Random values rarely are.
    """
    mantissa = np.arange(1 << 23)
    t = mantissa % (1 << 14)
    places = [
        (mantissa % (1 << 21) >> 7, [*range(-7, -3), *range(4, 8)]),
        (mantissa % (1 << 22) >> 8, [*range(-15, -7), *range(8, 16)]),
        (mantissa >> 9, list(range(-22, -15))),
        (mantissa + (1 << 23) >> 10, [-23]),
    ]
    rows = [
        mantissa[np.abs(f - t) <= 1] | (exponent + 127) << 23
        for f, exponents in places
        for exponent in exponents
    ]
    return torch.from_numpy(np.concatenate(rows).astype(np.uint32).view(np.float32))


INPUTS = {
    "every bfloat16": every_bfloat16,
    "every float16": every_float16,
    "four million bit patterns": lambda: random_bit_patterns(1 << 22),
    "four million values over every binade": lambda: random_bits_at_every_scale(64).flatten(),
    "around every quarter": around_every_threshold,
    "F next to T": thresholds_of_sr14,
}


def in_numpy(x: torch.Tensor) -> np.ndarray:
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


@overflows
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_it_matches_the_paper_s_rule(make, overflow):
    x = make()
    expected = oracle.fake_quantize_hifloat8_hybrid(in_numpy(x), overflow=overflow)
    for found in (fake_quantize(x, NAMES[overflow]), by_definition(x, NAMES[overflow])):
        assert found.dtype == x.dtype
        assert_same(found.float(), expected)


def test_it_is_odd_and_never_leaves_the_two_neighbors():
    x = random_bits_at_every_scale(64, 1 << 18)
    y = fake_quantize(x, "hifp8:hr")
    assert torch.equal(fake_quantize(-x, "hifp8:hr"), -y + 0.0)
    codes = oracle.hifloat8_codes()
    table = np.sort(codes[np.isfinite(codes) & (codes >= 0)])
    wide = np.minimum(np.abs(x.double().numpy()), 2.0**15)
    index = np.clip(np.searchsorted(table, wide, side="right"), 1, len(table) - 1)
    found = y.abs().double().numpy()
    assert ((found == table[index - 1]) | (found == table[index])).all()


def test_it_is_neither_monotone_nor_idempotent():
    """The rounding depends on the low bits, see the docstring of `hifloat8.py`."""
    assert fake_quantize(torch.tensor([16.0, 16 + ULP]), "hifp8:hr").tolist() == [20.0, 16.0]
    assert fake_quantize(torch.tensor([20.0]), "hifp8:hr").tolist() == [24.0]


def test_in_half_precision_its_own_values_are_fixed_points():
    values = oracle.hifloat8_codes()
    x = torch.from_numpy(values[np.isfinite(values)])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(fake_quantize(x.to(dtype), "hifp8:hr"), x.to(dtype))


def test_a_scaled_tensor_is_float32_whatever_it_came_from():
    x = torch.randn(512, generator=torch.Generator().manual_seed(10)).bfloat16()
    found = fake_quantize(x, "hifp8:t224:hr")
    assert torch.equal(found, fake_quantize(x.float(), "hifp8:t224:hr").bfloat16())
