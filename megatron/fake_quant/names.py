"""Parse the name of a format: a named or a spelled-out format, optionally with variants.

mxfp8                 a named format, in upper or lower case; some have aliases
mx:e3m4:b16:rceil     element, block and scale rule of an MX format
nv:e2m1:b16:e4m3      element, block and number type of the block scales
mxfp8:rceil           any of these, followed by variants, each after a colon:

floor rceil ceil even   the rule of E8M0 scales (MX formats)
top7.25                 this number in place of the element's largest; E8M0 scales then use rceil
2d                      square blocks, 32 x 32 or 16 x 16 (formats with block scales)
head16/17, head0.9      block maxima reach this fraction of the largest element
outer-none -tensor -row -1x64 -1x128    float32 scales on top of E4M3, UE5M3, E6M2 block scales
4over6-mae, 4over6-mse  the better of two E4M3 scales, by mean absolute or mean squared error
bound256                the block scale to which an outer scale maps the largest block
ue8m0                   powers of two, rounded up, in place of float32 block scales
sr                      stochastic rounding
hr                      HiFloat8's hybrid rounding
eden                    MS-EDEN rounding (E4M3 scales); implies bound255.99 for outer scales
inf                     HiFloat8 overflows to Inf instead of the largest number
t15, t224, ...          one scale for the tensor, which maps its largest magnitude to 15, 224, ...
pow2                    the tensor's scale is a power of two
delayed, delayed16      the tensor's scale follows from the largest of the last 1024 or 16 amaxes
recent                  the tensor's scale follows from the last amax: delayed, with a history of 1
margin1, margin2, ...   delayed scaling to the target / 2, / 4, ...
global                  the tensor's scale is computed from the parts of all ranks

A block is b32 (1 x 32 values), b64x128 (64 x 128 values of the last two axes), row (a whole row
along the reduction axis), column (a whole column, orthogonal to that axis) or tensor (all values).
Scales of an nv format are e4m3, ue5m3, e6m2 or fp32; the first three have an outer scale per tensor
unless a variant changes this.
"""

import difflib
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import torch

from megatron.fake_quant.block_scaling import (
    BOUND,
    HEADROOM,
    TOP,
    WHOLE_AXIS,
    BlockScaling,
    ScaleRule,
    ScaleType,
    check_block,
)
from megatron.fake_quant.elements import ELEMENTS, ElementFormat
from megatron.fake_quant.formats import FORMATS, TRACEABLE_FORMATS, Format
from megatron.fake_quant.scalings.float8_types import FLOAT8
from megatron.fake_quant.special_scalings import DELAYED, MARGIN, TensorScaling
from megatron.fake_quant.variants import (
    RULES,
    TARGET,
    canonical_name,
    changed,
    kind_of,
    placeholder,
    plain,
    variants_of,
    without_defaults,
)

# torch.compile of torch 2.6 can trace a dictionary, but not a mapping proxy.
ALIASES: Mapping[str, str] = {
    "mxfp8_e4m3": "mxfp8",
    "hif8": "hifp8",
    "hifloat8": "hifp8",
    "hif4": "hifp4",
    "hifloat4": "hifp4",
}
_SPELLED_OUT = re.compile(
    r"(?P<family>mx|nv):(?P<element>[^:]*):(?P<block>b([0-9]+x)?[0-9]+|row|column|tensor)"
    r":(?P<scale>[^:]*)(:(?P<variants>.*))?"
)
#: Size and height of blocks over a whole axis, by their names.
_WHOLE = {"row": (WHOLE_AXIS, 1), "column": (1, WHOLE_AXIS), "tensor": (WHOLE_AXIS, WHOLE_AXIS)}
_FLOAT_NAME = re.compile(r"e(?P<exponent>[1-9])m(?P<mantissa>[0-9])")
_ELEMENT_BITS = 8
_LONGEST_NAME = 200  #: maximum length of a name, in characters

for _base in FORMATS.values():
    _base.mark_named()


class UnknownFormatError(ValueError):
    """Error about a name that begins with neither a named nor a spelled-out format."""


def get_format(name: str) -> Format:
    """Return the format with the given name. The docstring of this module lists all names.

    The name of the returned format has one canonical spelling: `HiF8:INF:hr` becomes
    `hifp8:hr:inf`. If the block size does not divide an axis, the last block is shorter.

    Raises:
        ValueError: if there is no such format; the message lists the accepted names.
    """
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not the name of a format; give a string such as 'mxfp8'")
    if torch.compiler.is_dynamo_compiling():  # torch.compile cannot trace a cache
        return _parsed(name)
    return _cached(name)


def _parsed(name: str) -> Format:
    """Return the format with the given name; see `get_format`."""
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"the format name {name[:20]!r}... has {len(name)} characters; choose a name of at "
            f"most {_LONGEST_NAME} characters"
        )
    key = name.lower()
    spelled_out = _SPELLED_OUT.fullmatch(key)
    first, colon, variants = key.partition(":")
    varied = bool(colon)
    base = TRACEABLE_FORMATS.get(ALIASES.get(first, first))
    if spelled_out is None and base is None:
        raise _unknown(name)
    try:
        kinds: set[str] = set()
        if spelled_out is not None:
            base, variants = _spelled_out(spelled_out), spelled_out["variants"]
            varied = variants is not None
            kinds.add("rule" if spelled_out["family"] == "mx" else "scale")
        assert base is not None
        fmt = base
        for variant in _in_order(variants, base, kinds) if varied else ():
            if (kind := kind_of(variant)) in kinds:
                raise ValueError(
                    f"{variant!r} is given twice; remove one"
                    if kind == variant
                    else f"{variant!r} sets the {kind} a second time; set it once"
                )
            kinds.add(kind)
            fmt = changed(fmt, variant)
        fmt = without_defaults(fmt)
    except ValueError as error:
        raise ValueError(f"format {name!r}: {error}") from None
    return base if fmt == base else replace(fmt, name=canonical_name(base, fmt))


@functools.lru_cache(maxsize=1 << 10)
def _cached(name: str) -> Format:
    """Return the format from `_parsed` after calling its method `mark_named`."""
    fmt = _parsed(name)
    fmt.mark_named()
    return fmt


def _in_order(variants: str, base: Format, kinds: set[str]) -> list[str]:
    """Return the variants in a name, in the order in which they apply.

    The scale rule comes first; a top without a rule implies rceil. The top follows, because a
    headroom is a fraction of it, and the outer scale, because it decides whether there is a bound.
    The source of the amax comes late, because it depends on the scales, and after it the margin,
    which depends on delayed scaling. The rounding mode comes last, because it may depend on the
    scales.
    """
    names = variants.split(":")
    if "scale" in kinds and isinstance(base.scaling, TensorScaling):
        names = [name for name in names if name != "outer-none"]  # already the default
    rules = [name for name in names if name in RULES]
    given = bool(rules) or "rule" in kinds or base.scale_rule is None
    if not given and any(placeholder(name) == TOP for name in names):
        rules = ["rceil"]
    others = [name for name in names if name not in RULES]
    order = {"top": -1, "outer scale": -1, "amax": 1, "margin": 2, "rounding": 3}
    return [*rules, *sorted(others, key=lambda name: order.get(kind_of(name), 0))]


def _unknown(name: str) -> UnknownFormatError:
    known = sorted({*FORMATS, *ALIASES})
    first = name.lower().partition(":")[0]
    spelling = "'mx:e3m4:b16:rceil' or 'nv:e2m1:b16:e4m3'"
    if first in ("mx", "nv"):
        # The name begins like a spelled-out format, so no named format is suggested.
        return UnknownFormatError(
            f"unknown format {name!r}; choose one of the named formats, or spell out element, "
            f"block size and scale, in this order and before all variants, as in {spelling}"
        )
    near = difflib.get_close_matches(first, known, n=3)
    meant = f", did you mean {' or '.join(near)}?" if near else ";"
    return UnknownFormatError(
        f"unknown format {name!r}{meant} choose one of {', '.join(known)}, "
        f"or spell out element, block size and scale rule, as in {spelling}"
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
    if block == "tensor" and scale == "fp32":
        return _per_tensor(element)
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


def _per_tensor(element: ElementFormat) -> Format:
    """Return the format of an element type with one float32 scale per tensor, such as fp8_e4m3.

    Unlike a block, a tensor with a NaN or an Inf keeps its other values.
    """
    scaling = TensorScaling(element.max)
    named = (fmt for fmt in FORMATS.values() if (fmt.element, fmt.scaling) == (element, scaling))
    return next(named, Format(f"nv:{element.name}:tensor:fp32", element, scaling))


def _block(text: str) -> tuple[int, int, str]:
    """Return the size, the height and the canonical name of the block that `text` spells."""
    if text in _WHOLE:
        return *_WHOLE[text], text
    height, _, size = text[1:].rpartition("x")
    rows, values = int(height or 1), int(size)
    check_block(rows, values)
    return values, rows, f"b{rows}x{values}" if rows > 1 else f"b{values}"


def further_variants(fmt: Format) -> list[str]:
    """Return the variants that may be appended to the name of `fmt`, a result of `get_format`."""
    numbers = {
        TOP: f"top{plain(fmt.element.max)}",
        BOUND: "bound1",
        HEADROOM: "head1/2",
        TARGET: "t1",
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
