"""Define constants of the bit layout of float32, and build powers of two from bits.

On some machines, `log2` and `pow` are off by one near powers of two, where the behavior of a number
format matters most. Exponents are therefore read from bits, and powers of two are built from bits.
"""

MANTISSA_BITS = 23
BIAS = 127
SIGN = -(1 << 31)
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000  #: bits of Inf, and also the mask of the exponent field


def power_of_two_bits(exponent: int) -> int:
    """Return the float32 bits of 2^exponent, for -126 <= exponent <= 127."""
    return (exponent + BIAS) << MANTISSA_BITS
