"""Parse the name of an accumulator, which is predefined or spelled out.

hopper_fp8                     a predefined accumulator, in upper or lower case
fda:l32:f13:m13:rz             a fused dot product and addition, spelled out:

l32     products per step, which are added to the running sum at once
f13     fractional bits that remain of each term below the step's largest exponent; fx if nothing is
        lost, which requires l1
m13     mantissa bits of the running sum, besides the implicit one; e5m10 also gives the number of
        exponent bits, which is 8 by default
rz rne  rounding of the running sum: toward zero, or to nearest with ties to even
p128    optional: after 128 products, the running sum is added to a second, float32 sum
pe6m9   optional, with p128: type of the second sum, which rounds to nearest
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import cast

from megatron.fake_quant.accumulate.accumulator import (
    ACCUMULATORS,
    FP32_NEAREST,
    Accumulator,
    SumRounding,
    SumType,
)

_EXAMPLE = "fda:l32:f13:m13:rz:p128"
_LONGEST_NAME = 100  #: maximum length of a name, in characters
#: largest numbers of products per step, of fractional bits, and of products per promotion
LARGEST_STEP, MOST_ALIGN_BITS, LARGEST_INTERVAL = 1024, 36, 1 << 20

#: Patterns of the parts of a spelled-out name, and what each part sets.
_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "l[0-9]+": "products per step",
        "f([0-9]+|x)": "fractional bits",
        "(e[0-9]+)?m[0-9]+": "type of the running sum",
        "rz|rne": "rounding",
        "p[0-9]+": "promotion interval",
        "pe[0-9]+m[0-9]+": "type of the second sum",
    }
)
_REQUIRED = tuple(_PARTS.values())[:4]


def get_accumulator(name: str) -> Accumulator:
    """Return the accumulator with the given name. The docstring of this module lists all names.

    The name of the returned accumulator has one canonical spelling: `FDA:m13:f13:L32:rz` becomes
    `fda:l32:f13:m13:rz`.

    Raises:
        ValueError: if there is no such accumulator; the message lists the accepted names.
    """
    if not isinstance(name, str):
        raise ValueError(
            f"{name!r} is not the name of an accumulator; give a string such as 'hopper_fp8' or "
            f"{_EXAMPLE!r}"
        )
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"the accumulator name {name[:20]!r}... has {len(name)} characters; choose a name of "
            f"at most {_LONGEST_NAME} characters"
        )
    key = name.lower()
    if key in ACCUMULATORS:
        return ACCUMULATORS[key]
    family, colon, parts = key.partition(":")
    if family != "fda" or not colon:
        near = difflib.get_close_matches(key, ACCUMULATORS, n=3)
        meant = f", did you mean {' or '.join(near)}?" if near else ";"
        raise ValueError(
            f"unknown accumulator {name!r}{meant} choose one of {', '.join(ACCUMULATORS)}, or "
            f"spell one out, as in {_EXAMPLE!r}"
        )
    try:
        return _spelled_out(_by_kind(parts.split(":")))
    except ValueError as error:
        raise ValueError(f"accumulator {name!r}: {error}") from None


def _by_kind(parts: list[str]) -> dict[str, str]:
    """Return the parts of a spelled-out name in a dict, keyed by what each part sets."""
    by_kind: dict[str, str] = {}
    for part in parts:
        kind = next((kind for form, kind in _PARTS.items() if re.fullmatch(form, part)), None)
        if kind is None:
            raise ValueError(f"unknown part {part!r}; write it as in {_EXAMPLE!r}")
        if kind in by_kind:
            raise ValueError(f"{part!r} sets the {kind} a second time; set it once")
        by_kind[kind] = part
    missing = [kind for kind in _REQUIRED if kind not in by_kind]
    if missing:
        raise ValueError(f"it lacks the {', the '.join(missing)}; write it as in {_EXAMPLE!r}")
    return by_kind


def _spelled_out(parts: Mapping[str, str]) -> Accumulator:
    step = _number(parts["products per step"][1:], 1, LARGEST_STEP, "products per step")
    bits = parts["fractional bits"][1:]
    align_bits = None if bits == "x" else _number(bits, 0, MOST_ALIGN_BITS, "fractional bits")
    if align_bits is None and step != 1:
        raise ValueError(
            f"fx sums a step exactly, which is defined for l1 only, not for l{step}; choose l1, or "
            f"f0 to f{MOST_ALIGN_BITS}"
        )
    rounding = cast(SumRounding, parts["rounding"])
    keep = _sum_type(parts["type of the running sum"], rounding)
    accumulator = Accumulator(name="", step=step, align_bits=align_bits, keep=keep)
    spelling = f"fda:l{step}:f{'x' if align_bits is None else align_bits}:{_text(keep)}:{rounding}"
    if interval := parts.get("promotion interval"):
        every = _number(interval[1:], 1, LARGEST_INTERVAL, "products between promotions")
        if every % step:
            raise ValueError(
                f"a promotion after {every} products is inside a step of {step}; choose a multiple "
                f"of {step}"
            )
        second = _sum_type(parts.get("type of the second sum", "pm23")[1:], "rne")
        accumulator = replace(
            accumulator,
            scales="promotion",
            scale_block=every,
            scale_type="fp32",
            promote_every=every,
            promote_to=second,
        )
        spelling += f":p{every}" + (
            "" if second == FP32_NEAREST else f":p{_text(second, full=True)}"
        )
    elif "type of the second sum" in parts:
        raise ValueError(
            f"{parts['type of the second sum']!r} is the type of a second sum, and there is none; "
            "add a promotion interval such as p128"
        )
    return replace(accumulator, name=spelling)


def _number(digits: str, lowest: int, highest: int, what: str) -> int:
    number = int(digits)
    if not lowest <= number <= highest:
        raise ValueError(f"{number} {what}; choose a number from {lowest} to {highest}")
    return number


def _sum_type(text: str, rounding: SumRounding) -> SumType:
    """Return the type with the given name, such as m13 or e5m10."""
    exponent, _, mantissa = text.removeprefix("e").rpartition("m")
    return SumType(
        _number(mantissa, 1, 23, "mantissa bits"),
        rounding,
        _number(exponent or "8", 2, 8, "exponent bits"),
    )


def _text(kept: SumType, *, full: bool = False) -> str:
    """Return the name of a type; leave out the part `e8` unless `full` is True."""
    exponent = f"e{kept.exponent_bits}" if full or kept.exponent_bits != 8 else ""
    return f"{exponent}m{kept.mantissa_bits}"
