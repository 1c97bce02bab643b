"""Find which values a format clips, in rational arithmetic that shares no code with the program.

A value is clipped if it would round to more than the format's largest number with an unbounded
exponent range. This module follows the specifications: OCP Microscaling v1.0, arXiv 2509.25149 for
NVFP4, arXiv 2409.16626 for HiFloat8 and arXiv 2602.11287 for HiFloat4. Where a format prescribes
float32 arithmetic (NVFP4, scales of a tensor), numpy's float32 does each operation.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from gmpy2 import mpq as Fraction

#: Mantissa bits, largest number, and True if ties round away from zero.
ELEMENTS = {
    "e4m3": (3, Fraction(448), False),
    "e5m2": (2, Fraction(57344), False),
    "e3m2": (2, Fraction(28), False),
    "e2m3": (3, Fraction(15, 2), False),
    "e2m1": (1, Fraction(6), False),
    "int8": (6, Fraction(127, 64), False),
    "s1p2": (2, Fraction(7, 4), True),
    "hif8": (1, Fraction(32768), True),
    "float16": (10, Fraction(65504), False),
}
#: Element, block size and rule of formats with E8M0 scales.
MX = {
    "mxfp8": ("e4m3", 32, "floor"),
    "mxfp8:rceil": ("e4m3", 32, "rceil"),
    "mx:e5m2:b32:ceil": ("e5m2", 32, "ceil"),
    "mx:e5m2:b32:even": ("e5m2", 32, "even"),
    "mx:e4m3:b16:even": ("e4m3", 16, "even"),
    "mx:e2m1:b16:even": ("e2m1", 16, "even"),
    "mx:e3m2:b32:floor": ("e3m2", 32, "floor"),
    "mxfp6_e2m3": ("e2m3", 32, "floor"),
    "mxfp4": ("e2m1", 32, "floor"),
    "mxint8": ("int8", 32, "floor"),
}
TENSOR = {
    "fp8_e4m3": ("e4m3", 448),
    "fp8_e5m2": ("e5m2", 57344),
    "hifp8:t15": ("hif8", 15),
    "hifp8:t60000": ("hif8", 60000),
}
CASTS = {"hifp8": "hif8", "hifp8:inf": "hif8", "fp16": "float16"}
NAMES = (*MX, *TENSOR, *CASTS, "nvfp4", "hifp4")


@functools.cache
def power(exponent: int) -> Fraction:
    """Return 2^exponent."""
    return Fraction(2) ** exponent


def exponent(x: Fraction) -> int:
    """Return floor(log2 x)."""
    found = x.numerator.bit_length() - x.denominator.bit_length()
    return found if power(found) <= x else found - 1


@functools.cache
def edge_of(element: str) -> tuple[Fraction, bool]:
    """Return the overflow threshold of an element, and True if the threshold itself overflows.

    Magnitudes above the threshold round to more than the largest number.
    """
    mantissa, largest, away = ELEMENTS[element]
    step = power(exponent(largest) - mantissa)
    if element == "hif8":  # the next number is 1.5 * 2^15; there is one bit of mantissa
        step = power(14)
    odd = (largest / step) % 2 == 1
    return largest + step / 2, away or odd


def is_clipped(scaled: Fraction, element: str) -> bool:
    """Return whether a scaled magnitude would round to more than the largest number."""
    edge, inclusive = edge_of(element)
    return scaled >= edge if inclusive else scaled > edge


def rounded(x: Fraction, bits: int) -> Fraction:
    """Return the nearest number with `bits` significant bits, ties to even."""
    if not x:
        return x
    step = power(exponent(x) - bits + 1)
    return round(x / step) * step  # Python rounds ties to even


def e8m0(amax: Fraction, element: str, rule: str) -> int:
    """Return the exponent of a block's scale."""
    mantissa, largest, _ = ELEMENTS[element]
    emax, e = exponent(largest), exponent(amax)
    if rule == "ceil":
        e += amax > power(e)
    elif rule == "rceil":
        e += amax > largest * power(e - emax)
    elif rule == "even":
        step = power(e - mantissa)
        e = exponent((amax / step + Fraction(1, 2)).__floor__() * step)
    return min(max(e - emax, -127), 127)


def e4m3(x: Fraction) -> Fraction:
    """Return the nearest E4M3 number, saturating."""
    step = power(max(exponent(x), -6) - 3) if x else Fraction(1)
    return min(round(x / step) * step, Fraction(448))


def hifloat4(block: list[Fraction]) -> list[bool]:
    """Return which of 64 values are clipped."""
    amax = max(block)
    e6m2 = rounded(rounded(amax * rounded(Fraction(1, 7), 8), 8), 3)
    e6m2 = min(max(e6m2, power(-48)), Fraction(3, 2) * 2**15)
    scaled = [x * rounded(1 / e6m2, 8) for x in block]
    clipped = []
    for place, value in enumerate(scaled):
        eight = scaled[place // 8 * 8 : place // 8 * 8 + 8]
        four = scaled[place // 4 * 4 : place // 4 * 4 + 4]
        e8 = max(eight) >= 4
        e16 = max(four) / 2**e8 >= 2
        clipped.append(is_clipped(value / 2 ** (e8 + e16), "s1p2"))
    return clipped


def nvfp4_scaled(blocks: list[np.ndarray]) -> list[Fraction | None]:
    """Return each value divided by its scale, or None if the scale is zero."""
    f32 = np.float32
    encode = f32(2688) / max(block.max() for block in blocks)
    decode, found = f32(1) / encode, []
    for block in blocks:
        scale = e4m3(Fraction(float(block.max() * (encode * f32(1 / 6)))))
        if not scale:
            found += [None] * len(block)
            continue
        multiplier = f32(1) / (f32(float(scale)) * decode)
        found += [Fraction(float(x * multiplier)) for x in block]
    return found


def oracle(x: torch.Tensor, name: str) -> int:
    """Return how many values of a matrix are clipped, with blocks along rows."""
    return sum(clipped(x, name))


def clipped(x: torch.Tensor, name: str) -> list[bool]:
    """Return which values of a matrix are clipped, row by row, with blocks along rows."""
    magnitudes = x.float().abs().numpy()
    if name in CASTS:
        return [is_clipped(Fraction(float(v)), CASTS[name]) for v in magnitudes.flat]
    if name in TENSOR:
        element, target = TENSOR[name]
        encode = np.float32(target) / magnitudes.max()
        scaled = magnitudes * encode
        return [is_clipped(Fraction(float(v)), element) for v in scaled.flat]
    size = 16 if name == "nvfp4" else 64 if name == "hifp4" else MX[name][1]
    blocks = [row[at : at + size] for row in magnitudes for at in range(0, len(row), size)]
    if name == "nvfp4":
        return [v is not None and is_clipped(v, "e2m1") for v in nvfp4_scaled(blocks)]
    found: list[bool] = []
    for block in blocks:
        exact = [Fraction(float(v)) for v in block]
        if name == "hifp4":
            found += hifloat4([*exact, *[Fraction(0)] * (64 - len(exact))])[: len(exact)]
        elif any(exact):
            element, _, rule = MX[name]
            scale = power(e8m0(max(exact), element, rule))
            found += [is_clipped(v / scale, element) for v in exact]
        else:
            found += [False] * len(exact)
    return found


def elements_of(name: str) -> list[str]:
    """Return the elements whose overflow thresholds are tested for a format.

    If scales are powers of two, the thresholds of other elements add no cases to those of the
    format's own element.
    """
    if name in MX:
        return [MX[name][0]]
    if name in CASTS:
        return [CASTS[name]]
    return list(ELEMENTS)


def edges(dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return rows that begin with a value near an overflow threshold.

    The values are, for each element, every bfloat16 in the binade of its largest number, and the
    threshold with its float32 neighbors.
    """
    found = []
    for mantissa, largest, _ in map(ELEMENTS.get, elements_of(name)):
        top = power(exponent(largest))
        sixteenths = [float(top * Fraction(k, 128)) for k in range(128, 256)]
        step = top / 2**mantissa
        edge = np.float32(float(largest + step / 2))
        near = [np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))]
        found += [*sixteenths, *map(float, near)]
    first = torch.tensor(found)[:, None]
    # smaller values of a row also reach the threshold, depending on the scale of the first value
    shares = torch.tensor([1.0, 0.9921875, 0.9375, -0.875, 0.8125, 0.5, 0.0, 2.0**-9] * 8)
    return (first * shares).to(dtype)
