"""From a user's name to a `Format`: the named ones, their variants, and formats spelled out.

mxfp8                 a named format, in any case; some have aliases
mx:e3m4:b16:rceil     element, block size and scale rule of an MX format, spelled out
mxfp8:rceil           a named format and, after colons, what is changed about it:

floor rceil ceil even   the rule of E8M0 scales (MX formats)
2d                      square blocks, 32 x 32 or 16 x 16 (MX formats, nvfp4)
sr                      stochastic rounding
hr                      HiFloat8's hybrid rounding
inf                     HiFloat8 overflows to Inf, not to the largest number
t15, t224, ...          one scale for the tensor, its largest magnitude becomes 15, 224, ...
pow2                    that scale is a power of two
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import cast, get_args

from megatron.fake_quant.formats import (
    ELEMENTS,
    FORMATS,
    BlockScaling,
    Cast,
    ElementFormat,
    Format,
    HiFloat8,
    ScaleRule,
    TensorScaling,
    TwoLevelScaling,
)

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "mxfp8_e4m3": "mxfp8",
        "hif8": "hifp8",
        "hifloat8": "hifp8",
        "hif4": "hifp4",
        "hifloat4": "hifp4",
    }
)
RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)

_SPELLED_OUT = re.compile(
    r"mx:(?P<element>[^:]*):b(?P<size>[0-9]+):(?P<rule>[^:]*)(:(?P<variants>.*))?"
)
_FLOAT_NAME = re.compile(r"e(?P<exponent>[1-9])m(?P<mantissa>[0-9])")
_TARGET = re.compile(r"t(?P<number>[0-9]+(\.[0-9]+)?)")
_ELEMENT_BITS = 8


def get_format(name: str) -> Format:
    """The format of that name; the module's docstring lists what a name can be.

    The result's own name is written one way: `HiF8:INF:hr` is `hifp8:hr:inf`. A last block that the
    block size does not fill is a shorter one.

    Raises ValueError, naming what is accepted, for anything else.
    """
    key = name.lower()
    spelled_out = _SPELLED_OUT.fullmatch(key)
    first, colon, variants = key.partition(":")
    varied = bool(colon)
    base = FORMATS.get(ALIASES.get(first, first))
    if spelled_out is None and base is None:
        raise _unknown(name)
    try:
        if spelled_out is not None:
            base, variants = _spelled_out(spelled_out), spelled_out["variants"]
            varied = variants is not None
        assert base is not None
        fmt = base
        said = {"rule"} if spelled_out is not None else set()
        for variant in variants.split(":") if varied else ():
            if (kind := _kind(variant)) in said:
                raise ValueError(f"{variant!r} says the {kind} a second time; say it once")
            said.add(kind)
            fmt = _changed(fmt, variant)
    except ValueError as error:
        raise ValueError(f"format {name!r}: {error}") from None
    return base if fmt == base else replace(fmt, name=_canonical(base, fmt))


def _unknown(name: str) -> ValueError:
    known = sorted({*FORMATS, *ALIASES})
    near = difflib.get_close_matches(name.lower().partition(":")[0], known, n=3)
    meant = f", did you mean {' or '.join(near)}?" if near else ";"
    return ValueError(
        f"unknown format {name!r}{meant} choose one of {', '.join(known)}, "
        "or spell out element, block size and scale rule, as in 'mx:e3m4:b16:rceil'"
    )


def _spelled_out(match: re.Match[str]) -> Format:
    element = get_element(match["element"])
    # BlockScaling checks that the rule is one.
    scaling = BlockScaling(int(match["size"]), cast(ScaleRule, match["rule"]))
    return Format(f"mx:{element.name}:b{scaling.size}:{scaling.rule}", element, scaling)


def _kind(variant: str) -> str:
    """What a variant is about: of each kind there can be one."""
    if variant in RULES:
        return "rule"
    if variant in ("sr", "hr"):
        return "rounding"
    return "target" if _TARGET.fullmatch(variant) else variant


def _changed(fmt: Format, variant: str) -> Format:
    """`fmt` with one thing changed; a ValueError where it has no such thing."""
    scaling, element = fmt.scaling, fmt.element
    target = _TARGET.fullmatch(variant)
    if variant in RULES and isinstance(scaling, BlockScaling):
        return replace(fmt, scaling=replace(scaling, rule=variant))
    if variant == "2d" and isinstance(scaling, (BlockScaling, TwoLevelScaling)):
        return replace(fmt, scaling=replace(scaling, square=True))
    if variant == "sr" and not isinstance(element, Cast):
        return replace(fmt, rounding="stochastic")
    if variant == "hr" and isinstance(element, HiFloat8):
        return replace(fmt, rounding="hybrid")
    if variant == "inf" and isinstance(element, HiFloat8):
        return replace(fmt, element=HiFloat8(overflow="inf"))
    if target and isinstance(element, HiFloat8):
        power = isinstance(scaling, TensorScaling) and scaling.power_of_two
        return replace(fmt, scaling=TensorScaling(float(target["number"]), power))
    if variant == "pow2" and isinstance(scaling, TensorScaling):
        return replace(fmt, scaling=replace(scaling, power_of_two=True))
    accepted = variants_of(fmt)
    raise ValueError(
        f"{variant!r} cannot be said of {fmt.name}; "
        + (f"accepted are {', '.join(accepted)}" if accepted else "it has no variants")
    )


def variants_of(fmt: Format) -> list[str]:
    """What may follow the format's name, for help and error messages."""
    if isinstance(fmt.element, Cast):
        return []
    variants: list[str] = [*RULES] if isinstance(fmt.scaling, BlockScaling) else []
    if isinstance(fmt.scaling, (BlockScaling, TwoLevelScaling)):
        variants.append("2d")
    variants.append("sr")
    if isinstance(fmt.element, HiFloat8):
        variants += ["hr", "inf", "t<number> (as in t15)"]
    if isinstance(fmt.scaling, TensorScaling):
        variants.append("pow2")
    return variants


def _canonical(base: Format, fmt: Format) -> str:
    """The name of `fmt`, which was made from `base`: the changes in a fixed order."""
    changes: list[str] = []
    old, new = base.scaling, fmt.scaling
    if isinstance(new, BlockScaling) and isinstance(old, BlockScaling) and new.rule != old.rule:
        changes.append(new.rule)
    if fmt.square and not base.square:
        changes.append("2d")
    if fmt.rounding != base.rounding:
        changes.append("sr" if fmt.rounding == "stochastic" else "hr")
    if isinstance(fmt.element, HiFloat8):
        changes += ["inf"] if fmt.element.overflow == "inf" else []
        changes += [f"t{_plain(new.target)}"] if isinstance(new, TensorScaling) else []
    if isinstance(new, TensorScaling) and new.power_of_two:
        changes.append("pow2")
    return ":".join([base.name, *changes])


def _plain(x: float) -> str:
    """Return all digits of a number, without an exponent: 15, 0.0625."""
    # torch.compile cannot trace the decimal module.
    digits, _, exponent = repr(x).partition("e")
    whole, _, fraction = digits.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = whole + fraction
    digits = "0" * (1 - point) + digits + "0" * (point - len(digits))
    point = max(point, 1)
    return f"{digits[:point]}.{digits[point:]}".rstrip("0").rstrip(".")


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
