"""Define the variants in format names: what each changes, and which formats take it.

A variant is a part after a colon, such as `sr` in `mxfp8:sr`. `names.py` lists all of them, and
parses names. The functions here apply one variant to a format, and return the variants that turn a
base format into another one, in the order of a canonical name.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import cast, get_args

from megatron.fake_quant.block_scaling import (
    BOUND,
    GLOBAL,
    HEADROOM,
    TOP,
    BlockScaling,
    Outer,
    ScaleRule,
    Search,
    check_headroom,
    share,
)
from megatron.fake_quant.elements import ELEMENTS, ElementFormat, HiFloat8
from megatron.fake_quant.formats import Format
from megatron.fake_quant.rounding_modes import EDEN_BOUND, ROUNDINGS, Rounding
from megatron.fake_quant.scalings.float8_scales import bound
from megatron.fake_quant.special_scalings import (
    DELAYED,
    HISTORY,
    MARGIN,
    ChoiceScaling,
    TensorScaling,
)

RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)

_NUMBER = r"[0-9]+(\.[0-9]+)?"
TARGET = "t<number> (as in t15)"
_ROUNDINGS: Mapping[str, Rounding] = MappingProxyType(
    {mode.suffix: rounding for rounding, mode in ROUNDINGS.items() if mode.suffix}
)
#: Outer scales, by the variants that select them.
_OUTER: Mapping[str, Outer] = MappingProxyType({f"outer-{name}": name for name in get_args(Outer)})
_SEARCHES = ("4over6-mae", "4over6-mse")
#: All variants of format names, in the order in which help and error messages list them.
_VARIANTS = (
    *RULES,
    TOP,
    "2d",
    *_OUTER,
    *_SEARCHES,
    BOUND,
    HEADROOM,
    "ue8m0",
    *_ROUNDINGS,
    "inf",
    TARGET,
    "pow2",
    *DELAYED,
    MARGIN,
    GLOBAL,
)
#: Placeholders that help shows for variants with a number, by the pattern of the variant.
_WITH_NUMBER: Mapping[str, str] = MappingProxyType(
    {
        f"t{_NUMBER}": TARGET,
        f"top{_NUMBER}": TOP,
        f"bound{_NUMBER}": BOUND,
        rf"head([0-9]+/[0-9]+|{_NUMBER})": HEADROOM,
        "delayed[0-9]+": DELAYED[1],
        "margin[0-9]{1,2}": MARGIN,
    }
)
#: Property of a format that a variant changes; if a variant is not listed, its own name is used. A
#: name may change each property only once.
_KINDS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(RULES, "rule")
    | dict.fromkeys(_ROUNDINGS, "rounding")
    | dict.fromkeys(_OUTER, "outer scale")
    | dict.fromkeys(_SEARCHES, "search")
    | dict.fromkeys((*DELAYED, GLOBAL), "amax")
    | {TARGET: "target", TOP: "top", BOUND: "bound", HEADROOM: "headroom", MARGIN: "margin"}
)


def placeholder(variant: str) -> str:
    """Return a variant as help shows it: unchanged, or its placeholder if it has a number."""
    for pattern, text in _WITH_NUMBER.items():
        if re.fullmatch(pattern, variant):
            return text
    return variant


def kind_of(variant: str) -> str:
    """Return the property of a format that a variant such as `sr` changes.

    A name may change each property once.
    """
    shown = placeholder(variant)
    return _KINDS.get(shown, shown)


def changed(fmt: Format, variant: str) -> Format:
    """Return `fmt` with one variant applied.

    Raises:
        ValueError: if the format does not accept the variant.
    """
    shown = placeholder(variant)
    if not _accepts(fmt, shown):
        accepted = variants_of(fmt)
        raise ValueError(
            f"{fmt.name} does not take {variant!r}; "
            + (f"it takes {', '.join(accepted)}" if accepted else "it has no variants")
        )
    kind = kind_of(variant)
    if kind == "rounding":
        scaling, rounding = fmt.scaling, _ROUNDINGS[variant]
        if rounding == "eden" and fmt.has_outer_scale:
            assert isinstance(scaling, BlockScaling)
            if scaling.bound is None:
                scaling = replace(scaling, bound=EDEN_BOUND)
        return replace(fmt, scaling=scaling, rounding=rounding)
    if variant == GLOBAL:
        assert isinstance(fmt.scaling, BlockScaling | ChoiceScaling | TensorScaling)
        return replace(fmt, scaling=replace(fmt.scaling, amax=GLOBAL))
    if kind == "inf":
        return replace(fmt, element=HiFloat8(overflow="inf"))
    if kind == "target":
        power = getattr(fmt.scaling, "power_of_two", False)
        return replace(fmt, scaling=TensorScaling(float(variant[1:]), power))
    if isinstance(fmt.scaling, TensorScaling):
        return replace(fmt, scaling=_TENSOR_CHANGES[kind](fmt.scaling, variant))
    assert isinstance(fmt.scaling, BlockScaling)
    return replace(fmt, scaling=_CHANGES[kind](fmt.scaling, variant))


#: Function that applies a variant to a block scaling, by the property that the variant changes.
_CHANGES: Mapping[str, Callable[[BlockScaling, str], BlockScaling]] = MappingProxyType(
    {
        "rule": lambda scaling, variant: replace(scaling, rule=cast(ScaleRule, variant)),
        "top": lambda scaling, variant: replace(scaling, top=float(variant[3:])),
        "2d": lambda scaling, variant: replace(scaling, height=scaling.size),
        "outer scale": lambda scaling, variant: replace(scaling, outer=_OUTER[variant]),
        "search": lambda scaling, variant: replace(scaling, search=cast(Search, variant[-3:])),
        "bound": lambda scaling, variant: replace(scaling, bound=float(variant[5:])),
        "headroom": lambda scaling, variant: replace(scaling, headroom=_fraction(variant[4:])),
        "ue8m0": lambda scaling, variant: replace(scaling, scale="e8m0", rule="rceil"),
    }
)


def _delayed(scaling: TensorScaling, variant: str) -> TensorScaling:
    """Return `scaling` as delayed scaling with the history length that `variant` sets."""
    digits = variant.removeprefix("delayed")
    history = 1 if variant == "recent" else int(digits) if digits else HISTORY
    return replace(scaling, amax="delayed", history=history)


def _with_headroom(scaling: TensorScaling, variant: str) -> TensorScaling:
    """Return `scaling` with its target multiplied by the fraction in `variant`."""
    fraction = _fraction(variant[4:])
    check_headroom(fraction)
    return replace(scaling, target=scaling.target * share(fraction))


#: Function that applies a variant to a tensor scaling, by the property that the variant changes.
_TENSOR_CHANGES: Mapping[str, Callable[[TensorScaling, str], TensorScaling]] = MappingProxyType(
    {
        "top": lambda scaling, variant: replace(scaling, target=float(variant[3:])),
        "headroom": _with_headroom,
        "pow2": lambda scaling, variant: replace(scaling, power_of_two=True),
        "amax": _delayed,
        "margin": lambda scaling, variant: replace(
            scaling, target=math.ldexp(scaling.target, -int(variant[6:]))
        ),
    }
)


def _fraction(text: str) -> str:
    """Return the number in `text` as a fraction in lowest terms: 0.75 and 6/8 become 3/4."""
    whole, _, part = text.partition("/")
    if not part:
        digits, _, decimals = whole.partition(".")
        whole, part = digits + decimals, "1" + "0" * len(decimals)
    above, below = int(whole), int(part)
    if below == 0:
        raise ValueError(f"a headroom of {text}; choose a fraction such as 16/17")
    common = math.gcd(above, below)
    return f"{above // common}" if below == common else f"{above // common}/{below // common}"


def without_defaults(fmt: Format) -> Format:
    """Return `fmt`, with the scaling's `top` and `bound` set to None if they equal the defaults."""
    scaling = fmt.scaling
    if not isinstance(scaling, BlockScaling):
        return fmt
    assert isinstance(fmt.element, ElementFormat)
    own = bound(replace(scaling, bound=None)) if scaling.bound is not None else None
    if own is not None and scaling.bound == own and fmt.rounding != "eden":
        scaling = replace(scaling, bound=None)
    if scaling.top is not None and scaling.top == fmt.element.max:
        scaling = replace(scaling, top=None)
    return replace(fmt, scaling=scaling)


def variants_of(fmt: Format) -> list[str]:
    """Return the variants that the name of `fmt` accepts, for help and error messages."""
    return [variant for variant in _VARIANTS if _accepts(fmt, variant)]


def _accepts(fmt: Format, variant: str) -> bool:
    if variant in _ROUNDINGS:
        return _ROUNDINGS[variant] in fmt.roundings
    of_scaling = () if fmt.scaling is None else fmt.scaling.variants
    if variant in _SEARCHES and fmt.element != ELEMENTS["e2m1"]:
        return False
    if TARGET in fmt.element.variants and variant in (TOP, HEADROOM):
        return False  # a target variant has the same effect
    return variant in fmt.element.variants or variant in of_scaling


def canonical_name(base: Format, fmt: Format) -> str:
    """Return the canonical name of `fmt`: the name of `base`, then variants in a fixed order."""
    changes = _changes(base.scaling, fmt.scaling)
    if fmt.rounding != base.rounding:
        changes.append(ROUNDINGS[fmt.rounding].suffix)
    if fmt.element != base.element:
        changes.append("inf")
    old, new = base.scaling, fmt.scaling
    if isinstance(new, TensorScaling):
        changes += _tensor_changes(old if isinstance(old, TensorScaling) else None, new)
    if fmt.amax_source == GLOBAL:
        changes.append(GLOBAL)
    return ":".join([base.name, *changes])


def _tensor_changes(old: TensorScaling | None, new: TensorScaling) -> list[str]:
    """Return the variants that give a tensor the scaling `new`, in a fixed order.

    `old` is the scaling of the base format. Without one, a target includes the margin.
    """
    changes = [f"t{plain(new.target)}"] if old is None else []
    if new.power_of_two and not (old is not None and old.power_of_two):
        changes.append("pow2")
    if new.amax == "delayed":
        named = {HISTORY: "delayed", 1: "recent"}
        changes.append(named.get(new.history, f"delayed{new.history}"))
    if old is not None and new.target != old.target:
        significand, exponent = math.frexp(old.target / new.target)
        margin = new.amax == "delayed" and significand == 0.5 and exponent > 1
        changes.append(f"margin{exponent - 1}" if margin else f"top{plain(new.target)}")
    return changes


def _changes(old: object, new: object) -> list[str]:
    """Return the variants that turn one block scaling into another, in a fixed order."""
    if not isinstance(old, BlockScaling) or not isinstance(new, BlockScaling):
        return []
    changes: list[str] = []
    if new.scale != old.scale:
        changes.append("ue8m0")
    if new.rule is not None and new.rule != old.rule and (new.scale == old.scale):
        changes.append(new.rule)
    if new.top is not None:
        changes.append(f"top{plain(new.top)}")
    if new.height != old.height:
        changes.append("2d")
    if new.outer != old.outer:
        changes.append(f"outer-{new.outer}")
    if new.search != old.search:
        changes.append(f"4over6-{new.search}")
    if new.bound is not None:
        changes.append(f"bound{plain(new.bound)}")
    if new.headroom != old.headroom:
        changes.append(f"head{new.headroom}")
    return changes


def plain(x: float) -> str:
    """Return a number as text with all its digits and without an exponent: 15, 0.0625."""
    # Only strings are used, because torch.compile cannot trace the decimal module.
    digits, _, exponent = repr(x).partition("e")
    whole, _, fraction = digits.partition(".")
    point = len(whole) + int(exponent or 0)
    digits = whole + fraction
    digits = "0" * (1 - point) + digits + "0" * (point - len(digits))
    point = max(point, 1)
    return f"{digits[:point]}.{digits[point:]}".rstrip("0").rstrip(".")
