"""The expected results of formats, from an independent implementation with tables and searches.

The method differs from that of the package throughout. Elements are tables of their code points,
taken from ml_dtypes if it has the type. Scales are found by searching a table of all scales for the
one that the rule's definition requires. Every number involved (a float32 divided by a power of two
from 2^-127 to 2^127, the midpoint of two neighbors) is exact in float64.
"""

import csv
import functools
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

DATA = Path(__file__).parents[1] / "data"
ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
BITS = {"e4m3": 8, "e5m2": 8, "e3m2": 6, "e2m3": 6, "e2m1": 4}
RULES = ("floor", "rceil", "ceil", "even")
SCALE_EXPONENTS = np.arange(-127, 128)


def to_float64(x: NDArray[np.floating]) -> Array:
    """Convert to float64 exactly; numpy warns of signaling NaNs, which become quiet ones."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def code_points(element: str) -> Array:
    """Return the finite numbers >= 0 of an element, in ascending order, like their codes."""
    if element.startswith("int"):  # all bits but the sign count steps; 1 is half of the range
        half = 2 ** (int(element[3:]) - 2)
        return np.arange(2 * half) / half
    if element in ML_DTYPES:
        codes = np.arange(1 << (BITS[element] - 1), dtype=np.uint8)
        values = codes.view(ML_DTYPES[element]).astype(np.float64)
        return values[np.isfinite(values)]
    exponent_bits, mantissa_bits = int(element[1]), int(element[3])
    bias = 2 ** (exponent_bits - 1) - 1
    values = []
    for field in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            implicit = 1.0 if field > 0 else 0.0
            fraction = implicit + mantissa / 2**mantissa_bits
            values.append(fraction * 2.0 ** (max(field, 1) - bias))
    return np.array(values)


def round_to_table(magnitude: Array, table: Array, *, ties: str) -> Array:
    """Return the nearest number of an ascending table; ties go to the even index, or upward."""
    middle = (table[:-1] + table[1:]) / 2
    below = np.searchsorted(middle, magnitude, side="left")  # half-way cases go down
    above = np.searchsorted(middle, magnitude, side="right")  # half-way cases go up
    return table[np.where(below % 2 == 0, below, above) if ties == "even" else above]


def round_stochastically(magnitude: Array, table: Array, random: NDArray[np.int64]) -> Array:
    """Return the upper neighbor if the lower one is more than `random` / 2^24 steps away."""
    index = np.clip(np.searchsorted(table, magnitude, side="right") - 1, 0, len(table) - 2)
    below, above = table[index], table[index + 1]
    way = np.minimum((magnitude - below) / (above - below), 1)
    rounded = np.where(np.floor(way * 2**24) > random, above, below)
    return np.where(np.isnan(magnitude), np.nan, rounded)


def round_element(x: Array, element: str, random: NDArray[np.int64] | None = None) -> Array:
    """Return the nearest value of an element for finite x, saturating, with the sign of x.

    With `random` integers from 0 to 2^24 - 1, return one of the two neighbors instead.
    """
    if random is not None:
        rounded = round_stochastically(np.abs(x), code_points(element), random)
        return np.copysign(rounded, x)
    # Without mantissa bits, every significand is 1, so ties go up (see `get_element`).
    ties = "even" if element[-2:] != "m0" else "up"
    table = code_points(element)
    rounded = round_to_table(np.abs(x), table, ties=ties)
    if ties == "up":
        rounded = np.where(np.abs(x) == table[1] / 2, 0.0, rounded)
    return rounded * np.where(np.signbit(x), -1.0, 1.0)


def scale_exponents(amax: Array, element: str, rule: str) -> NDArray[np.int64]:
    """Return the scale exponents of blocks with these largest magnitudes, finite and >= 0."""
    powers = np.ldexp(1.0, SCALE_EXPONENTS)
    table = code_points(element)
    largest = table[-1]
    largest_power = powers[powers <= largest][-1]
    if rule == "floor":  # the largest scale with scale * largest power of two <= amax
        index = np.searchsorted(powers * largest_power, amax, side="right") - 1
    elif rule == "ceil":  # the smallest scale with scale * largest power of two >= amax
        index = np.searchsorted(powers * largest_power, amax, side="left")
    elif rule == "rceil":  # the smallest scale at which nothing saturates
        index = np.searchsorted(powers * largest, amax, side="left")
    else:  # floor, after rounding amax half up to as many significand bits as the element has
        bits = int(element[3:]) - 1 if element.startswith("int") else 1 + int(element[3])
        fraction, exponent = np.frexp(amax)
        rounded = np.ldexp(np.floor(fraction * 2.0**bits + 0.5), exponent - bits)
        index = np.searchsorted(powers * largest_power, rounded, side="right") - 1
    return SCALE_EXPONENTS[np.clip(index, 0, len(powers) - 1)]


def fake_quantize_mx(
    blocks: NDArray[np.floating],
    element: str,
    rule: str,
    random: NDArray[np.int64] | None = None,
) -> Array:
    """Quantize one block per row in float64; a block with a NaN or an Inf becomes NaN."""
    x = to_float64(blocks)
    special = ~np.isfinite(x).all(axis=1, keepdims=True)
    x = np.where(special, 0.0, x)
    amax = np.abs(x).max(axis=1, keepdims=True)
    scale = np.ldexp(1.0, scale_exponents(amax, element, rule))
    rounded = round_element(x / scale, element, random) * scale
    if element.startswith("int"):
        rounded += 0.0  # two's complement has a single zero
    return np.where(special, np.nan, rounded)


@functools.cache
def hifloat8_codes() -> Array:
    """Return the values of the 256 codes, by code."""
    with (DATA / "hif8_codes.csv").open(newline="") as file:
        values = np.array([float(row["value"]) for row in csv.DictReader(file)])
    values.setflags(write=False)
    return values


def fake_quantize_hifloat8(
    x: NDArray[np.floating], *, overflow: str, random: NDArray[np.int64] | None = None
) -> Array:
    """Return the nearest value of the table of codes, ties away from zero; zero is unsigned."""
    x = to_float64(x)
    codes = hifloat8_codes()
    # The code of Inf stands for 1.5 * 2^15; half-way from 32768 to that is 1.25 * 2^15.
    table = np.append(np.sort(codes[np.isfinite(codes) & (codes >= 0)]), 1.5 * 2**15)
    if random is None:
        magnitude = round_to_table(np.abs(x), table, ties="up")
    else:
        magnitude = round_stochastically(np.abs(x), table, random)
    magnitude = np.where(magnitude > 2**15, np.inf if overflow == "inf" else 2**15, magnitude)
    return np.where(np.isnan(x), np.nan, np.copysign(magnitude, x)) + 0.0


def fake_quantize_hifloat8_hybrid(x: NDArray[np.generic], *, overflow: str) -> Array:
    """Round `x` (float32, float16 or ml_dtypes.bfloat16) by the paper's HR for this dtype."""
    bits = x.view(f"u{x.itemsize}")
    wide = np.abs(to_float64(x))
    codes = hifloat8_codes()
    # The code of Inf stands for 1.5 * 2^15.
    table = np.append(np.sort(codes[np.isfinite(codes) & (codes >= 0)]), 1.5 * 2**15)
    index = np.clip(np.searchsorted(table, wide, side="right") - 1, 0, len(table) - 2)
    below, above = table[index], table[index + 1]
    with np.errstate(invalid="ignore"):
        way = (wide - below) / (above - below)
        if x.dtype == np.float32:  # SR14
            carries = np.floor(way * 2**14) >= bits % 2**14
        else:  # SR2
            carries = np.floor(way * 4) >= 2 * (bits % 2) + 1
        hybrid = (wide < 2**-3) | (wide >= 2**4)
        up = np.where(hybrid, carries, way >= 0.5)
    up = (up & (wide >= 2**-23)) | (wide >= 1.25 * 2**15)
    magnitude = np.where(up, above, below)
    magnitude[magnitude > 2**15] = np.inf if overflow == "inf" else 2**15
    return np.where(np.isnan(wide), np.nan, np.copysign(magnitude, to_float64(x))) + 0.0
