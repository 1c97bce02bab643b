"""The number formats, as data.

A `Format` is an element type and, for block formats, the way its blocks are scaled. Behavior lives
elsewhere and reads these fields: adding a format adds a constant here and a golden table in the
tests, no branch.

Sources: OCP Microscaling Formats (MX) v1.0, section 5 (elements, E8M0 scale) and 6.3 (conversion);
HiFloat8, arXiv 2409.16626.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, cast, get_args

import torch

ScaleRule = Literal["floor", "rceil", "ceil", "even"]
Overflow = Literal["saturate", "inf"]


@dataclass(frozen=True, slots=True)
class ElementFormat:
    """A number type described by its fields alone: sign, exponent and mantissa, finite, saturating.

    Codes that mean Inf or NaN in an element (E4M3, E5M2) play no part: in a block format a special
    value lives in the scale.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int  #: stored bits, without the implicit one
    bias: int
    max: float  #: largest finite magnitude
    negative_zero: bool = True  #: False for two's complement, which has a single zero

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

    def __post_init__(self) -> None:
        if self.overflow not in get_args(Overflow):
            raise ValueError(
                f"unknown HiFloat8 overflow {self.overflow!r}; choose 'saturate' or 'inf'"
            )


@dataclass(frozen=True, slots=True)
class Cast:
    """A type that torch has, whose cast rounds to nearest even and overflows to Inf."""

    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class BlockScaling:
    """One E8M0 scale (a power of two from 2^-127 to 2^127, or NaN) for each `size` neighbors."""

    size: int
    rule: ScaleRule

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a block of {self.size} values; choose a block size of 1 or more")
        if self.rule not in get_args(ScaleRule):
            rules = ", ".join(get_args(ScaleRule))
            raise ValueError(f"unknown scale rule {self.rule!r}; choose one of {rules}")


@dataclass(frozen=True, slots=True)
class Format:
    """A number format as users name it: elements, and their scaling (None: cast directly)."""

    name: str
    element: ElementFormat | HiFloat8 | Cast
    scaling: BlockScaling | None = None

    def __post_init__(self) -> None:
        if self.scaling is not None and not isinstance(self.element, ElementFormat):
            raise ValueError(
                f"format {self.name!r} puts block scales on {self.element!r}; "
                "block scales need an ElementFormat"
            )

    @property
    def block_size(self) -> int | None:
        """Number of values that share a scale, None when there is none."""
        return None if self.scaling is None else self.scaling.size


E4M3 = ElementFormat("e4m3", exponent_bits=4, mantissa_bits=3, bias=7, max=448.0)
E5M2 = ElementFormat("e5m2", exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0)
E3M2 = ElementFormat("e3m2", exponent_bits=3, mantissa_bits=2, bias=3, max=28.0)
E2M3 = ElementFormat("e2m3", exponent_bits=2, mantissa_bits=3, bias=1, max=7.5)
E2M1 = ElementFormat("e2m1", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
#: Multiples of 1/64 in two's complement, which E1M6 with this bias also is: a number below 1 is
#: subnormal and the spacing is the same on both sides. OCP lets the code of -2 stay unused.
INT8 = ElementFormat(
    "int8", exponent_bits=1, mantissa_bits=6, bias=1, max=127 / 64, negative_zero=False
)

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
            Format("hifp8", HiFloat8()),
        )
    }
)
ALIASES: Mapping[str, str] = MappingProxyType(
    {"mxfp8_e4m3": "mxfp8", "hif8": "hifp8", "hifloat8": "hifp8"}
)

_SPELLED_OUT = re.compile(r"mx:(?P<element>[^:]*):b(?P<size>[0-9]+):(?P<rule>[^:]*)")
_FLOAT_NAME = re.compile(r"e(?P<exponent>[1-9])m(?P<mantissa>[0-9])")
_ELEMENT_BITS = 8


def get_format(name: str) -> Format:
    """The format of that name or alias, in any case, or spelled out: `mx:e3m4:b16:rceil`.

    Spelled out are the element (see `get_element`), the block size and the scale rule (floor,
    rceil, ceil, even; see `block.py`). A last block that the size does not fill is a shorter one.

    Raises ValueError, naming what is accepted, for anything else.
    """
    key = name.lower()
    if key in ALIASES or key in FORMATS:
        return FORMATS[ALIASES.get(key, key)]
    spelled_out = _SPELLED_OUT.fullmatch(key)
    if spelled_out is None:
        raise ValueError(
            f"unknown format {name!r}; choose one of {', '.join(sorted({*FORMATS, *ALIASES}))}, "
            "or spell out element, block size and scale rule, as in 'mx:e3m4:b16:rceil'"
        )
    try:
        element = get_element(spelled_out["element"])
        # BlockScaling checks that the rule is one.
        scaling = BlockScaling(int(spelled_out["size"]), cast(ScaleRule, spelled_out["rule"]))
    except ValueError as error:
        raise ValueError(f"format {name!r}: {error}") from None
    return Format(f"mx:{element.name}:b{scaling.size}:{scaling.rule}", element, scaling)


def get_element(name: str) -> ElementFormat:
    """The named element, or any `eXmY` of at most 8 bits.

    One without a name is read as the 4- and 6-bit types of OCP are: the bias is 2^(X-1) - 1 and
    every code is a finite number. With no mantissa bits a tie goes to the larger power of two,
    except that half of the smallest number goes to zero.

    Raises ValueError for anything else.
    """
    if name in ELEMENTS:
        return ELEMENTS[name]
    match = _FLOAT_NAME.fullmatch(name)
    exponent_bits, mantissa_bits = map(int, match.groups()) if match else (0, 0)
    if match is None or 1 + exponent_bits + mantissa_bits > _ELEMENT_BITS:
        raise ValueError(
            f"unknown element {name!r}; choose one of {', '.join(ELEMENTS)}, or eXmY with 1 or "
            f"more exponent bits and at most {_ELEMENT_BITS} bits with the sign, as in 'e3m4'"
        )
    bias = (1 << (exponent_bits - 1)) - 1
    # The largest code: exponent field all ones, mantissa all ones.
    emax = (1 << exponent_bits) - 1 - bias
    largest = math.ldexp((2 << mantissa_bits) - 1, emax - mantissa_bits)
    return ElementFormat(name, exponent_bits, mantissa_bits, bias, largest)
