"""Parse a format's name: a named format, optionally with variants, or a spelled-out MX format.

mxfp8                 a named format, in upper or lower case; some have aliases
mx:e3m4:b16:rceil     element, block size and scale rule of an MX format
mxfp8:rceil           a named format, followed by the changes, each after a colon:

floor rceil ceil even   the rule of E8M0 scales (MX formats)
2d                      square blocks, 32 x 32 or 16 x 16 (MX formats, nvfp4)
sr                      stochastic rounding
hr                      HiFloat8's hybrid rounding
inf                     HiFloat8 overflows to Inf instead of the largest number
t15, t224, ...          one scale for the tensor, which maps its largest magnitude to 15, 224, ...
pow2                    the tensor's scale is a power of two
"""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, cast, get_args

from megatron.fake_quant.formats import (
    ELEMENTS,
    FORMATS,
    ROUNDINGS,
    BlockScaling,
    ElementFormat,
    Format,
    HiFloat8,
    Rounding,
    ScaleRule,
    TensorScaling,
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
_TARGET = re.compile(r"t[0-9]+(\.[0-9]+)?")
_TARGET_HELP = "t<number> (as in t15)"
_ELEMENT_BITS = 8
_ROUNDINGS: Mapping[str, Rounding] = MappingProxyType(
    {mode.suffix: rounding for rounding, mode in ROUNDINGS.items() if mode.suffix}
)
#: All variants of format names, in the order in which help and error messages list them.
_VARIANTS = (*RULES, "2d", *_ROUNDINGS, "inf", _TARGET_HELP, "pow2")


def get_format(name: str) -> Format:
    """Return the format with the given name; the module's docstring lists the accepted names.

    The name of the returned format has one canonical spelling: `HiF8:INF:hr` becomes
    `hifp8:hr:inf`. If the block size does not divide an axis, the last block is shorter.

    Raises:
        ValueError: if there is no such format; the message lists the accepted names.
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
        changed = {"rule"} if spelled_out is not None else set()
        for variant in variants.split(":") if varied else ():
            if (kind := _kind(variant)) in changed:
                raise ValueError(f"{variant!r} sets the {kind} a second time; set it once")
            changed.add(kind)
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
    # The constructor of BlockScaling checks the rule.
    scaling = BlockScaling(int(match["size"]), cast(ScaleRule, match["rule"]))
    return Format(f"mx:{element.name}:b{scaling.size}:{scaling.rule}", element, scaling)


def _kind(variant: str) -> str:
    """Return the property that a variant such as `sr` changes.

    A name may change each property once.
    """
    if variant in RULES:
        return "rule"
    if variant in _ROUNDINGS:
        return "rounding"
    return "target" if _TARGET.fullmatch(variant) else variant


def _changed(fmt: Format, variant: str) -> Format:
    """Return `fmt` with one variant applied.

    Raises:
        ValueError: if the format does not accept the variant.
    """
    kind = _kind(variant)
    if not _accepts(fmt, _TARGET_HELP if kind == "target" else variant):
        accepted = variants_of(fmt)
        raise ValueError(
            f"{fmt.name} does not take {variant!r}; "
            + (f"it takes {', '.join(accepted)}" if accepted else "it has no variants")
        )
    if kind == "rounding":
        return replace(fmt, rounding=_ROUNDINGS[variant])
    if kind == "inf":
        return replace(fmt, element=HiFloat8(overflow="inf"))
    if kind == "target":
        power = getattr(fmt.scaling, "power_of_two", False)
        return replace(fmt, scaling=TensorScaling(float(variant[1:]), power))
    changes: dict[str, dict[str, Any]] = {
        "rule": {"rule": variant},
        "2d": {"square": True},
        "pow2": {"power_of_two": True},
    }
    assert fmt.scaling is not None
    return replace(fmt, scaling=replace(fmt.scaling, **changes[kind]))


def variants_of(fmt: Format) -> list[str]:
    """Return the variants that a format's name accepts, for help and error messages."""
    return [variant for variant in _VARIANTS if _accepts(fmt, variant)]


def _accepts(fmt: Format, variant: str) -> bool:
    if variant in _ROUNDINGS:
        return _ROUNDINGS[variant] in fmt.element.roundings
    of_scaling = () if fmt.scaling is None else fmt.scaling.variants
    return variant in fmt.element.variants or variant in of_scaling


def _canonical(base: Format, fmt: Format) -> str:
    """Return the canonical name of `fmt`: the name of `base`, and the changes in a fixed order."""
    changes: list[str] = []
    if fmt.scale_rule is not None and fmt.scale_rule != base.scale_rule:
        changes.append(fmt.scale_rule)
    if fmt.square and not base.square:
        changes.append("2d")
    if fmt.rounding != base.rounding:
        changes.append(ROUNDINGS[fmt.rounding].suffix)
    if fmt.element != base.element:
        changes.append("inf")
    old, new = base.scaling, fmt.scaling
    if new is not None and new.size is None and getattr(old, "target", None) != new.target:
        changes.append(f"t{_plain(new.target)}")
    if getattr(new, "power_of_two", False) and not getattr(old, "power_of_two", False):
        changes.append("pow2")
    return ":".join([base.name, *changes])


def _plain(x: float) -> str:
    """Return a number as text with all of its digits and no exponent, such as 15 or 0.0625."""
    # Only strings are used, because torch.compile cannot trace the decimal module.
    digits, _, exponent = repr(x).partition("e")
    whole, _, fraction = digits.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = whole + fraction
    digits = "0" * (1 - point) + digits + "0" * (point - len(digits))
    point = max(point, 1)
    return f"{digits[:point]}.{digits[point:]}".rstrip("0").rstrip(".")


def get_element(name: str) -> ElementFormat:
    """Return the element type in `ELEMENTS` with this name, or any `eXmY` of at most 8 bits.

    An element type that is not in `ELEMENTS` follows OCP's 4- and 6-bit types: the bias is
    2^(X-1) - 1 and every code is a finite number. If it has no mantissa bits, a tie is rounded to
    the larger power of two, except that half of the smallest number is rounded to zero.

    Raises:
        ValueError: if there is no such element type.
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
    # In the largest code, all bits of the exponent and of the mantissa are ones.
    emax = (1 << exponent_bits) - 1 - bias
    largest = math.ldexp((2 << mantissa_bits) - 1, emax - mantissa_bits)
    return ElementFormat(name, exponent_bits, mantissa_bits, bias, largest)
