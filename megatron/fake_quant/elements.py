"""Define the element types, in which the values of a format are stored.

Element types of different classes have the same attributes, so that no code has to check the class.
An attribute that does not apply to a class is None or False.

Sources: OCP Microscaling Formats (MX) v1.0, section 5; HiFloat8, arXiv 2409.16626; HiFloat4,
arXiv 2602.11287; MX6, arXiv 2302.08007; NF4, arXiv 2305.14314; MixFP4, arXiv 2605.31035.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias, get_args

import torch

from megatron.fake_quant.block_scaling import check_choice
from megatron.fake_quant.rounding_modes import Rounding

Overflow = Literal["saturate", "inf"]
Ties = Literal["even", "away", "down"]


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """Element type that saturates, with an exponent and a mantissa of fixed widths.

    Values beyond `max` saturate, and so does Inf. Codes above the code of `max` (one in E4M3, four
    in E5M2) stand for Inf if their mantissa is zero and for NaN otherwise; no number rounds to
    them.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int  #: number of stored mantissa bits, without the implicit leading one
    bias: int
    max: float  #: largest finite magnitude
    ties: Ties = "even"  #: how "nearest" rounds a value halfway between neighbors
    #: True if codes are in two's complement, with a single zero; False for sign and magnitude
    twos_complement: bool = False
    signed: bool = True  #: False for a scale type, which has no sign bit

    is_cast: ClassVar[Literal[False]] = False  #: True if torch's own cast does the rounding
    tapered: ClassVar[Literal[False]] = False  #: True if the number of mantissa bits varies
    is_table: ClassVar[Literal[False]] = False  #: True if a table lists the values
    takes_block_scales: ClassVar[bool] = True
    roundings: ClassVar[tuple[Rounding, ...]] = ("nearest", "stochastic")
    variants: ClassVar[tuple[str, ...]] = ()
    saturates: ClassVar[bool] = True
    source: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_choice("rule for ties", self.ties, get_args(Ties))
        if self.exponent_bits < 0 or self.mantissa_bits < 0:
            raise ValueError(
                f"element type {self.name!r} has {self.exponent_bits} exponent and "
                f"{self.mantissa_bits} mantissa bits; give 0 or more of each"
            )

    @property
    def has_max(self) -> bool:
        """True if `max` is one of the numbers of this type, as it must be in a format."""
        if not 0 < self.max < math.inf:
            return False
        return math.ldexp(self.max, self.mantissa_bits - max(self.emax, self.emin)).is_integer()

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number, below which the spacing is constant."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return math.frexp(self.max)[1] - 1

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with full precision."""
        return math.ldexp(1, self.emin)

    @property
    def negative_zero(self) -> bool:
        """True if the element type has a negative zero."""
        return not self.twos_complement

    @property
    def wider(self) -> "ElementFormat":
        """Variant of this type with twice the maximum, used to find the values that are clipped."""
        return replace(self, max=2 * self.max)


@dataclass(frozen=True, slots=True)
class HiFloat8:
    """Element type HiFloat8, which has tapered precision; see `hifloat8.py`."""

    #: result of an overflow: +-32768 for "saturate" or +-Inf for "inf"; the paper allows both
    overflow: Overflow = "saturate"
    name: str = field(default="hif8", init=False)
    bits: int = field(default=8, init=False)

    is_cast: ClassVar[Literal[False]] = False
    tapered: ClassVar[Literal[True]] = True
    is_table: ClassVar[Literal[False]] = False
    takes_block_scales: ClassVar[bool] = False
    roundings: ClassVar[tuple[Rounding, ...]] = ("nearest", "stochastic", "hybrid")
    variants: ClassVar[tuple[str, ...]] = ("inf", "t<number> (as in t15)")
    max: ClassVar[float] = math.ldexp(1, 15)
    smallest_normal: ClassVar[float] = math.ldexp(1, -15)
    ties: ClassVar[Ties] = "away"
    twos_complement: ClassVar[bool] = False
    negative_zero: ClassVar[bool] = False
    source: ClassVar[str] = "HiFloat8, arXiv 2409.16626"

    def __post_init__(self) -> None:
        check_choice("HiFloat8 overflow", self.overflow, get_args(Overflow))

    @property
    def saturates(self) -> bool:
        """True if values beyond the largest number are rounded to that number."""
        return self.overflow == "saturate"

    @property
    def wider(self) -> "HiFloat8":
        """Variant of this type that overflows to Inf, used to find the values that are clipped."""
        return HiFloat8(overflow="inf")


@dataclass(frozen=True, slots=True)
class Cast:
    """Torch dtype as an element type; it rounds to nearest even and overflows to Inf."""

    dtype: torch.dtype

    is_cast: ClassVar[Literal[True]] = True
    tapered: ClassVar[Literal[False]] = False
    is_table: ClassVar[Literal[False]] = False
    takes_block_scales: ClassVar[bool] = False
    roundings: ClassVar[tuple[Rounding, ...]] = ("nearest",)
    variants: ClassVar[tuple[str, ...]] = ()
    ties: ClassVar[Ties] = "even"
    saturates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point:
            raise ValueError(f"{self.dtype} is no floating-point dtype; choose one for a Cast")

    @property
    def name(self) -> str:
        """Name of the dtype, without `torch.`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return torch.finfo(self.dtype).bits

    @property
    def max(self) -> float:
        """Largest finite number."""
        return torch.finfo(self.dtype).max

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number with full precision."""
        return torch.finfo(self.dtype).tiny

    @property
    def source(self) -> str:
        """Text that says where the element type is defined."""
        return f"torch.{self.name}, by torch's own cast"


#: Values of the element types that are defined by a table, in ascending order, which is also the
#: order of their codes. NF4 (arXiv 2305.14314, appendix E) has quantiles of a normal distribution,
#: in float32.
TABLES: Mapping[str, tuple[float, ...]] = MappingProxyType(
    {
        "nf4": (
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        )
    }
)


@dataclass(frozen=True, slots=True)
class TableElement:
    """Element type whose values a table lists; the code of a value is its position in the table."""

    name: str

    is_cast: ClassVar[Literal[False]] = False
    tapered: ClassVar[Literal[False]] = False
    is_table: ClassVar[Literal[True]] = True
    takes_block_scales: ClassVar[bool] = True
    roundings: ClassVar[tuple[Rounding, ...]] = ("nearest",)
    variants: ClassVar[tuple[str, ...]] = ()
    saturates: ClassVar[bool] = True
    ties: ClassVar[Ties] = "down"
    twos_complement: ClassVar[bool] = False
    negative_zero: ClassVar[bool] = False
    source: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_choice("table of values", self.name, TABLES)

    @property
    def values(self) -> tuple[float, ...]:
        """Values of all codes, in ascending order."""
        return TABLES[self.name]

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return (len(self.values) - 1).bit_length()

    @property
    def max(self) -> float:
        """Largest number in the table."""
        return self.values[-1]

    @property
    def smallest_normal(self) -> float:
        """Smallest positive number in the table; a table has no subnormal numbers."""
        return min(value for value in self.values if value > 0)

    @property
    def wider(self) -> "TableElement":
        """This type itself: a block's maximum maps to the largest number, so no value is clipped.

        Other element types return a variant that is used to find the values that are clipped.
        """
        return self


CodedElement: TypeAlias = ElementFormat | HiFloat8 | TableElement
Element: TypeAlias = CodedElement | Cast

E4M3 = ElementFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0)
E5M2 = ElementFormat("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0)
E3M2 = ElementFormat("e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max=28.0)
E2M3 = ElementFormat("e2m3", exponent_bits=2, mantissa_bits=3, bias=1, max=7.5)
E2M1 = ElementFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
#: Element type of MXINT8: multiples of 1/64 in two's complement. They are described as E1M6 with a
#: bias of 1: numbers below 1 are subnormal, and the spacing is the same below and above 1. OCP
#: leaves the code for -2 unused.
INT8 = ElementFormat(
    "int8", exponent_bits=1, mantissa_bits=6, bias=1, max=127 / 64, twos_complement=True
)
#: Element types of 6, 4 and 3 bits, also in two's complement with an unused lowest code: multiples
#: of 1/16, 1/4 and 1/2, respectively.
INT6 = ElementFormat(
    "int6", exponent_bits=1, mantissa_bits=4, bias=1, max=31 / 16, twos_complement=True
)
INT4 = ElementFormat(
    "int4", exponent_bits=1, mantissa_bits=2, bias=1, max=7 / 4, twos_complement=True
)
INT3 = ElementFormat(
    "int3", exponent_bits=1, mantissa_bits=1, bias=1, max=3 / 2, twos_complement=True
)
#: Element type of HiFloat4: a sign and a multiple of 1/4 up to 1.75.
S1P2 = ElementFormat("s1p2", exponent_bits=1, mantissa_bits=2, bias=1, max=1.75, ties="away")

#: Element type of MX6: multiples of 1/8 in two's complement. As in INT8, the lowest code is unused.
INT5 = ElementFormat(
    "int5", exponent_bits=1, mantissa_bits=3, bias=1, max=15 / 8, twos_complement=True
)

#: Alternative element type of MixFP4: a sign and a multiple of 1/2 up to 3.5.
E1M2 = ElementFormat("e1m2", exponent_bits=1, mantissa_bits=2, bias=0, max=3.5)

#: Element types by name. E4M3 and E5M2 use some codes for NaN or Inf, so their maximum cannot be
#: computed from the numbers of bits.
ELEMENTS: Mapping[str, ElementFormat] = MappingProxyType(
    {element.name: element for element in (E4M3, E5M2, E3M2, E2M3, E2M1, INT8, INT6, INT4, INT3)}
)
