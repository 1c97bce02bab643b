"""Dot products of matrix units by their definitions, in exact rational arithmetic.

Nothing here is taken from the package: each unit is a function with its numbers written out. The
operands are finite, and no sum overflows.
"""

import functools
import math
from collections.abc import Callable, Sequence

from gmpy2 import mpq as F

from ..rational import floor_log2, power

Numbers = Sequence[float]
Scales = tuple[Numbers, Numbers]
#: exponent of the smallest normal number of each element type
LEAST = {
    "e4m3": -6,
    "e5m2": -14,
    "e3m2": -2,
    "e2m3": 0,
    "e2m1": 0,
    "e4m3fnuz": -7,
    "e5m2fnuz": -15,
    "bfloat16": -126,
    "float16": -14,
    "float32": -126,
}


def exponent(x: F, least: int) -> int:
    return max(floor_log2(abs(x)), least) if x else -126


def cut(x: F, unit: F) -> F:
    return math.trunc(x / unit) * unit


def down(x: F, unit: F) -> F:
    return math.floor(x / unit) * unit


def kept(x: F, bits: int, least: int = -126, *, nearest: bool = False) -> F:
    unit = power(exponent(x, least) - bits)
    return round(x / unit) * unit if nearest else cut(x, unit)


def steps(count: int, length: int) -> list[range]:
    return [range(first, min(first + length, count)) for first in range(0, count, length)]


def nvidia(
    a: Numbers,
    b: Numbers,
    scales: Scales | None,
    elements: tuple[str, str],
    *,
    length: int,
    align: int,
    keep: int,
) -> F:
    """Truncate all terms of a step below the largest exponent, add them, and truncate the sum."""
    least = [LEAST[name] for name in elements]
    running = F(0)
    for step in steps(len(a), length):
        factors = [(F(a[k]), F(b[k])) for k in step]
        shift = F(1)
        if scales is not None:  # E8M0: one scale of A and one of B per step
            shift = F(scales[0][step[0] // length]) * F(scales[1][step[0] // length])
        terms = [x * y * shift for x, y in factors]
        exponents = [
            exponent(x, least[0]) + exponent(y, least[1]) + floor_log2(shift)
            for x, y in factors
            if x and y
        ]
        unit = power(max([*exponents, exponent(running, -126)]) - align)
        running = kept(sum(cut(term, unit) for term in [*terms, running]), keep)
    return running


def promoted(a: Numbers, b: Numbers, scales: Scales | None, elements: tuple[str, str]) -> F:
    """Add Hopper's sum of every 128 products to a float32 sum with a fused multiply-add."""
    total = F(0)
    for number, block in enumerate(steps(len(a), 128)):
        part = slice(block.start, block.stop)
        register = nvidia(a[part], b[part], None, elements, length=32, align=13, keep=13)
        scale = F(1)
        if scales is not None:
            scale = kept(F(scales[0][number]) * F(scales[1][number]), 23, nearest=True)
        total = kept(total + scale * register, 23, nearest=True)
    return total


def fp4(
    a: Numbers,
    b: Numbers,
    scales: Scales | None,
    elements: tuple[str, str],
    *,
    block: int,
    least: int,
) -> F:
    """Add 16 products exactly, scale them, and align four such groups to 35 bits."""
    running = F(0)
    for step in steps(len(a), 64):
        terms, exponents = [running], [exponent(running, -126)]
        for group in (step[first : first + 16] for first in range(0, len(step), 16)):
            pair = [F(1), F(1)]
            if scales is not None:
                pair = [F(side[group[0] // block]) for side in scales]
            terms.append(sum(F(a[k]) * F(b[k]) for k in group) * pair[0] * pair[1])
            exponents.append(sum(exponent(scale, least) for scale in pair))
        unit = power(max(exponents) - 35)
        running = kept(sum(cut(term, unit) for term in terms), 23)
    return running


def cdna3(
    a: Numbers,
    b: Numbers,
    scales: Scales | None,
    elements: tuple[str, str],
    *,
    length: int,
    halves: int,
) -> F:
    """Add the products of a step in one or two halves; round down when two sums are aligned."""
    assert scales is None
    least = [LEAST[name] for name in elements]
    running = F(0)
    for step in steps(len(a), length):
        sums, tops = [], []
        for half in range(halves):
            factors = [(F(a[k]), F(b[k])) for k in step[half::halves]]
            if not factors:
                continue
            exponents = [exponent(x, least[0]) + exponent(y, least[1]) for x, y in factors]
            sums.append(sum(cut(x * y, power(max(exponents) - 24)) for x, y in factors))
            tops.append(max(exponents))
        top = max(tops)
        total = sum(down(each, power(top - 24)) for each in sums)
        own = exponent(running, -126)
        both = max(top, own)
        old = down(running, power(both - 24))
        if halves == 2 and both - own > 25:
            old = F(0)
        running = kept(down(total, power(both - 31)) + old, 23, nearest=True)
    return running


def in_order(
    a: Numbers,
    b: Numbers,
    scales: Scales | None,
    elements: tuple[str, str],
    *,
    bits: int,
    least: int,
) -> F:
    """Add one product after the other, each with one rounding to nearest."""
    running = F(0)
    for x, y in zip(a, b, strict=True):
        running = kept(running + F(x) * F(y), bits, least, nearest=True)
    return running


#: Definition of each simulated accumulator: a function of A, B, scales and element types.
DEFINITIONS: dict[str, Callable[[Numbers, Numbers, Scales | None, tuple[str, str]], F]] = {
    "hopper_fp8": functools.partial(nvidia, length=32, align=13, keep=13),
    "hopper_fp8_promote128": promoted,
    "hopper_bf16": functools.partial(nvidia, length=16, align=25, keep=23),
    "ada_fp8": functools.partial(nvidia, length=16, align=13, keep=13),
    "ampere_bf16": functools.partial(nvidia, length=8, align=24, keep=23),
    "volta_fp16": functools.partial(nvidia, length=4, align=23, keep=23),
    "blackwell_fp8": functools.partial(nvidia, length=32, align=25, keep=23),
    "blackwell_bf16": functools.partial(nvidia, length=16, align=25, keep=23),
    "blackwell_mx": functools.partial(nvidia, length=32, align=25, keep=23),
    "blackwell_mxfp4": functools.partial(fp4, block=32, least=-127),
    "blackwell_nvfp4": functools.partial(fp4, block=16, least=-6),
    "cdna3_fp8": functools.partial(cdna3, length=16, halves=2),
    "cdna3_bf16": functools.partial(cdna3, length=8, halves=1),
    "bf16": functools.partial(in_order, bits=7, least=-126),
    "fp16": functools.partial(in_order, bits=10, least=-14),
    "fda:l24:f10:m9:rz": functools.partial(nvidia, length=24, align=10, keep=9),
}
