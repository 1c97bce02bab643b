"""Parse the name of a format: a named or a spelled-out format, optionally with variants.

mxfp8                 a named format, in upper or lower case; some have aliases
mx:e3m4:b16:rceil     element, block and scale rule of an MX format
nv:e2m1:b16:e4m3      element, block and number type of the block scales
mxfp8:rceil           any of these, followed by variants, each after a colon:

floor rceil ceil even   the rule of E8M0 scales (MX formats)
top7.25                 this number in place of the element's largest; E8M0 scales then use rceil
2d                      square blocks, 32 x 32 or 16 x 16 (formats with block scales)
head16/17, head0.9      block maxima reach this fraction of the largest element
outer-none -tensor -row -1x64 -1x128    float32 scales above E4M3, UE5M3 and E6M2 block scales
4over6-mae, 4over6-mse  the better of two E4M3 scales, by mean absolute or mean squared error
bound256                the block scale to which an outer scale maps the largest block
ue8m0                   powers of two, rounded up, in place of float32 block scales
sr                      stochastic rounding
hr                      HiFloat8's hybrid rounding
eden                    MS-EDEN rounding (E4M3 scales); implies bound255.99 for outer scales
inf                     HiFloat8 overflows to Inf instead of the largest number
t15, t224, ...          one scale for the tensor, which maps its largest magnitude to 15, 224, ...
pow2                    the tensor's scale is a power of two
delayed, delayed16      its scale follows from the largest of the last 1024 or 16 amaxes
recent                  its scale follows from the last amax: delayed scaling with a history of 1
margin1, margin2, ...   delayed scaling to the target / 2, / 4, ...
global                  the tensor's scale is computed from the parts of all ranks

A block is b32 (1 x 32 values), b64x128 (64 x 128 values of the last two axes) or row (a whole row).
Scales of an nv format are e4m3, ue5m3, e6m2 or fp32; the first three have an outer scale per tensor
unless the name says otherwise.
"""

import difflib
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
    WHOLE_AXIS,
    BlockScaling,
    Outer,
    ScaleRule,
    ScaleType,
    Search,
    check_block,
)
from megatron.fake_quant.elements import ELEMENTS, ElementFormat, HiFloat8
from megatron.fake_quant.float8_scales import FLOAT8, bound
from megatron.fake_quant.formats import FORMATS, Format
from megatron.fake_quant.rounding_modes import EDEN_BOUND, ROUNDINGS, Rounding
from megatron.fake_quant.special_scalings import (
    DELAYED,
    HISTORY,
    MARGIN,
    ChoiceScaling,
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
    r"(?P<family>mx|nv):(?P<element>[^:]*):(?P<block>b([0-9]+x)?[0-9]+|row):(?P<scale>[^:]*)"
    r"(:(?P<variants>.*))?"
)
_FLOAT_NAME = re.compile(r"e(?P<exponent>[1-9])m(?P<mantissa>[0-9])")
_NUMBER = r"[0-9]+(\.[0-9]+)?"
_TARGET_HELP = "t<number> (as in t15)"
_ELEMENT_BITS = 8
_LONGEST_NAME = 200  #: maximum length of a name, in characters
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
    _TARGET_HELP,
    "pow2",
    *DELAYED,
    MARGIN,
    GLOBAL,
)
#: Placeholders that help shows for variants with a number, by the pattern of the variant.
_WITH_NUMBER: Mapping[str, str] = MappingProxyType(
    {
        f"t{_NUMBER}": _TARGET_HELP,
        f"top{_NUMBER}": TOP,
        f"bound{_NUMBER}": BOUND,
        rf"head([0-9]+/[0-9]+|{_NUMBER})": HEADROOM,
        "delayed[0-9]+": DELAYED[1],
        "margin[0-9]{1,2}": MARGIN,
    }
)
#: Property of a format that each variant changes. A name may change each property only once.
_KINDS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(RULES, "rule")
    | dict.fromkeys(_ROUNDINGS, "rounding")
    | dict.fromkeys(_OUTER, "outer scale")
    | dict.fromkeys(_SEARCHES, "search")
    | dict.fromkeys((*DELAYED, GLOBAL), "amax")
    | {_TARGET_HELP: "target", TOP: "top", BOUND: "bound", HEADROOM: "headroom", MARGIN: "margin"}
)


class UnknownFormatError(ValueError):
    """Error about a name that does not begin with the name or the spelling of a format."""


def get_format(name: str) -> Format:
    """Return the format with the given name. The docstring of this module lists all names.

    The name of the returned format has one canonical spelling: `HiF8:INF:hr` becomes
    `hifp8:hr:inf`. If the block size does not divide an axis, the last block is shorter.

    Raises:
        ValueError: if there is no such format; the message lists the accepted names.
    """
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"a format's name of {len(name)} characters, {name[:20]!r}...; choose a name of at "
            f"most {_LONGEST_NAME} characters"
        )
    key = name.lower()
    spelled_out = _SPELLED_OUT.fullmatch(key)
    first, colon, variants = key.partition(":")
    varied = bool(colon)
    base = FORMATS.get(ALIASES.get(first, first))
    if spelled_out is None and base is None:
        raise _unknown(name)
    try:
        changed: set[str] = set()
        if spelled_out is not None:
            base, variants = _spelled_out(spelled_out), spelled_out["variants"]
            varied = variants is not None
            changed.add("rule" if spelled_out["family"] == "mx" else "scale")
        assert base is not None
        fmt = base
        for variant in _in_order(variants, base, changed) if varied else ():
            if (kind := _kind(variant)) in changed:
                raise ValueError(
                    f"{variant!r} is given twice; remove one"
                    if kind == variant
                    else f"{variant!r} sets the {kind} a second time; set it once"
                )
            changed.add(kind)
            fmt = _changed(fmt, variant)
        fmt = _without_defaults(fmt)
    except ValueError as error:
        raise ValueError(f"format {name!r}: {error}") from None
    return base if fmt == base else replace(fmt, name=_canonical(base, fmt))


def _in_order(variants: str, base: Format, changed: set[str]) -> list[str]:
    """Return the variants in a name, in the order in which they apply.

    The scale rule comes first; a top without a rule implies rceil. The outer scale follows,
    because it decides whether there is a bound. The source of the amax comes late, because it
    depends on the scales, and after it the margin, which depends on delayed scaling. The rounding
    mode comes last, because it may depend on the scales.
    """
    names = variants.split(":")
    rules = [name for name in names if name in RULES]
    given = bool(rules) or "rule" in changed or base.scale_rule is None
    if not given and any(_help(name) == TOP for name in names):
        rules = ["rceil"]
    others = [name for name in names if name not in RULES]
    order = {"outer scale": -1, "amax": 1, "margin": 2, "rounding": 3}
    return [*rules, *sorted(others, key=lambda name: order.get(_kind(name), 0))]


def _unknown(name: str) -> UnknownFormatError:
    known = sorted({*FORMATS, *ALIASES})
    first = name.lower().partition(":")[0]
    # "mx:" and "nv:" begin spelled-out formats, so the user did not mean a named one.
    near = [] if first in ("mx", "nv") else difflib.get_close_matches(first, known, n=3)
    meant = f", did you mean {' or '.join(near)}?" if near else ";"
    return UnknownFormatError(
        f"unknown format {name!r}{meant} choose one of {', '.join(known)}, "
        "or spell out element, block size and scale rule, as in 'mx:e3m4:b16:rceil' or "
        "'nv:e2m1:b16:e4m3'"
    )


def _spelled_out(match: re.Match[str]) -> Format:
    element = get_element(match["element"])
    size, height, block = _block(match["block"])
    family, scale = match["family"], match["scale"]
    if family == "nv" and scale not in (*FLOAT8, "fp32"):
        raise ValueError(
            f"unknown scale type {scale!r}; choose one of {', '.join((*FLOAT8, 'fp32'))}; powers "
            "of two are spelled out as in 'mx:e3m4:b16:rceil'"
        )
    # The constructor of BlockScaling checks the rule.
    scaling = (
        BlockScaling(size, cast(ScaleRule, scale), height)
        if family == "mx"
        else BlockScaling(
            size,
            height=height,
            scale=cast(ScaleType, scale),
            outer="none" if scale == "fp32" else "tensor",
        )
    )
    return Format(f"{family}:{element.name}:{block}:{scale}", element, scaling)


def _block(text: str) -> tuple[int, int, str]:
    """Return the size, the height and the canonical name of the block that `text` spells."""
    if text == "row":
        return WHOLE_AXIS, 1, text
    height, _, size = text[1:].rpartition("x")
    rows, values = int(height or 1), int(size)
    check_block(rows, values)
    return values, rows, f"b{rows}x{values}" if rows > 1 else f"b{values}"


def _help(variant: str) -> str:
    """Return a variant as help shows it: unchanged, or its placeholder if it has a number."""
    for pattern, text in _WITH_NUMBER.items():
        if re.fullmatch(pattern, variant):
            return text
    return variant


def _kind(variant: str) -> str:
    """Return the property of a format that a variant such as `sr` changes.

    A name may change each property once.
    """
    shown = _help(variant)
    return _KINDS.get(shown, shown)


def _changed(fmt: Format, variant: str) -> Format:
    """Return `fmt` with one variant applied.

    Raises:
        ValueError: if the format does not accept the variant.
    """
    shown = _help(variant)
    if not _accepts(fmt, shown):
        accepted = variants_of(fmt)
        raise ValueError(
            f"{fmt.name} does not take {variant!r}; "
            + (f"it takes {', '.join(accepted)}" if accepted else "it has no variants")
        )
    kind = _kind(variant)
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
    """Return a scaling with delayed scaling, whose history has the length that `variant` gives."""
    digits = variant.removeprefix("delayed")
    history = 1 if variant == "recent" else int(digits) if digits else HISTORY
    return replace(scaling, amax="delayed", history=history)


#: Function that applies a variant to the scaling of a tensor, by the property that it changes.
_TENSOR_CHANGES: Mapping[str, Callable[[TensorScaling, str], TensorScaling]] = MappingProxyType(
    {
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


def _without_defaults(fmt: Format) -> Format:
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


def further_variants(fmt: Format) -> list[str]:
    """Return the variants with which the name of `fmt`, a format of `get_format`, may go on."""
    numbers = {
        TOP: f"top{_plain(fmt.element.max)}",
        BOUND: "bound1",
        HEADROOM: "head1/2",
        _TARGET_HELP: "t1",
        DELAYED[1]: "delayed2",
        MARGIN: "margin1",
    }

    def continues(variant: str) -> bool:
        try:
            get_format(f"{fmt.name}:{numbers.get(variant, variant)}")
        except ValueError:
            return False
        return True

    return [variant for variant in variants_of(fmt) if continues(variant)]


def _accepts(fmt: Format, variant: str) -> bool:
    if variant in _ROUNDINGS:
        return _ROUNDINGS[variant] in fmt.roundings
    of_scaling = () if fmt.scaling is None else fmt.scaling.variants
    if variant in _SEARCHES and fmt.element != ELEMENTS["e2m1"]:
        return False
    return variant in fmt.element.variants or variant in of_scaling


def _canonical(base: Format, fmt: Format) -> str:
    """Return the canonical name of `fmt`: that of `base`, and its variants in a fixed order."""
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
    changes = [f"t{_plain(new.target)}"] if old is None else []
    if new.power_of_two and not (old is not None and old.power_of_two):
        changes.append("pow2")
    if new.amax == "delayed":
        named = {HISTORY: "delayed", 1: "recent"}
        changes.append(named.get(new.history, f"delayed{new.history}"))
    if old is not None and new.target != old.target:
        changes.append(f"margin{math.frexp(old.target / new.target)[1] - 1}")
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
        changes.append(f"top{_plain(new.top)}")
    if new.height != old.height:
        changes.append("2d")
    if new.outer != old.outer:
        changes.append(f"outer-{new.outer}")
    if new.search != old.search:
        changes.append(f"4over6-{new.search}")
    if new.bound is not None:
        changes.append(f"bound{_plain(new.bound)}")
    if new.headroom != old.headroom:
        changes.append(f"head{new.headroom}")
    return changes


def _plain(x: float) -> str:
    """Return a number as text with all its digits and without an exponent: 15, 0.0625."""
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
    # All exponent bits and mantissa bits of the largest code are ones.
    emax = (1 << exponent_bits) - 1 - bias
    largest = math.ldexp((2 << mantissa_bits) - 1, emax - mantissa_bits)
    return ElementFormat(name, exponent_bits, mantissa_bits, bias, largest)
