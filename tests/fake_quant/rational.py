"""Formats by their definitions, in exact rational arithmetic, with the numbers of gmpy2.

Nothing here is taken from the package. A definition that prescribes a float32 operation is followed
by `float32`, which rounds a fraction to nearest even as IEEE 754 defines it.
"""

import bisect
import itertools
from collections.abc import Callable, Sequence

from gmpy2 import mpq as F

FLOAT32_MAX = F(2**24 - 1) * 2**104
INFINITE = F(2) ** 400  #: stands for Inf; every operation on it gives what IEEE 754 gives here

Block = Sequence[F]


def power(exponent: int) -> F:
    """Return 2**exponent."""
    return F(2**exponent) if exponent >= 0 else F(1, 2**-exponent)


def floor_log2(x: F) -> int:
    """Return the largest e with 2**e <= x, for x > 0."""
    over, under = x.numerator, x.denominator
    e = over.bit_length() - under.bit_length()
    is_reached = under << e <= over if e >= 0 else under <= over << -e
    return e if is_reached else e - 1


def rounded(x: F, bits: int, lowest: int, highest: int) -> F:
    """Round to `bits` significant bits, ties to even, with exponents from `lowest` to `highest`."""
    if x == 0:
        return x
    step = power(max(floor_log2(abs(x)), lowest) - bits + 1)
    result = round(x / step) * step
    if abs(result) >= power(highest + 1):
        return INFINITE if result > 0 else -INFINITE
    return result


def float32(x: F) -> F:
    return rounded(x, 24, -126, 127)


def bfloat16(x: F) -> F:
    return rounded(x, 8, -126, 127)


def float16(x: F) -> F:
    return rounded(x, 11, -14, 15)


def minifloat(exponent_bits: int, mantissa_bits: int, bias: int, largest: F | int) -> list[F]:
    """Return the numbers >= 0 of a floating-point type in the order of their codes."""
    numbers = []
    for field in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            implicit = 2**mantissa_bits if field else 0
            exponent = max(field, 1) - bias - mantissa_bits
            numbers.append((implicit + mantissa) * power(exponent))
    return [x for x in numbers if x <= largest]


def multiples(step: F, count: int) -> list[F]:
    return [n * step for n in range(count + 1)]


def hifloat8() -> list[F]:
    """Return the numbers >= 0 of HiFloat8, ascending."""
    numbers = [F(0), *(power(e) for e in range(-22, -15))]
    for e in range(-15, 16):
        mantissas = 8 if abs(e) <= 3 else 4 if abs(e) <= 7 else 2
        numbers += [power(e) * (1 + F(m, mantissas)) for m in range(mantissas)]
    return [x for x in numbers if x <= 2**15]


E4M3 = minifloat(4, 3, 7, 448)
E2M1 = minifloat(2, 1, 1, 6)
UE5M3 = minifloat(5, 3, 15, 114688)
E6M2 = [power(e) * (1 + F(m, 4)) for e in range(-48, 16) for m in range(4)][:-1]
INT4 = multiples(F(1, 4), 7)
INT5 = multiples(F(1, 8), 15)
HIFLOAT8 = hifloat8()
SMALLEST_OUTER = float32(F(1, 10**30))
NF4 = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]


def nearest(x: F, numbers: list[F], ties: str = "even") -> F:
    """Return the nearest of ascending numbers with the sign of `x`; saturate at the last one."""
    magnitude = min(abs(x), numbers[-1])
    above = bisect.bisect_left(numbers, magnitude)
    if numbers[above] != magnitude:
        below = above - 1
        distances = magnitude - numbers[below], numbers[above] - magnitude
        tie_up = ties == "away" or above % 2 == 0
        if distances[0] < distances[1] or (distances[0] == distances[1] and not tie_up):
            above = below
    return -numbers[above] if x < 0 else numbers[above]


def largest(block: Block) -> F:
    return max(map(abs, block))


def quotient(a: F | int, b: F) -> F:
    """Return float32(a / b), clamped to normal numbers; 1 if b is 0."""
    return min(max(float32(F(a) / b), power(-126)), FLOAT32_MAX) if b else F(1)


def reciprocal(x: F) -> F:
    """Return float32(1 / x), at most the largest float32."""
    return min(float32(1 / x), FLOAT32_MAX) if x else FLOAT32_MAX


def mx(numbers: list[F], carry: F | int = 2) -> Callable[[Block, F], list[F]]:
    """Return OCP's conversion; a significand of `carry` or more doubles the scale."""

    def convert(block: Block, of_tensor: F) -> list[F]:
        amax = largest(block)
        exponent = -127
        if amax:
            e = floor_log2(amax)
            exponent = e - floor_log2(numbers[-1]) + (amax / power(e) >= carry)
        scale = power(min(max(exponent, -127), 127))
        return [nearest(x / scale, numbers) * scale for x in block]

    return convert


def nvfp4(block: Block, of_tensor: F) -> list[F]:
    """Return NVFP4, given the maximum of the values that share the outer scale of the block."""
    encode = quotient(6 * 448, of_tensor)
    decode = float32(1 / encode)
    wanted = float32(largest(block) * float32(encode * float32(F(1, 6))))
    scale = nearest(wanted, E4M3)
    return _elements(block, scale, decode, E2M1)


def _elements(block: Block, scale: F, decode: F, numbers: list[F]) -> list[F]:
    multiplier = reciprocal(float32(scale * decode))
    codes = [nearest(float32(x * multiplier), numbers) for x in block]
    return [float32(float32(code * scale) * decode) for code in codes]


def nvint4(block: Block, of_tensor: F) -> list[F]:
    top = F(7, 4)
    encode = quotient(top * 448, of_tensor)
    wanted = float32(float32(largest(block) / top) * encode)
    return _elements(block, nearest(wanted, E4M3), float32(1 / encode), INT4)


def four_over_six(
    measure: Callable[[F], F], width: int = 16, bound: int = 256
) -> Callable[[Block, F], list[F]]:
    """Return NVFP4 with 4/6 for blocks of one or several rows of `width` values.

    `measure` is the error of a value, given its difference. Values of a row are added one by one,
    and the rows in halves.
    """

    def convert(block: Block, of_tensor: F) -> list[F]:
        target = 6 * bound
        encode = quotient(target, of_tensor)
        decode = float32(1 / encode)
        wanted = float32(float32(largest(block) / 6) * encode)
        candidates = [nearest(wanted, E4M3), nearest(float32(wanted * F(3, 2)), E4M3)]
        errors = []
        for scale in candidates:
            multiplier = reciprocal(float32(scale * decode))
            sums = []
            for i in range(0, len(block), width):
                total = F(0)
                for x in block[i : i + width]:
                    code = nearest(float32(x * multiplier), E2M1)
                    value = float32(float32(float32(code * scale) * of_tensor) / target)
                    total = float32(total + float32(measure(float32(value - x))))
                sums.append(total)
            while len(sums) > 1:
                half = len(sums) // 2
                sums = [float32(a + b) for a, b in zip(sums[:half], sums[half:], strict=True)]
            errors += sums
        return _elements(block, candidates[errors[1] < errors[0]], decode, E2M1)

    return convert


def square(x: F) -> F:
    return x * x


def divided(scales: list[F], *, outer: bool) -> Callable[[Block, F], list[F]]:
    """Return E2M1 elements that are divided by their scales, with the operations of AMD's ALTO.

    `scales` are the numbers of the block scales; without an outer scale, `outer` is False.
    """
    smallest = next(x for x in scales if x > 0)

    def convert(block: Block, of_tensor: F) -> list[F]:
        whole = max(float32(of_tensor / (6 * scales[-1])), SMALLEST_OUTER) if outer else F(1)
        wanted = float32(float32(largest(block) / whole) / 6)
        scale = float32(nearest(max(wanted, smallest), scales) * whole)
        return [float32(nearest(float32(x / scale), E2M1) * scale) for x in block]

    return convert


def fp8_float32(block: Block, of_tensor: F) -> list[F]:
    """Return FP8 with a float32 scale per block or row."""
    encode = quotient(448, largest(block))
    decode = float32(1 / encode)
    return [float32(nearest(float32(x * encode), E4M3) * decode) for x in block]


def fp8_tensor(block: Block, of_tensor: F) -> list[F]:
    """Return FP8 with a float32 scale for the tensor, whose largest finite magnitude is given."""
    encode = quotient(448, of_tensor)
    decode = float32(1 / encode)
    return [float32(nearest(float32(x * encode), E4M3) * decode) for x in block]


def mx6(block: Block, of_tensor: F) -> list[F]:
    def field(x: F) -> int:
        return floor_log2(x) if x >= power(-126) else -127

    shared = field(largest(block))
    values = []
    for pair in zip(block[::2], block[1::2], strict=True):
        lower = field(largest(pair)) < shared
        scale = power(max(shared - lower, -123))
        values += [nearest(x / scale, INT5) * scale for x in pair]
    return values


def nf4(block: Block, of_tensor: F) -> list[F]:
    table = [F(x) for x in NF4]
    thresholds = [float32((a + b) / 2) for a, b in itertools.pairwise(table)]
    amax = largest(block)
    if amax == 0:
        return list(block)
    inverse = float32(1 / amax)
    values = []
    for x in block:
        scaled = float32(x / amax) if inverse == INFINITE else float32(x * inverse)
        values.append(float32(table[bisect.bisect_left(thresholds, scaled)] * amax))
    return values


def if4(block: Block, of_tensor: F) -> list[F]:
    encode = quotient(6 * 448, of_tensor)
    decode = float32(1 / encode)
    scale = nearest(float32(float32(largest(block) / 6) * encode), E4M3)
    if scale == 0:
        return [F(0)] * len(block)
    multiplier = reciprocal(float32(scale * decode))
    more, less = float32(F(7, 6)), float32(F(6, 7))
    scaled = [float32(x * multiplier) for x in block]
    floats = [nearest(x, E2M1) for x in scaled]
    integers = [nearest(float32(x * more), multiples(F(1), 7)) for x in scaled]
    values = [float32(float32(code * scale) * of_tensor) for code in floats]
    others = [float32(float32(float32(n * scale) * of_tensor) * less) for n in integers]
    if _squared_error(others, block) < _squared_error(values, block):
        return [float32(float32(float32(n * scale) * less) * decode) for n in integers]
    return [float32(float32(code * scale) * decode) for code in floats]


def _squared_error(values: Block, block: Block) -> F:
    """Return the sum of (values / 2688 - x)^2; squares 8 positions apart are added first."""
    differences = [float32(float32(v / 2688) - x) for v, x in zip(values, block, strict=True)]
    squares = [float32(difference * difference) for difference in differences]
    sums = [float32(a + b) for a, b in zip(squares[:8], squares[8:], strict=True)]
    total = sums[0]
    for part in sums[1:]:
        total = float32(total + part)
    return total


def mixfp4(block: Block, of_tensor: F) -> list[F]:
    """Return MixFP4: E2M1 elements, or integers with their own scale if the error is not larger."""
    encode = quotient(6 * 448, of_tensor)
    decode = float32(1 / encode)
    candidates = []
    for numbers in (E2M1, multiples(F(1), 7)):
        scale = nearest(float32(float32(largest(block) / numbers[-1]) * encode), E4M3)
        multiplier = reciprocal(float32(scale * decode)) if scale else F(0)
        codes = [nearest(float32(x * multiplier), numbers) for x in block]
        scaled = [float32(code * scale) for code in codes]
        error = _squared_error([float32(x * of_tensor) for x in scaled], block)
        candidates.append((error, [float32(x * decode) for x in scaled]))
    (error, floats), (other, integers) = candidates
    return integers if other <= error else floats


def macro_block(block: Block, of_tensor: F) -> list[F]:
    """Return MXFP4 with macro blocks of 128 values and the scale rule `even`."""
    amax = largest(block)
    ratio = float32(F(6) / max(amax, float32(F(1, 10**12))))
    k = int(ratio / power(floor_log2(ratio)) * 256) - 256
    factor = 1 + F(k, 256)
    if float32(amax * factor) == INFINITE:
        factor = F(1)
    convert = mx(E2M1, carry=F(7, 4))
    scaled = [float32(x * factor) for x in block]
    values = [y for i in range(0, 128, 32) for y in convert(scaled[i : i + 32], amax)]
    return [float32(y / factor) for y in values]


def hifp4(block: Block, of_tensor: F) -> list[F]:
    ideal = bfloat16(largest(block) * bfloat16(F(1, 7)))
    if ideal:
        step = power(floor_log2(ideal) - 2)
        ideal = round(ideal / step) * step
    scale = min(max(ideal, E6M2[0]), E6M2[-1])
    inverse = bfloat16(1 / scale)
    values = []
    for i in range(0, 64, 8):
        e8 = 1 if largest(block[i : i + 8]) * inverse >= 4 else 0
        for j in (i, i + 4):
            four = block[j : j + 4]
            e16 = 1 if largest(four) * inverse / 2**e8 >= 2 else 0
            unit = 2 ** (e8 + e16)
            values += [nearest(x * inverse / unit, INT4, "away") * scale * unit for x in four]
    return values


def hifp8(block: Block, of_tensor: F) -> list[F]:
    return [nearest(x, HIFLOAT8, "away") for x in block]
