"""Define what each accumulator returns for one dot product, in exact integer arithmetic.

This is the definition that every faster implementation must match bit for bit (the payload of a NaN
excepted). It is meant to be read; a product takes about ten microseconds. The design "torch" has no
definition here, because torch.matmul chooses its own order.

Numbers are integers in units of 2^-640, fine enough for every product of float32 numbers and two
E8M0 scales.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron.fake_quant.accumulate.accumulator import (
    FP32_NEAREST,
    GROUP,
    OVERFLOW_EXPONENT,
    RUNNING_BITS,
    STAGE_BITS,
    ZERO_EXPONENT,
    Accumulator,
    SumType,
)

_POINT = 640  #: fractional bits of the integers that stand for numbers
_ONE = 1 << _POINT
_OVERFLOW = math.ldexp(1, OVERFLOW_EXPONENT)


class _Term(NamedTuple):
    """Number to be added, and the exponent by which it is aligned."""

    value: int
    exponent: int


class _Factors(NamedTuple):
    """Two elements to be multiplied, and the scales of their blocks."""

    elements: tuple[float, float]
    scales: tuple[float, float]

    @property
    def product(self) -> float:
        """Product of both elements and both scales in float64; exact unless it is NaN or Inf."""
        (a, b), (scale_a, scale_b) = self
        return a * b * scale_a * scale_b


def dot(
    a: Sequence[float],
    b: Sequence[float],
    accumulator: Accumulator,
    *,
    smallest: tuple[int, int] = (ZERO_EXPONENT, ZERO_EXPONENT),
    scales: tuple[Sequence[float], Sequence[float]] | None = None,
    start: float = 0.0,
) -> float:
    """Return the sum of all `a[k] * b[k]` as `accumulator` computes it.

    Args:
        a: float32 numbers, which lie on the grid of an element type.
        b: the same number of float32 numbers, which lie on the grid of the other element type.
        accumulator: any accumulator whose design is not "torch".
        smallest: exponents of the smallest normal numbers of the two element types.
        scales: scales of the blocks of `a` and of `b`, if `accumulator` has block scales; None if
            all are 1.
        start: float32 number to which the products are added (C in D = A B + C). If there is a
            second sum, it begins with this number; otherwise, the running sum does. The number
            need not fit the type of the sum: the first step truncates it like any other term.
    """
    assert accumulator.simulated, accumulator.name
    interval = accumulator.promote_every
    inside = scales is not None and accumulator.scales in ("exponents", "significands")
    running, promoted = (0.0, start) if interval else (start, 0.0)
    for first in range(0, len(a), accumulator.step):
        last = min(first + accumulator.step, len(a))
        factors = [
            _Factors((a[k], b[k]), _at(scales, k, accumulator) if inside else (1.0, 1.0))
            for k in range(first, last)
        ]
        running = _step(factors, running, accumulator, smallest)
        if interval and (last % interval == 0 or last == len(a)):
            scale = 1.0 if scales is None else _product(*_at(scales, first, accumulator))
            promoted = _multiplied_and_added(running, scale, promoted, accumulator.promote_to)
            running = 0.0
    return promoted if interval else running


def _at(
    scales: tuple[Sequence[float], Sequence[float]] | None, k: int, accumulator: Accumulator
) -> tuple[float, float]:
    """Return the scales of the blocks that contain the elements at index `k`."""
    assert scales is not None
    assert accumulator.scale_block is not None, accumulator.name
    block = k // accumulator.scale_block
    return scales[0][block], scales[1][block]


def _step(
    factors: list[_Factors], running: float, accumulator: Accumulator, smallest: tuple[int, int]
) -> float:
    """Return the running sum after the products of one step are added."""
    special = _special([*(each.product for each in factors), running])
    if special is not None:
        return special
    start = _Term(_fixed(running), _exponent(running, accumulator.keep.smallest_exponent))
    if accumulator.design == "two_stage":
        overflow = _special([_overflowing(each.product) for each in factors])
        if overflow is not None:
            return overflow
        return _rounded(
            _two_stages(_products(factors, smallest), start, accumulator), accumulator.keep
        )
    if accumulator.design == "grouped":
        total = _aligned_sum([*_groups(factors, accumulator), start], accumulator.align_bits)
    elif accumulator.design == "fused":
        products = [term for term in _products(factors, smallest) if term.value]
        total = _aligned_sum([*products, start], accumulator.align_bits)
    else:
        raise AssertionError(f"no rule for the design {accumulator.design!r}")
    return _rounded(total, accumulator.keep) + 0.0  # adding 0 turns -0 into +0


def _special(numbers: list[float]) -> float | None:
    """Return the sum of numbers if any of them is NaN or Inf, otherwise None.

    The sum is NaN if a number is NaN or if there are infinities of both signs. A sum of finite
    numbers does not overflow.
    """
    infinities = {number for number in numbers if math.isinf(number)}
    if len(infinities) == 2 or any(map(math.isnan, numbers)):
        return math.nan
    return infinities.pop() if infinities else None


def _overflowing(product: float) -> float:
    """Return an infinity for a product beyond float32's largest exponent, otherwise the product."""
    return math.copysign(math.inf, product) if abs(product) >= _OVERFLOW else product


def _products(factors: list[_Factors], smallest: tuple[int, int]) -> list[_Term]:
    """Return each product as a term whose exponent is the sum of its factors' exponents."""
    return [
        _Term(
            _fixed(each.product),
            sum(_exponent(x, least) for x, least in zip(each.elements, smallest, strict=True))
            + sum(_exponent(scale, -127) for scale in each.scales),
        )
        for each in factors
    ]


def _groups(factors: list[_Factors], accumulator: Accumulator) -> list[_Term]:
    """Return each group's exact sum as a term; its exponent is the sum of its scales' exponents."""
    groups = [factors[first : first + GROUP] for first in range(0, len(factors), GROUP)]
    return [
        _Term(
            sum(_fixed(each.product) for each in group),
            sum(_exponent(scale, accumulator.smallest_scale) for scale in group[0].scales),
        )
        for group in groups
    ]


def _two_stages(products: list[_Term], start: _Term, accumulator: Accumulator) -> int:
    """Return the sum of the products and `start` in the design "two_stage", before rounding."""
    bits, parts = accumulator.align_bits, accumulator.interleave
    assert bits is not None
    sums = []
    for first in range(min(parts, len(products))):
        part = products[first::parts]
        sums.append(_Term(_aligned_sum(part, bits), max(term.exponent for term in part)))
    largest = max(term.exponent for term in sums)
    total = sum(_floor(term.value, largest - bits) for term in sums)
    top = max(largest, start.exponent)
    if parts > 1 and start.exponent < top - RUNNING_BITS - 1:
        return _floor(total, top - STAGE_BITS)  # the running sum is lost, even if it is negative
    return _floor(total, top - STAGE_BITS) + _floor(start.value, top - RUNNING_BITS)


def _aligned_sum(terms: list[_Term], bits: int | None) -> int:
    """Return the sum of terms, each truncated to `bits` bits below the largest exponent."""
    if bits is None:
        return sum(term.value for term in terms)
    lowest = max(term.exponent for term in terms) - bits
    return sum(_truncated(term.value, lowest) for term in terms)


def _multiplied_and_added(x: float, scale: float, addend: float, kept: SumType) -> float:
    """Return `x * scale + addend` with a single rounding (FMA), as in IEEE 754."""
    special = _special([x * scale, addend])
    if special is not None:
        return special
    total = _fixed(x * scale) + _fixed(addend)
    return _rounded(total, kept) if total else x * scale + addend  # a zero sum has a sign


def _product(x: float, y: float) -> float:
    """Return the float32 product of two float32 scales, as in IEEE 754."""
    special = _special([x * y])
    if special is not None:
        return special
    return _rounded(_fixed(x * y), FP32_NEAREST) if x * y else x * y


def _exponent(x: float, smallest: int) -> int:
    """Return the exponent of a finite number, at least `smallest`; `ZERO_EXPONENT` for 0."""
    return ZERO_EXPONENT if x == 0 else max(math.frexp(x)[1] - 1, smallest)


def _fixed(x: float) -> int:
    """Return a finite number in units of 2^-640."""
    above, below = x.as_integer_ratio()
    return above * (_ONE // below)


def _floor(value: int, exponent: int) -> int:
    """Return the largest multiple of 2^exponent that is not above `value`."""
    unit = _POINT + exponent
    return value >> unit << unit


def _truncated(value: int, exponent: int) -> int:
    """Return `value`, rounded toward zero to a multiple of 2^exponent."""
    return _floor(value, exponent) if value >= 0 else -_floor(-value, exponent)


def _rounded(value: int, kept: SumType) -> float:
    """Return a sum, rounded to the number type `kept`; a negative sum may become -0."""
    exponent = max(abs(value).bit_length() - 1 - _POINT, kept.smallest_exponent)
    unit = exponent - kept.mantissa_bits
    magnitude = _truncated(abs(value), unit)
    if kept.rounding == "rne":
        twice, whole = 2 * (abs(value) - magnitude), 1 << (_POINT + unit)
        odd = magnitude >> (_POINT + unit) & 1
        magnitude += whole if twice > whole or (twice == whole and odd) else 0
    elif kept.rounding != "rz":
        raise AssertionError(f"no rule for the rounding {kept.rounding!r}")
    if magnitude >= 1 << (_POINT + kept.largest_exponent + 1):
        return math.copysign(math.inf, value)
    return math.copysign(magnitude / _ONE, value)
