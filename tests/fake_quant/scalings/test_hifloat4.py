"""HiFloat4 against the authors' script, exact arithmetic and cases worked out by hand."""

import math

import numpy as np
import pytest
import torch
from gmpy2 import mpq as Fraction

from megatron.fake_quant import fake_quantize, quantize
from megatron.fake_quant.quantize import checked
from megatron.fake_quant.scalings.hifloat4 import NAN_BYTE
from tests.fake_quant import references
from tests.fake_quant.inputs import (
    assert_same,
    by_definition,
    every_bfloat16,
    every_float16,
    next_to,
    random_bit_patterns,
    random_bits_at_every_scale,
    rows_at_every_scale,
    with_special_blocks,
)
from tests.fake_quant.kernel_inputs import bits
from tests.fake_quant.oracle_scaled import E6M2, fake_quantize_hifloat4

kinds = pytest.mark.parametrize("kind", references.KINDS)
dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def scale_byte(amax: float) -> int:
    return int(quantize(torch.tensor([amax]), "hifp4").scales.block()[0, 0])


@pytest.mark.parametrize(
    ("amax", "exponent", "mantissa"),
    [
        # bf16(1/7) = 146 / 1024 = 0.142578125, just below 1/7 = 0.142857...
        (7.0, 0, 0),  # 7 * 146 / 1024 is half-way from 0.99609375 to 1 in 8 bits: to even, 1
        (1.0, -3, 1),  # 146 / 1024 is 1.140625 * 2^-3, above the half-way 1.125
        (8.0, 0, 1),
        (7.75, 0, 0),  # 1.10498 is 1.1015625 in 8 bits, below 1.125
        (7.9, 0, 0),  # 1.12637 is 1.125 in 8 bits, half-way from 1 to 1.25: to even, 1
        (7.94, 0, 1),  # 1.13207 is 1.1328125 in 8 bits
        (9.7, 0, 2),  # 1.38301 becomes 1.3828125, above 1.375, half-way from 1.25 to 1.5
        (13.2, 1, 0),  # 1.88203 is 1.8828125, above 1.875, half-way from 1.75 to 2
        (7 * 2.0**-48, -48, 0),
        (1e-30, -48, 0),  # nothing is smaller
        (0.0, -48, 0),
        (7 * 1.5 * 2.0**15, 15, 2),
        (1e30, 15, 2),  # nothing is larger: 1.75 * 2^15 is the code of NaN
    ],
)
def test_named_scales(amax, exponent, mantissa):
    assert scale_byte(amax) == (exponent + 48) * 4 + mantissa


@pytest.mark.parametrize(
    ("values", "e8", "e16", "expected"),
    [
        # E6M2 is 1 for a largest magnitude of 7, R = 1. Four neighbors have e16 where their
        # largest is >= 2 (>= 4 with e8), eight have e8 where it is >= 4.
        ([7.0] * 4 + [3.9] * 4, [1] + [0] * 7, [1, 0], [7.0] * 4 + [3.5] * 4),
        ([7.0] + [0] * 3 + [4.1] * 4, [1] + [0] * 7, [1, 1], [7.0] + [0] * 3 + [4.0] * 4),
        # Elements are quarters up to 1.75, ties away from zero: 1/8 goes to 1/4, 1.875 saturates.
        (
            [7.0] + [0.0] * 7 + [1.9, 1.875, 0.125, 0.12, -0.125, -0.12, 0.375, 1.7],
            [1] + [0] * 7,
            [1, 0, 0, 0],
            [7.0] + [0.0] * 7 + [1.75, 1.75, 0.25, 0.0, -0.25, -0.0, 0.5, 1.75],
        ),
        # e16 without e8, and the next one below 2.
        (
            [7.0] + [0.0] * 7 + [2.0, 0.25, 0.24, -1.25, 1.0, 0.125, 0.12, 0.0],
            [1, 0],
            [1, 0, 1, 0],
            [7.0] + [0.0] * 7 + [2.0, 0.5, 0.0, -1.5, 1.0, 0.25, 0.0, 0.0],
        ),
    ],
)
def test_named_groups(values, e8, e16, expected):
    scales = quantize(torch.tensor(values), "hifp4").scales.block()[0].numpy()
    assert scales[0] == 48 * 4
    assert np.unpackbits(scales[1:2])[: len(e8)].tolist() == e8
    assert np.unpackbits(scales[2:])[: len(e16)].tolist() == e16
    assert_same(fake_quantize(torch.tensor(values), "hifp4"), np.array(expected))


def exact_group(group: list[float]) -> list[Fraction]:
    """Return algorithm 1 of arXiv 2602.11287 in rational numbers, for a nonzero group."""

    def rounded(x: Fraction, bits: int) -> Fraction:
        unit = Fraction(1)
        while x >= unit * 2**bits:
            unit *= 2
        while x < unit * 2 ** (bits - 1):
            unit /= 2
        return round(x / unit) * unit  # Python's `round` takes ties to even

    magnitude = [Fraction(abs(x)) for x in group]
    seventh = rounded(Fraction(1, 7), 8)
    e6m2 = rounded(rounded(max(magnitude) * seventh, 8), 3)
    e6m2 = min(max(e6m2, Fraction(1, 2**48)), Fraction(3 * 2**14))
    scaled = [x * rounded(1 / e6m2, 8) for x in magnitude]
    values = []
    for i, x in enumerate(scaled):
        power = 2 if max(scaled[i // 8 * 8 : i // 8 * 8 + 8]) >= 4 else 1
        power *= 2 if max(scaled[i // 4 * 4 : i // 4 * 4 + 4]) / power >= 2 else 1
        element = min(Fraction((x / power * 4 + Fraction(1, 2)).__floor__(), 4), Fraction(7, 4))
        values.append(element * power * e6m2 * (-1 if group[i] < 0 else 1))
    return values


def test_it_matches_rational_numbers():
    x = rows_at_every_scale(64)[::9]
    x = x[x.isfinite().all(1) & (x != 0).any(1)]
    assert len(x) > 200
    assert [[Fraction(value) for value in row] for row in fake_quantize(x, "hifp4").tolist()] == [
        exact_group(row) for row in x.tolist()
    ]


@kinds
@dtypes
def test_elements_and_scales_are_those_of_the_authors(kind, dtype):
    found = quantize(references.tensor(kind, dtype), "hifp4")
    np.testing.assert_array_equal(
        references.nibbles(found.codes), references.expected_nibbles(kind, dtype, "hifp4")
    )
    np.testing.assert_array_equal(
        found.scales.block().numpy(), references.expected(kind, dtype, "hifp4/scales")
    )


def check(x: torch.Tensor) -> None:
    expected = fake_quantize_hifloat4(x.float().numpy())
    for found in (fake_quantize(x, "hifp4"), by_definition(x, "hifp4")):
        assert found.dtype == x.dtype
        assert_same(found.float(), expected)


@pytest.mark.parametrize("make", [every_bfloat16, every_float16], ids=["bfloat16", "float16"])
def test_every_half_precision_value_matches_exact_arithmetic(make):
    """Groups hold neighbors and, shuffled, all values; results are values of the dtype."""
    x = make()
    check(x.view(-1, 64))
    finite = x[x.isfinite()]
    shuffled = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(8))]
    check(shuffled[: len(finite) // 64 * 64].view(-1, 64))


INPUTS = {
    "four million bit patterns": lambda: random_bit_patterns(1 << 22).view(-1, 64),
    "four million values over every binade": lambda: random_bits_at_every_scale(64),
    "rows at every scale": lambda: with_special_blocks(rows_at_every_scale(64)),
}


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_it_matches_exact_arithmetic(make):
    check(make())


def test_largest_magnitudes_next_to_every_tie_match_exact_arithmetic():
    """One and two ulps around 7 times each scale, the half-way cases, and powers of two."""
    scales = np.concatenate([E6M2, (E6M2[1:] + E6M2[:-1]) / 2])
    seventh = 146 / 1024
    amax = next_to(
        np.concatenate([7 * scales, scales / seventh, np.ldexp(1.0, np.arange(-60, 30))])
    )
    x = np.linspace(-1, 1, 64, dtype=np.float32) * amax[:, None]
    check(torch.from_numpy(x))


@pytest.mark.parametrize(
    ("top", "mantissa", "reciprocal"),
    [(7.0, 0, 1.0), (8.0, 1, 205 / 256), (10.5, 2, 171 / 256), (12.5, 3, 146 / 256)],
)
def test_values_next_to_every_tie_of_elements_match_exact_arithmetic(top, mantissa, reciprocal):
    """One and two ulps around each eighth, with R = bf16(1 / E6M2) of every mantissa.

    In some of them the product is below a tie by less than half an ulp of float32.
    """
    assert scale_byte(top) == 48 * 4 + mantissa
    ties = next_to(np.arange(1, 64) / 8 / reciprocal)
    ties = ties[ties < top]
    products = ties.astype(np.float64) * reciprocal * 8
    rounded = products.astype(np.float32)
    hidden = (rounded == np.round(rounded)) & (products < rounded)
    assert hidden.any() == (mantissa > 0)
    groups = np.resize(ties, (-(-len(ties) // 63), 63))
    check(torch.from_numpy(np.insert(groups, 0, top, axis=1)))


def next_to_every_threshold() -> torch.Tensor:
    """Return groups with values next to each eighth, in units of each scale and beyond."""
    groups = []
    for top, reciprocal in ((7.0, 1.0), (8.0, 205 / 256), (10.5, 171 / 256), (12.5, 146 / 256)):
        ties = next_to(np.arange(1, 64) / 8 / reciprocal)
        ties = ties[ties < top]
        values = np.resize(ties, (-(-len(ties) // 63), 63))
        groups.append(np.insert(values, 0, top, axis=1))
    units = np.ldexp(np.float32(1), np.arange(-50, 18)).reshape(-1, 1, 1)
    return torch.from_numpy((np.concatenate(groups) * units).astype(np.float32).reshape(-1, 64))


@pytest.mark.parametrize("shape", [(1, -1), (64, -1), (-1, 64, 2), (-1, 67), (3, -1), (-1, 1030)])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_cpu_kernel_has_the_reference_s_bits_next_to_every_threshold(shape, axis):
    """The kernel compares integers where the reference compares float64 products."""
    pytest.importorskip("numba")
    from megatron.fake_quant.fused import numba_launch

    values = next_to_every_threshold()
    columns = math.prod(size for size in shape if size > 0)
    for x in (values, values.t()):
        x = x.flatten()[: values.numel() // columns * columns].view(shape)
        for tensor in (x, x.bfloat16()):
            expected = by_definition(tensor, "hifp4", axis)
            found = numba_launch.fake_quantize(tensor, *checked(tensor, "hifp4", axis), None)
            assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_a_special_value_makes_its_group_nan_and_no_other(special):
    x = torch.ones(3, 64)
    x[1, 17] = special
    y = fake_quantize(x.flatten(), "hifp4").view(3, 64)
    assert y[1].isnan().all()
    assert (y[0] == y[2]).all()
    assert y[0].isfinite().all()
    scales = quantize(x, "hifp4").scales.block()
    assert (scales[..., 0, 0] == NAN_BYTE).tolist() == [False, True, False]


def test_zeros_keep_their_signs():
    x = torch.tensor([0.0, -0.0] * 40)
    assert_same(fake_quantize(x, "hifp4"), x.numpy())
    assert scale_byte(0.0) == 0
