"""Define the number formats as data.

A `Format` consists of an element type, a scaling of its values, and a rounding mode. The code that
quantizes is in other modules and reads the fields of these classes. Adding a format takes one
constant here and one golden table in the tests, and no new branch. `names.py` converts a user's
name into a `Format`.

Element types and scalings of different classes have the same attributes, so that no code has to
check for the class. An attribute that does not apply to a class is None, 0 or False.

Sources: OCP Microscaling Formats (MX) v1.0, section 5 (elements, E8M0 scale) and 6.3 (conversion);
NVFP4, arXiv 2509.25149 appendix B; HiFloat8, arXiv 2409.16626; HiFloat4, arXiv 2602.11287;
MX9 and MX6, arXiv 2302.08007; NF4, arXiv 2305.14314;
IF4, arXiv 2603.28765; MixFP4, arXiv 2605.31035; macro blocks, arXiv 2603.08713.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias, get_args

import torch

from megatron.fake_quant.block_scaling import (
    WHOLE_AXIS,
    BlockScaling,
    Outer,
    ScaleRule,
    check_choice,
    check_element,
)

Overflow = Literal["saturate", "inf"]
Ties = Literal["even", "away", "down"]
Rounding = Literal["nearest", "stochastic", "hybrid", "eden"]
ErrorMeasure = Literal["mse", "mae"]

EDEN_GROUP = 128  #: number of neighboring values whose block scales MS-EDEN corrects by one factor
EDEN_BOUND = 255.99  #: largest block scale in MS-EDEN before the correction


@dataclass(frozen=True, slots=True)
class RoundingMode:
    """Description of a rounding mode, which `rounding.py` implements."""

    suffix: str  #: suffix of a format's name that selects the mode; empty for the default mode
    description: str  #: text that `python -m megatron.fake_quant describe` prints
    random: bool = False  #: True if the mode draws random bits
    #: True if block scales are changed after the values are rounded; see `eden.py`
    corrects_scales: bool = False


ROUNDINGS: Mapping[Rounding, RoundingMode] = MappingProxyType(
    {
        "nearest": RoundingMode("", "to nearest, ties {ties}"),
        "stochastic": RoundingMode(
            "sr", "up in magnitude with the probability of the distance from below, at random", True
        ),
        # hybrid rounding (HR), arXiv 2409.16626 section 2.3
        "hybrid": RoundingMode(
            "hr",
            "for |E| < 4 to nearest, ties {ties}; from there on by the value's own low bits (HR)",
        ),
        "eden": RoundingMode(
            "eden",
            f"to nearest, ties {{ties}}; then the scales of {EDEN_GROUP} neighbors are multiplied "
            "by sum x^2 / sum x q and rounded at random (MS-EDEN, arXiv 2601.22813); to be used "
            f"after a Hadamard transform of size {EDEN_GROUP} with random signs",
            random=True,
            corrects_scales=True,
        ),
    }
)


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """Element type that saturates and has a sign, an exponent and a mantissa of fixed widths.

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
        """This type itself: a block's maximum is mapped to the largest number, so no value clips.

        Other element types return a variant that is used to find the values that are clipped.
        """
        return self


@dataclass(frozen=True, slots=True)
class GroupScaling:
    """Scaling of HiFloat4: an E6M2 scale per 64 values, one bit per 8 and one bit per 4 values."""

    size: int = field(default=64, init=False)

    method: ClassVar[str] = "hifloat4"
    height: ClassVar[int] = 1
    square: ClassVar[bool] = False
    rule: ClassVar[None] = None
    block_scale: ClassVar[str] = "E6M2"
    scale_bytes: ClassVar[int] = 4
    finer_exponents: ClassVar[int] = 2
    outer: ClassVar[Outer] = "none"
    outer_size: ClassVar[None] = None
    alternative: ClassVar[None] = None
    by_class: ClassVar[bool] = False
    variants: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class PairScaling:
    """Scaling of MX9 and MX6: an E8M0 scale per 16 values and an exponent bit per 2 values."""

    lowest: int  #: smallest exponent of a scale

    method: ClassVar[str] = "pair_exponents"
    size: ClassVar[int] = 16
    height: ClassVar[int] = 1
    square: ClassVar[bool] = False
    rule: ClassVar[None] = None
    block_scale: ClassVar[str] = "E8M0"
    scale_bytes: ClassVar[int] = 2
    finer_exponents: ClassVar[int] = 0
    outer: ClassVar[Outer] = "none"
    outer_size: ClassVar[None] = None
    alternative: ClassVar[None] = None
    by_class: ClassVar[bool] = False
    variants: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class AbsmaxScaling:
    """Scaling of NF4: the scale is the largest magnitude of 64 values, in float32."""

    size: int = 64

    method: ClassVar[str] = "absmax"
    height: ClassVar[int] = 1
    square: ClassVar[bool] = False
    rule: ClassVar[None] = None
    block_scale: ClassVar[str] = "FP32"
    scale_bytes: ClassVar[int] = 4
    finer_exponents: ClassVar[int] = 0
    outer: ClassVar[Outer] = "none"
    outer_size: ClassVar[None] = None
    alternative: ClassVar[None] = None
    by_class: ClassVar[bool] = False
    variants: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class ChoiceScaling:
    """Scaling of IF4 and MixFP4: E4M3 scales, whose sign bits choose the blocks' element types."""

    shared: bool  #: True if both element types share the scale of a block, as in IF4
    error: ErrorMeasure = "mse"  #: error that decides between the element types

    method: ClassVar[str] = "element_choice"
    size: ClassVar[int] = 16
    height: ClassVar[int] = 1
    square: ClassVar[bool] = False
    rule: ClassVar[None] = None
    block_scale: ClassVar[str] = "E4M3"
    scale_bytes: ClassVar[int] = 1
    finer_exponents: ClassVar[int] = 0
    outer: ClassVar[Outer] = "tensor"
    outer_size: ClassVar[None] = None
    target: ClassVar[float] = 6.0 * 448.0  #: product of the largest E2M1 and E4M3 numbers
    by_class: ClassVar[bool] = False
    variants: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_choice("error", self.error, get_args(ErrorMeasure))

    @property
    def alternative(self) -> ElementFormat:
        """Element type of the blocks with integers."""
        return INT4 if self.shared else E1M2


@dataclass(frozen=True, slots=True)
class MacroScaling:
    """Scaling with an E8M0 scale per 32 values and an 8-bit mantissa per 128 values."""

    rule: ScaleRule = "even"
    #: number that no scaled magnitude exceeds; None if only `rule` determines the scales
    top: float | None = None

    method: ClassVar[str] = "macro_blocks"
    size: ClassVar[int] = 128
    blocks: ClassVar[int] = 4  #: number of blocks in 128 values, each with an E8M0 scale
    height: ClassVar[int] = 1
    square: ClassVar[bool] = False
    block_scale: ClassVar[str] = "E8M0"
    scale_bytes: ClassVar[int] = 5
    finer_exponents: ClassVar[int] = 0
    outer: ClassVar[Outer] = "none"
    outer_size: ClassVar[None] = None
    alternative: ClassVar[None] = None
    by_class: ClassVar[bool] = False
    variants: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_choice("scale rule", self.rule, get_args(ScaleRule))


@dataclass(frozen=True, slots=True)
class TensorScaling:
    """Scaling with one float32 scale, which maps the tensor's largest magnitude to `target`."""

    target: float
    power_of_two: bool = False  #: True if the scale is rounded down to a power of two

    method: ClassVar[str] = "tensor"
    size: ClassVar[None] = None
    height: ClassVar[int] = 1
    square: ClassVar[bool] = False
    rule: ClassVar[None] = None
    block_scale: ClassVar[None] = None
    scale_bytes: ClassVar[int] = 0
    finer_exponents: ClassVar[int] = 0
    outer: ClassVar[Outer] = "tensor"
    outer_size: ClassVar[None] = None
    alternative: ClassVar[None] = None
    by_class: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = ("pow2",)

    def __post_init__(self) -> None:
        if not 0 < self.target < math.inf:
            raise ValueError(f"a scale to {self.target:g}; choose a target above 0")


CodedElement: TypeAlias = ElementFormat | HiFloat8 | TableElement
Element: TypeAlias = CodedElement | Cast
Scaling: TypeAlias = (
    BlockScaling
    | GroupScaling
    | TensorScaling
    | PairScaling
    | AbsmaxScaling
    | ChoiceScaling
    | MacroScaling
)


@dataclass(frozen=True, slots=True)
class Format:
    """Named number format, which consists of an element type, a scaling and a rounding mode."""

    name: str
    element: Element
    scaling: Scaling | None = None  #: None if values are rounded without a scale
    rounding: Rounding = "nearest"
    #: True if a quantization type that names the format gives square blocks to the weights of
    #: linear layers, as with FP8 blocks of 1 x 128 for activations and 128 x 128 for weights
    square_weights: bool = False

    def __post_init__(self) -> None:
        check_choice("rounding", self.rounding, ROUNDINGS)
        if self.block_size is not None and not self.element.takes_block_scales:
            raise ValueError(
                f"format {self.name!r} puts block scales on {self.element!r}; "
                "block scales need an ElementFormat"
            )
        if self.is_cast and (self.scaling or self.rounding != "nearest"):
            raise ValueError(
                f"format {self.name!r} is a cast of torch's: it has no scale and rounds to nearest"
            )
        if self.rounding not in self.roundings:
            raise ValueError(
                f"format {self.name!r}: {self.element.name} elements have no {self.rounding} "
                f"rounding under these scales; choose {' or '.join(self.roundings)}"
            )
        if isinstance(self.scaling, BlockScaling):
            check_element(self.scaling, self.element.max)

    @property
    def roundings(self) -> tuple[Rounding, ...]:
        """Rounding modes that the element type and the scales accept."""
        scaling = self.scaling
        if (
            isinstance(self.element, ElementFormat)
            and isinstance(scaling, BlockScaling)
            and (scaling.scale, scaling.height) == ("e4m3", 1)
            and EDEN_GROUP % scaling.size == 0
            and len(self.elements) == 1
        ):
            return (*self.element.roundings, "eden")
        return self.element.roundings

    @property
    def is_cast(self) -> bool:
        """True if the format is a plain cast to a torch dtype."""
        return self.element.is_cast

    @property
    def elements(self) -> tuple[Element, ...]:
        """Element types that a block may have: one, or two between which each block chooses."""
        alternative = None if self.scaling is None else self.scaling.alternative
        return (self.element,) if alternative is None else (self.element, alternative)

    @property
    def block_size(self) -> int | None:
        """Number of values along an axis that share a scale; None without block scales.

        It is `WHOLE_AXIS`, which is larger than any axis, if a scale applies to a whole row.
        """
        return None if self.scaling is None else self.scaling.size

    @property
    def height(self) -> int:
        """Number of rows in a block; if above 1, blocks span the last two axes."""
        return 1 if self.scaling is None else self.scaling.height

    @property
    def square(self) -> bool:
        """True if blocks are square and span the last two axes."""
        return self.scaling is not None and self.scaling.square

    @property
    def block_scale(self) -> str | None:
        """Number type of block scales, such as E8M0; None if the format has no block scales."""
        return None if self.scaling is None else self.scaling.block_scale

    @property
    def scale_bytes(self) -> int:
        """Number of scale bytes stored per block; 0 if the format has no block scales."""
        return 0 if self.scaling is None else self.scaling.scale_bytes

    @property
    def scale_rule(self) -> ScaleRule | None:
        """Rule that computes an E8M0 scale from a block's maximum; None for other scales."""
        return None if self.scaling is None else self.scaling.rule

    @property
    def has_tensor_scale(self) -> bool:
        """True if the format has one float32 scale for the whole tensor."""
        return self.scaling is not None and self.scaling.outer == "tensor"

    @property
    def has_outer_scale(self) -> bool:
        """True if the format stores float32 scales for groups larger than a block."""
        return self.scaling is not None and self.scaling.outer != "none"

    @property
    def outer_size(self) -> int | None:
        """Number of values along an axis that share an outer scale.

        It is None if one outer scale applies to the whole tensor, or if there is no outer scale.
        """
        return None if self.scaling is None else self.scaling.outer_size

    @property
    def by_class(self) -> bool:
        """True if a value and the scale of its block determine the quantized value."""
        return self.scaling is None or self.scaling.by_class

    @property
    def stochastic(self) -> bool:
        """True if rounding draws random bits."""
        return ROUNDINGS[self.rounding].random

    @property
    def corrects_scales(self) -> bool:
        """True if block scales are changed after the values are rounded."""
        return ROUNDINGS[self.rounding].corrects_scales


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
#: Shorter types, also in two's complement with an unused lowest code: multiples of 1/16, 1/4 and
#: 1/2, respectively.
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

#: Scaling of the OCP specification: a scale is the largest power of two at or below the maximum of
#: the block, divided by the largest power of two of the element type.
OCP = BlockScaling(32, "floor")

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            Format("bf16", Cast(torch.bfloat16)),
            Format("fp16", Cast(torch.float16)),
            Format("mxfp8", E4M3, OCP),
            Format("mxfp8_e5m2", E5M2, OCP),
            Format("mxfp6_e3m2", E3M2, OCP),
            Format("mxfp6_e2m3", E2M3, OCP),
            Format("mxfp4", E2M1, OCP),
            Format("mxint8", INT8, OCP),
            Format("nvfp4", E2M1, BlockScaling(16, scale="e4m3", outer="tensor")),
            Format("hifp8", HiFloat8()),
            Format("hifp4", S1P2, GroupScaling()),
            Format("fp8_e4m3", E4M3, TensorScaling(E4M3.max)),
            Format("fp8_e5m2", E5M2, TensorScaling(E5M2.max)),
            Format("mxint6", INT6, OCP),
            Format("mxint4", INT4, OCP),
            Format("nvint4", INT4, BlockScaling(16, scale="e4m3", outer="tensor")),
            Format("amdfp4", E2M1, BlockScaling(16, scale="ue5m3")),
            Format("fp8_block", E4M3, BlockScaling(128, scale="fp32"), square_weights=True),
            Format("fp8_rowwise", E4M3, BlockScaling(WHOLE_AXIS, scale="fp32")),
            Format("mx9", INT8, PairScaling(lowest=-120)),
            Format("mx6", INT5, PairScaling(lowest=-123)),
            Format("nf4", TableElement("nf4"), AbsmaxScaling()),
            Format("if4", E2M1, ChoiceScaling(shared=True)),
            Format("if4_mae", E2M1, ChoiceScaling(shared=True, error="mae")),
            Format("mixfp4", E2M1, ChoiceScaling(shared=False)),
            Format("mxfp4_macro", E2M1, MacroScaling()),
            Format("mxfp4_macro_oas", E2M1, MacroScaling("rceil", top=7.25)),
        )
    }
)
