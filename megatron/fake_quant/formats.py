"""The number formats, as data.

A `Format` is an element type, the way its values are scaled, and how it rounds. Behavior lives
elsewhere and reads these fields: adding a format adds a constant here and a golden table in the
tests, no branch. `names.py` turns a user's name into one.

Sources: OCP Microscaling Formats (MX) v1.0, section 5 (elements, E8M0 scale) and 6.3 (conversion);
NVFP4, arXiv 2509.25149 appendix B; HiFloat8, arXiv 2409.16626; HiFloat4, arXiv 2602.11287.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import torch

ScaleRule = Literal["floor", "rceil", "ceil", "even"]
Overflow = Literal["saturate", "inf"]
Ties = Literal["even", "away"]
#: "nearest" is the format's own (ties to even, or away from zero); "stochastic" goes up with the
#: probability of the distance; "hybrid" is HiFloat8's HR, arXiv 2409.16626 section 2.3.
Rounding = Literal["nearest", "stochastic", "hybrid"]


def _one_of(kind: str, value: str, accepted: object) -> None:
    choices = get_args(accepted)
    if value not in choices:
        raise ValueError(f"unknown {kind} {value!r}; choose one of {', '.join(choices)}")


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A number type described by its fields alone: sign, exponent and mantissa, saturating.

    What is beyond `max` saturates, Inf too. Codes above that of `max` (in E4M3 one, in E5M2 four)
    mean Inf where their mantissa is zero and NaN otherwise; no number rounds to them.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int  #: stored bits, without the implicit one
    bias: int
    max: float  #: largest finite magnitude
    ties: Ties = "even"  #: where "nearest" goes from half-way
    twos_complement: bool = False  #: instead of sign and magnitude: a single zero

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
        return 1 + self.exponent_bits + self.mantissa_bits


@dataclass(frozen=True, slots=True)
class HiFloat8:
    """HiFloat8 with tapered precision; its numbers and rounding are explained in `hifloat8.py`."""

    overflow: Overflow = "saturate"  #: to +-32768; "inf" is the paper's other behavior
    name: str = field(default="hif8", init=False)
    bits: int = field(default=8, init=False)

    def __post_init__(self) -> None:
        _one_of("HiFloat8 overflow", self.overflow, Overflow)


@dataclass(frozen=True, slots=True)
class Cast:
    """A type that torch has, whose cast rounds to nearest even and overflows to Inf."""

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def bits(self) -> int:
        return torch.finfo(self.dtype).bits


@dataclass(frozen=True, slots=True)
class BlockScaling:
    """One E8M0 scale (a power of two from 2^-127 to 2^127, or NaN) for each block of values."""

    size: int
    rule: ScaleRule
    square: bool = False  #: blocks of size x size over the last two axes instead of 1 x size

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a block of {self.size} values; choose a block size of 1 or more")
        _one_of("scale rule", self.rule, ScaleRule)


@dataclass(frozen=True, slots=True)
class TwoLevelScaling:
    """NVFP4's: an E4M3 scale for each block, under one float32 scale of the whole tensor."""

    size: int = 16
    square: bool = False  #: blocks of size x size over the last two axes instead of 1 x size


@dataclass(frozen=True, slots=True)
class GroupScaling:
    """HiFloat4's: for 64 values an E6M2 scale, a bit of exponent for each 8 and for each 4."""

    size: int = field(default=64, init=False)
    square: bool = field(default=False, init=False)


@dataclass(frozen=True, slots=True)
class TensorScaling:
    """One float32 scale for the tensor, which takes its largest magnitude to `target`."""

    target: float
    power_of_two: bool = False  #: the largest power of two that does not go beyond the target

    def __post_init__(self) -> None:
        if not 0 < self.target < math.inf:
            raise ValueError(f"a scale to {self.target:g}; choose a target above 0")


Element: TypeAlias = ElementFormat | HiFloat8 | Cast
Scaling: TypeAlias = BlockScaling | TwoLevelScaling | GroupScaling | TensorScaling


@dataclass(frozen=True, slots=True)
class Format:
    """A number format as users name it: elements, their scaling (None: cast directly), rounding."""

    name: str
    element: Element
    scaling: Scaling | None = None
    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        _one_of("rounding", self.rounding, Rounding)
        blocks = self.scaling is not None and not isinstance(self.scaling, TensorScaling)
        if blocks and not isinstance(self.element, ElementFormat):
            raise ValueError(
                f"format {self.name!r} puts block scales on {self.element!r}; "
                "block scales need an ElementFormat"
            )
        if isinstance(self.element, Cast) and (self.scaling or self.rounding != "nearest"):
            raise ValueError(
                f"format {self.name!r} is a cast of torch's: it has no scale and rounds to nearest"
            )
        if self.rounding == "hybrid" and not isinstance(self.element, HiFloat8):
            raise ValueError(
                f"format {self.name!r}: hybrid rounding is HiFloat8's own; "
                "choose nearest or stochastic"
            )

    @property
    def block_size(self) -> int | None:
        """Number of values along an axis that share a scale, None when there is none."""
        if self.scaling is None or isinstance(self.scaling, TensorScaling):
            return None
        return self.scaling.size

    @property
    def square(self) -> bool:
        """Whether blocks have two dimensions."""
        return self.block_size is not None and self.scaling.square  # type: ignore[union-attr]


E4M3 = ElementFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0)
E5M2 = ElementFormat("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0)
E3M2 = ElementFormat("e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max=28.0)
E2M3 = ElementFormat("e2m3", exponent_bits=2, mantissa_bits=3, bias=1, max=7.5)
E2M1 = ElementFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
#: Multiples of 1/64 in two's complement, which E1M6 with this bias also is: a number below 1 is
#: subnormal and the spacing is the same on both sides. OCP lets the code of -2 stay unused.
INT8 = ElementFormat(
    "int8", exponent_bits=1, mantissa_bits=6, bias=1, max=127 / 64, twos_complement=True
)
#: HiFloat4's element: sign and a multiple of 1/4.
S1P2 = ElementFormat("s1p2", exponent_bits=1, mantissa_bits=2, bias=1, max=1.75, ties="away")

#: Elements that have a name. E4M3 and E5M2 give up codes to NaN and Inf, so their maximum does not
#: follow from the name.
ELEMENTS: Mapping[str, ElementFormat] = MappingProxyType(
    {element.name: element for element in (E4M3, E5M2, E3M2, E2M3, E2M1, INT8)}
)

#: The OCP specification's: the block's largest power of two over the element's.
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
