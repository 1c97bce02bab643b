"""The number formats, as data.

A `Format` is an element type, a scaling of its values, and a rounding mode. Behavior lives
elsewhere and reads the fields of these classes. Adding a format adds one constant here and one
golden table in the tests, and no branch. `names.py` turns a user's name into a `Format`.

Element types and scalings of different classes have the same attributes, so that readers need not
ask for the class: what a class does not have is None, 0 or False.

Sources: OCP Microscaling Formats (MX) v1.0, section 5 (elements, E8M0 scale) and 6.3 (conversion);
NVFP4, arXiv 2509.25149 appendix B; HiFloat8, arXiv 2409.16626; HiFloat4, arXiv 2602.11287.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias, get_args

import torch

ScaleRule = Literal["floor", "rceil", "ceil", "even"]
Overflow = Literal["saturate", "inf"]
Ties = Literal["even", "away"]
Rounding = Literal["nearest", "stochastic", "hybrid"]


@dataclass(frozen=True, slots=True)
class RoundingMode:
    """Facts about one rounding mode; `rounding.py` implements it."""

    suffix: str  #: follows a format's name and selects the mode; empty for the default mode
    description: str  #: for `python -m megatron.fake_quant describe`
    random: bool = False  #: True if the mode draws random bits


ROUNDINGS: Mapping[Rounding, RoundingMode] = MappingProxyType(
    {
        "nearest": RoundingMode("", "to nearest, ties {ties}"),
        "stochastic": RoundingMode(
            "sr", "up in magnitude with the probability of the distance from below, at random", True
        ),
        # HR, arXiv 2409.16626 section 2.3
        "hybrid": RoundingMode(
            "hr",
            "for |E| < 4 to nearest, ties {ties}; from there on by the value's own low bits (HR)",
        ),
    }
)


def _check_choice(kind: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {kind} {value!r}; choose one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A number type described by its fields alone: sign, exponent and mantissa, saturating.

    Values beyond `max` saturate, Inf too. Codes above that of `max` (one in E4M3, four in E5M2)
    mean Inf if their mantissa is zero and NaN otherwise; no number rounds to them.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int  #: stored bits, without the implicit one
    bias: int
    max: float  #: largest finite magnitude
    ties: Ties = "even"  #: direction in which "nearest" rounds a value half-way between neighbors
    twos_complement: bool = False  #: two's complement with one zero, not sign-magnitude

    is_cast: ClassVar[Literal[False]] = False  #: True if torch's own cast does the rounding
    tapered: ClassVar[Literal[False]] = False  #: True if the number of mantissa bits varies
    takes_block_scales: ClassVar[bool] = True
    roundings: ClassVar[tuple[Rounding, ...]] = ("nearest", "stochastic")
    variants: ClassVar[tuple[str, ...]] = ()
    saturates: ClassVar[bool] = True
    source: ClassVar[None] = None

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number; below it the spacing stays constant."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return math.frexp(self.max)[1] - 1

    @property
    def bits(self) -> int:
        """Number of bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal(self) -> float:
        """Smallest number with the full precision."""
        return math.ldexp(1, self.emin)

    @property
    def negative_zero(self) -> bool:
        """Return whether -0 is a number of its own."""
        return not self.twos_complement

    @property
    def wider(self) -> "ElementFormat":
        """The same type with larger numbers, which shows what saturation cut off."""
        return replace(self, max=2 * self.max)


@dataclass(frozen=True, slots=True)
class HiFloat8:
    """HiFloat8 with tapered precision; its numbers and rounding are explained in `hifloat8.py`."""

    overflow: Overflow = "saturate"  #: to +-32768; "inf" is the paper's other behavior
    name: str = field(default="hif8", init=False)
    bits: int = field(default=8, init=False)

    is_cast: ClassVar[Literal[False]] = False
    tapered: ClassVar[Literal[True]] = True
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
        _check_choice("HiFloat8 overflow", self.overflow, get_args(Overflow))

    @property
    def saturates(self) -> bool:
        """Return whether numbers that are too large become the largest one."""
        return self.overflow == "saturate"

    @property
    def wider(self) -> "HiFloat8":
        """The same type with overflow to Inf, which shows what saturation cut off."""
        return HiFloat8(overflow="inf")


@dataclass(frozen=True, slots=True)
class Cast:
    """A dtype of torch, whose cast rounds to nearest even and overflows to Inf."""

    dtype: torch.dtype

    is_cast: ClassVar[Literal[True]] = True
    tapered: ClassVar[Literal[False]] = False
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
        """Smallest number with the full precision."""
        return torch.finfo(self.dtype).tiny

    @property
    def source(self) -> str:
        """Definition of the type."""
        return f"torch.{self.name}, by torch's own cast"


@dataclass(frozen=True, slots=True)
class BlockScaling:
    """One E8M0 scale (a power of two from 2^-127 to 2^127, or NaN) for each block of values."""

    size: int
    rule: ScaleRule
    square: bool = False  #: blocks of size x size over the last two axes instead of 1 x size

    block_scale: ClassVar[str] = "E8M0"  #: number type of a block's scale; None without blocks
    scale_bytes: ClassVar[int] = 1  #: bytes stored per block
    finer_exponents: ClassVar[int] = 0  #: exponent that finer scales can add
    target: ClassVar[None] = None  #: value that the tensor's scale maps its maximum to, if any
    by_class: ClassVar[bool] = True  #: True if the value and one scale byte determine the result
    variants: ClassVar[tuple[str, ...]] = (*get_args(ScaleRule), "2d")  #: accepted after the name

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a block of {self.size} values; choose a block size of 1 or more")
        _check_choice("scale rule", self.rule, get_args(ScaleRule))


@dataclass(frozen=True, slots=True)
class TwoLevelScaling:
    """NVFP4's scaling: one E4M3 scale per block, under one float32 scale of the whole tensor."""

    size: int = 16
    square: bool = False  #: blocks of size x size over the last two axes instead of 1 x size

    rule: ClassVar[None] = None
    block_scale: ClassVar[str] = "E4M3"
    scale_bytes: ClassVar[int] = 1
    finer_exponents: ClassVar[int] = 0
    target: ClassVar[float] = 6.0 * 448.0  #: largest E2M1 number times largest E4M3 number
    by_class: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = ("2d",)


@dataclass(frozen=True, slots=True)
class GroupScaling:
    """HiFloat4's scaling: an E6M2 scale per 64 values, an exponent bit per 8 and one per 4."""

    size: int = field(default=64, init=False)
    square: bool = field(default=False, init=False)

    rule: ClassVar[None] = None
    block_scale: ClassVar[str] = "E6M2"
    scale_bytes: ClassVar[int] = 4
    finer_exponents: ClassVar[int] = 2
    target: ClassVar[None] = None
    by_class: ClassVar[bool] = False
    variants: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, slots=True)
class TensorScaling:
    """One float32 scale for the whole tensor, which maps its largest magnitude to `target`."""

    target: float
    power_of_two: bool = False  #: round the scale down to a power of two

    size: ClassVar[None] = None
    square: ClassVar[bool] = False
    rule: ClassVar[None] = None
    block_scale: ClassVar[None] = None
    scale_bytes: ClassVar[int] = 0
    finer_exponents: ClassVar[int] = 0
    by_class: ClassVar[bool] = True
    variants: ClassVar[tuple[str, ...]] = ("pow2",)

    def __post_init__(self) -> None:
        if not 0 < self.target < math.inf:
            raise ValueError(f"a scale to {self.target:g}; choose a target above 0")


Element: TypeAlias = ElementFormat | HiFloat8 | Cast
Scaling: TypeAlias = BlockScaling | TwoLevelScaling | GroupScaling | TensorScaling


@dataclass(frozen=True, slots=True)
class Format:
    """A number format as users name it: element type, scaling and rounding mode."""

    name: str
    element: Element
    scaling: Scaling | None = None  #: None: elements are cast without a scale
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        _check_choice("rounding", self.rounding, ROUNDINGS)
        if self.block_size is not None and not self.element.takes_block_scales:
            raise ValueError(
                f"format {self.name!r} puts block scales on {self.element!r}; "
                "block scales need an ElementFormat"
            )
        if self.is_cast and (self.scaling or self.rounding != "nearest"):
            raise ValueError(
                f"format {self.name!r} is a cast of torch's: it has no scale and rounds to nearest"
            )
        if self.rounding not in self.element.roundings:
            raise ValueError(
                f"format {self.name!r}: {self.element.name} elements have no {self.rounding} "
                f"rounding; choose {' or '.join(self.element.roundings)}"
            )

    @property
    def is_cast(self) -> bool:
        """Return whether torch's own cast does the whole work."""
        return self.element.is_cast

    @property
    def block_size(self) -> int | None:
        """Number of values along an axis that share a scale, None if blocks have no scales."""
        return None if self.scaling is None else self.scaling.size

    @property
    def square(self) -> bool:
        """Return whether blocks have two dimensions."""
        return self.scaling is not None and self.scaling.square

    @property
    def block_scale(self) -> str | None:
        """Number type of a block's scale, such as E8M0; None if blocks have no scales."""
        return None if self.scaling is None else self.scaling.block_scale

    @property
    def scale_bytes(self) -> int:
        """Number of bytes stored for the scale of one block; 0 if blocks have no scales."""
        return 0 if self.scaling is None else self.scaling.scale_bytes

    @property
    def scale_rule(self) -> ScaleRule | None:
        """Rule by which an E8M0 scale follows from a block's maximum, None for other scales."""
        return None if self.scaling is None else self.scaling.rule

    @property
    def has_tensor_scale(self) -> bool:
        """Return whether the whole tensor has a float32 scale."""
        return self.scaling is not None and self.scaling.target is not None

    @property
    def stochastic(self) -> bool:
        """Return whether rounding draws random bits."""
        return ROUNDINGS[self.rounding].random


E4M3 = ElementFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0)
E5M2 = ElementFormat("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0)
E3M2 = ElementFormat("e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max=28.0)
E2M3 = ElementFormat("e2m3", exponent_bits=2, mantissa_bits=3, bias=1, max=7.5)
E2M1 = ElementFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
#: Multiples of 1/64 in two's complement. They are those of E1M6 with this bias: a number below 1 is
#: subnormal, and the spacing is the same on both sides of 1. OCP leaves the code of -2 unused.
INT8 = ElementFormat(
    "int8", exponent_bits=1, mantissa_bits=6, bias=1, max=127 / 64, twos_complement=True
)
#: Element of HiFloat4: a sign and a multiple of 1/4.
S1P2 = ElementFormat("s1p2", exponent_bits=1, mantissa_bits=2, bias=1, max=1.75, ties="away")

#: Elements with a name. E4M3 and E5M2 spend codes on NaN and Inf, so their maximum does not follow
#: from the name.
ELEMENTS: Mapping[str, ElementFormat] = MappingProxyType(
    {element.name: element for element in (E4M3, E5M2, E3M2, E2M3, E2M1, INT8)}
)

#: Scaling of the OCP specification: the block's largest power of two over the element's.
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
            Format("nvfp4", E2M1, TwoLevelScaling()),
            Format("hifp8", HiFloat8()),
            Format("hifp4", S1P2, GroupScaling()),
            Format("fp8_e4m3", E4M3, TensorScaling(E4M3.max)),
            Format("fp8_e5m2", E5M2, TensorScaling(E5M2.max)),
        )
    }
)
