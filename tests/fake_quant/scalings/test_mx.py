"""E8M0 block scales, and values quantized with them."""

import numpy as np
import pytest
import torch
from gmpy2 import mpq as Fraction

from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.block_scaling import BlockScaling
from megatron.fake_quant.elements import ELEMENTS
from megatron.fake_quant.names import get_element
from megatron.fake_quant.scalings.mx import NAN_BYTE, scale_bytes, scale_reciprocals, scale_values
from tests.fake_quant import oracle
from tests.fake_quant.inputs import (
    assert_same,
    every_bfloat16,
    every_float16,
    next_to,
    random_bit_patterns,
    rows_at_every_scale,
)

RULES = oracle.RULES
ULP = 2.0**-23  #: distance to the next float32 number at 1
MX_NAMES = ["mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8"]
rules = pytest.mark.parametrize("rule", RULES)
elements = pytest.mark.parametrize("element", [*ELEMENTS, "e3m4", "e2m2", "e3m0", "e6m1"])


def scale_exponent(amax: float, element: str, rule: str) -> int:
    return (
        int(scale_bytes(torch.tensor([amax]), get_element(element), BlockScaling(32, rule))) - 127
    )


def quantized_block(values: list[float], name: str) -> list[float]:
    return fake_quantize(torch.tensor(values), name).tolist()


@pytest.mark.parametrize(
    ("element", "rule", "amax", "expected"),
    [
        # E4M3: emax 8, maximum 448 = 1.75 * 2^8. The OCP rule is floor(log2 amax) - 8.
        ("e4m3", "floor", 256.0, 0),
        ("e4m3", "floor", 448.0, 0),
        ("e4m3", "floor", 511.0, 0),  # saturates
        ("e4m3", "floor", 512.0, 1),
        ("e4m3", "floor", 1.0, -8),
        # One ulp below 2^k, log2 in float32 is k, so microxcaling and quark are one too high.
        ("e4m3", "floor", 512.0 * (1 - ULP / 2), 0),
        ("e2m1", "floor", 1.0 - ULP / 2, -3),
        # RCEIL: 448 just fits, the next float32 does not (torchao's log2 misses that with E2M1).
        ("e4m3", "rceil", 448.0, 0),
        ("e4m3", "rceil", 448.0 * (1 + ULP), 1),
        ("e2m1", "rceil", 6.0, 0),
        ("e2m1", "rceil", np.nextafter(np.float32(6), np.float32(7)), 1),
        ("e2m1", "rceil", 12.0, 1),
        ("e2m1", "rceil", 4.0, 0),  # 4 <= 6 * 2^0, but not 6 * 2^-1
        ("e2m1", "rceil", 3.0, -1),
        # CEIL: only a power of two keeps its own scale (quark's log2 misses one ulp above).
        ("e2m1", "ceil", 4.0, 0),
        ("e2m1", "ceil", 4.0 * (1 + ULP), 1),
        ("e2m1", "ceil", 7.9, 1),
        # EVEN: E2M1 has 2 significand bits; 7 = 1.75 * 2^2 is half-way from 1.5 to 2, and goes up.
        ("e2m1", "even", 6.9, 0),
        ("e2m1", "even", 7.0, 1),
        ("e4m3", "even", 495.9, 0),  # 1.9375 * 2^8 = 496 is half-way from 1.875 to 2
        ("e4m3", "even", 496.0, 1),
        # The ends of the range: 2^-149, the smallest float32, would need the scale 2^-157.
        ("e4m3", "floor", 2.0**-149, -127),
        ("e4m3", "floor", 2.0**-119, -127),
        ("e4m3", "floor", 2.0**-118, -126),
        ("e5m2", "rceil", 2.0**-149, -127),
        ("e4m3", "floor", 2.0**128 * (1 - ULP / 2), 119),
        ("e2m1", "ceil", 2.0**128 * (1 - ULP / 2), 126),
        ("int8", "floor", 2.0**127, 127),
        ("int8", "rceil", 2.0**128 * (1 - ULP / 2), 127),  # 2^128 would be needed
        ("e4m3", "floor", 0.0, -127),
        ("int8", "ceil", 0.0, -127),
    ],
)
def test_named_scales(element, rule, amax, expected):
    assert scale_exponent(float(amax), element, rule) == expected


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def exact_scale_exponent(amax: float, element: str, rule: str) -> int:
    """Return the scale exponent by the rules' definitions in rational numbers, for amax > 0."""
    fmt, amax_q = get_element(element), Fraction(amax)
    emax = floor_log2(Fraction(oracle.code_points(element)[-1]))
    if rule == "floor":
        exponent = floor_log2(amax_q) - emax
    elif rule == "ceil":
        exponent = -floor_log2(1 / amax_q) - emax
    elif rule == "rceil":
        exponent = -floor_log2(Fraction(fmt.max) / amax_q)
    else:
        unit = Fraction(2) ** (floor_log2(amax_q) - fmt.mantissa_bits)
        exponent = floor_log2((amax_q / unit + Fraction(1, 2)).__floor__() * unit) - emax
    return min(max(exponent, -127), 127)


@rules
@elements
def test_scales_are_exact_in_every_binade(element, rule):
    """The inputs are one and two ulps around powers of two, max * 2^k and the carries of EVEN."""
    fmt = get_element(element)
    carry = 2 - 2.0 ** -(1 + fmt.mantissa_bits)
    binades = np.ldexp(1.0, np.arange(-149, 128))
    amax = next_to(np.concatenate([binades, binades * np.frexp(fmt.max)[0] * 2, binades * carry]))
    amax = amax[amax > 0]
    found = scale_bytes(torch.from_numpy(amax), fmt, BlockScaling(32, rule)).numpy() - 127
    np.testing.assert_array_equal(
        found, oracle.scale_exponents(amax.astype(np.float64), element, rule)
    )
    some = slice(None, None, 7)
    exact = [exact_scale_exponent(a, element, rule) for a in amax[some].tolist()]
    assert found[some].tolist() == exact


def test_scale_bytes_stand_for_powers_of_two():
    byte = torch.arange(256, dtype=torch.int32)
    numbers = np.ldexp(1.0, np.arange(-127, 128))
    assert_same(scale_values(byte), np.append(numbers, np.nan))
    assert_same(scale_reciprocals(byte), np.append(1 / numbers, np.nan))


def test_nan_and_inf_maxima_have_the_nan_byte():
    amax = torch.tensor([torch.nan, torch.inf, 0.0])
    assert scale_bytes(amax, get_element("e4m3"), BlockScaling(32, "floor")).tolist() == [
        NAN_BYTE,
        NAN_BYTE,
        0,
    ]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        # An amax of 448 has scale 1 in E4M3, and so has an amax of 500, which saturates.
        ("mxfp8", [448.0, 17.0, -19.0, 2**-10], [448.0, 16.0, -20.0, 0.0]),
        ("mxfp8", [500.0, 17.0], [448.0, 16.0]),
        # RCEIL takes scale 2 instead: 250 lies between 240 and 256, 8.5 half-way from 8 to 9.
        ("mx:e4m3:b32:rceil", [500.0, 17.0], [512.0, 16.0]),
        # amax 5 has scale 1 in E2M1 and is half-way from 4 to 6.
        ("mxfp4", [5.0, 0.25, 0.3, -0.75], [4.0, 0.0, 0.5, -1.0]),
        ("mxfp4", [7.9, 1.0], [6.0, 1.0]),
        ("mxfp4", [8.0, 1.0], [8.0, 1.0]),  # scale 2: 4 and .5
        ("mxfp4", [8.0, 0.5], [8.0, 0.0]),  # .25 is half-way from 0 to .5
        # INT8: amax 1 has scale 1, and 1/128 is half-way from 0 to 1/64.
        ("mxint8", [1.0, 1 / 128, 3 / 128], [1.0, 0.0, 2 / 64]),
        ("mxint8", [1.999, -1.999], [127 / 64, -127 / 64]),
        # Scale 2^-127 (byte 0): the smallest float32, 2^-149, is 2^-22 of it, below half of 2^-9.
        ("mxfp8", [2.0**-149], [0.0]),
        # 2^-136 is the smallest number at this scale, and 2^-137 half of it. torchao multiplies by
        # 1 instead of 2^127 here and gives 0.
        ("mxfp8", [2.0**-120, 2.0**-136, 2.0**-137], [2.0**-120, 2.0**-136, 0.0]),
        ("mxfp8", [3 * 2.0**-137, 5 * 2.0**-137], [2.0**-135, 2.0**-135]),  # 1.5 and 2.5 of them
        ("mxfp4", [2.0**-128, 2.0**-129], [2.0**-128, 0.0]),  # half of the scale, a quarter of it
        ("mxint8", [2.0**-127], [2.0**-127]),
        # Scale 2^127, the other end, whose reciprocal is a subnormal.
        ("mxint8", [2.0**127, 2.0**120], [2.0**127, 0.0]),  # 2^120 is half of 2^127 / 64
        ("mxint8", [2.0**127, 3 * 2.0**120], [2.0**127, 2.0**122]),
        # The floor rule never overflows: the largest float32 becomes 1.75 * 2^127 in E4M3.
        ("mxfp8", [2.0**128 * (1 - ULP / 2)], [1.75 * 2.0**127]),
        # RCEIL rounds it up to 2^128, which is not a float32 number, so it becomes Inf.
        ("mx:e4m3:b32:rceil", [2.0**128 * (1 - ULP / 2)], [np.inf]),
    ],
)
def test_named_blocks(name, values, expected):
    assert quantized_block(values, name) == expected


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp4", "mxint8"])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_a_special_value_makes_its_whole_block_nan_and_no_other(name, special):
    """E8M0 has NaN and no Inf. microxcaling and quark agree; torchao keeps the Inf."""
    x = torch.ones(3, 32)
    x[1, 17] = special
    y = fake_quantize(x.flatten(), name).view(3, 32)
    assert y[1].isnan().all()
    assert (y[0] == 1).all()
    assert (y[2] == 1).all()


@pytest.mark.parametrize("name", ["mxfp8", "mxfp6_e2m3", "mxfp4", "mx:e3m4:b16:rceil"])
def test_zeros_stay_zeros_and_keep_their_signs(name):
    y = fake_quantize(torch.tensor([0.0, -0.0] * 16), name)
    assert (y == 0).all()
    assert y.signbit().tolist() == [False, True] * 16


def test_underflow_keeps_the_sign_where_there_is_a_negative_zero():
    tiny = torch.tensor([1.0, -1e-9, 1e-9])
    assert fake_quantize(tiny, "mxfp8").signbit().tolist() == [False, True, False]
    assert fake_quantize(tiny, "mxint8").signbit().tolist() == [False, False, False]


@rules
@elements
def test_float32_matches_exact_arithmetic(element, rule):
    """The inputs are random bit patterns, and rows at every scale from underflow to overflow.

    Exact arithmetic is the reference, because each library errs somewhere in these inputs; the
    named cases above say which and where.
    """
    x = torch.cat([random_bit_patterns(1 << 17).view(-1, 32), rows_at_every_scale()])
    found = fake_quantize(x, f"mx:{element}:b32:{rule}")
    assert_same(found, oracle.fake_quantize_mx(x.numpy(), element, rule))


@pytest.mark.parametrize("name", MX_NAMES)
def test_four_million_bit_patterns_match_exact_arithmetic(name):
    x = random_bit_patterns(1 << 22).view(-1, 32)
    fmt = get_format(name)
    expected = oracle.fake_quantize_mx(x.numpy(), fmt.element.name, "floor")
    assert_same(fake_quantize(x, fmt), expected)


@rules
@pytest.mark.parametrize("element", ["e4m3", "e2m1", "e3m4"])
def test_blocks_of_bfloat16_and_float16_match_exact_arithmetic(element, rule):
    """Every value of the type, shuffled into blocks; the result is a value of the type again."""
    generator = torch.Generator().manual_seed(1)
    for every in (every_bfloat16(), every_float16()):
        finite = every[every.isfinite()]
        shuffled = finite[torch.randperm(len(finite), generator=generator)]
        in_order = finite[: len(finite) // 32 * 32].view(-1, 32)
        for x in (shuffled[: len(finite) // 32 * 32].view(-1, 32), in_order):
            found = fake_quantize(x, f"mx:{element}:b32:{rule}")
            assert found.dtype == x.dtype
            exact = oracle.fake_quantize_mx(x.float().numpy(), element, rule)
            kept = torch.from_numpy(np.abs(exact) <= torch.finfo(x.dtype).max)
            assert_same(found.float()[kept], exact[kept.numpy()])
            assert found[~kept].isinf().all()
            assert rule != "floor" or kept.all()


@rules
@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
def test_every_bfloat16_alone_in_its_block(element, rule):
    x = every_bfloat16()
    found = fake_quantize(x, f"mx:{element}:b1:{rule}")
    exact = oracle.fake_quantize_mx(x.float().numpy()[:, None], element, rule)[:, 0]
    too_large = np.abs(exact) > torch.finfo(torch.bfloat16).max
    assert_same(found.float(), np.where(too_large, np.copysign(np.inf, exact), exact))


# Properties.

property_names = pytest.mark.parametrize(
    "name",
    MX_NAMES + [f"mx:{element}:b16:{rule}" for element in ("e4m3", "e2m1") for rule in RULES[1:]],
)


@property_names
def test_it_is_idempotent(name):
    """The maximum of a block may shrink, but never so far that a finer scale changes a value."""
    x = torch.cat([rows_at_every_scale(), random_bit_patterns(1 << 16).view(-1, 32)])
    once = fake_quantize(x, name)
    once = once[~once.isinf().any(dim=1)]  # rounded up past the largest float32
    assert_same(fake_quantize(once, name), once.numpy())


@property_names
def test_it_is_odd(name):
    x = rows_at_every_scale()
    minus_y = -fake_quantize(x, name).numpy()
    assert_same(fake_quantize(-x, name), minus_y + 0.0 if name == "mxint8" else minus_y)


@property_names
def test_it_is_monotone_within_a_block(name):
    x = torch.linspace(-1, 1, 32 * 999).view(32, 999).t().sort(dim=-1).values.contiguous()
    assert (fake_quantize(x, name).diff(dim=-1) >= 0).all()


@property_names
def test_it_scales_with_powers_of_two(name):
    """This holds until a scale reaches an end; scales of 2^-100 to 2^100 do not."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
    for exponent in (-80, -3, 1, 80):
        factor = 2.0**exponent
        assert torch.equal(fake_quantize(x * factor, name), fake_quantize(x, name) * factor)


@rules
@pytest.mark.parametrize("element", ["e4m3", "e2m1", "int8", "e3m4"])
def test_the_error_is_at_most_half_an_ulp_unless_the_value_saturates(element, rule):
    fmt = get_element(element)
    x = torch.randn(4096, 32, generator=torch.Generator().manual_seed(4))
    y = fake_quantize(x, f"mx:{element}:b32:{rule}").double().numpy()
    x = x.double().numpy()
    scale = np.ldexp(1.0, oracle.scale_exponents(np.abs(x).max(1, keepdims=True), element, rule))
    exponent = np.clip(np.frexp(x / scale)[1] - 1, fmt.emin, fmt.emax)
    ulp = np.ldexp(scale, exponent - fmt.mantissa_bits)
    saturates = np.abs(x) > fmt.max * scale
    assert (np.abs(x - y) <= ulp / 2)[~saturates].all()
    assert (np.abs(y) == fmt.max * scale)[saturates].all()
    assert saturates.any() == (rule in ("floor", "even"))


@pytest.mark.parametrize(("width", "same"), [(64, True), (48, False)])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4"])
def test_blocks_begin_anew_at_each_shard(name, width, same):
    """Results under tensor parallelism equal those of one rank only if blocks divide the shards."""
    x = torch.randn(64, 2 * width, generator=torch.Generator().manual_seed(0))
    shards = torch.cat([fake_quantize(x[:, :width], name), fake_quantize(x[:, width:], name)], 1)
    assert torch.equal(shards, fake_quantize(x, name)) == same
