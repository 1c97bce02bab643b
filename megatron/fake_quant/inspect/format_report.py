"""Everything about one format, for `python -m megatron.fake_quant describe`.

The numbers come from `format_properties.py`, that is, from the code that quantizes. Only names,
sources and the computation of scales are written down here.
"""

import math
import textwrap
from collections.abc import Sequence

from torch import Tensor

from megatron.fake_quant import nvfp4
from megatron.fake_quant.formats import (
    E2M1,
    E4M3,
    ELEMENTS,
    BlockScaling,
    Cast,
    Element,
    ElementFormat,
    Format,
    GroupScaling,
    HiFloat8,
    ScaleRule,
    TensorScaling,
    TwoLevelScaling,
)
from megatron.fake_quant.inspect import format_properties
from megatron.fake_quant.inspect.format_table import aliases, markdown_table, number
from megatron.fake_quant.mx import CARRY_FROM
from megatron.fake_quant.names import RULES, variants_of
from megatron.fake_quant.tensor_scale import FLOAT32_MAX

Line = tuple[str, str]

#: How the scale of a block with the largest magnitude amax is found.
RULES_IN_WORDS: dict[ScaleRule, str] = {
    "floor": "2^(floor(log2 amax) - {emax}), as OCP has it",
    "rceil": "the smallest power of two at which nothing saturates",
    "ceil": "2^(ceil(log2 amax) - {emax})",
    "even": "as floor, of amax rounded half up to {significand} significand bits",
}
ROUNDINGS = {
    "nearest": "to nearest, ties {ties}",
    "stochastic": "up in magnitude with the probability of the distance from below, at random",
    "hybrid": "for |E| < 4 to nearest, ties {ties}; from there on by the value's own low bits (HR)",
}
WIDTH = 100
LABEL = 20


def describe(fmt: Format) -> str:
    """Range, precision, specials, rounding and scales of `fmt`, a page of text."""
    sections = [
        ("", _summary(fmt)),
        (f"element {fmt.element.name}", _element(fmt)),
        ("scale", _scale(fmt)),
        ("whole format", _whole(fmt)),
    ]
    text = [fmt.name]
    for title, lines in sections:
        if lines:
            text += ["", title] if title else []
            text += [part for line in lines for part in _wrapped(*line)]
    return "\n".join([*text, "", "precision of the element", "", _precision(fmt.element)])


def _wrapped(label: str, said: str) -> list[str]:
    start, indent = f"  {label:<{LABEL}}", " " * (LABEL + 2)
    return textwrap.wrap(
        said,
        WIDTH,
        initial_indent=start if label else indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(fmt: Format) -> list[Line]:
    bits, values = format_properties.scale_bits(fmt)
    stored = f"{format_properties.bits_a_value(fmt):.9g}"
    if bits:
        stored += f": {fmt.element.bits} of the element, {bits} of scales for {values} values"
    if format_properties.has_tensor_scale(fmt.scaling):
        stored += "; and 32 for the tensor"
    ties = format_properties.ties(fmt.element)
    variants = variants_of(fmt)
    more = "  ".join(f":{variant}" for variant in variants) or "nothing"
    also = ", ".join(aliases(fmt))
    return [
        *([("also called", also)] if also else []),
        ("source", source(fmt)),
        ("bits a value", stored),
        ("rounding", ROUNDINGS[fmt.rounding].format(ties=ties)),
        ("name may go on with", more),
    ]


def source(fmt: Format) -> str:
    """Where the format is defined."""
    element, scaling = fmt.element, fmt.scaling
    if isinstance(element, HiFloat8):
        scaled = "; scale as in Ascend's tensor-wise recipe" if scaling else ""
        return f"HiFloat8, arXiv 2409.16626{scaled}"
    if isinstance(element, Cast):
        return f"torch.{element.name}, by torch's own cast"
    if isinstance(scaling, TwoLevelScaling):
        return "NVFP4, arXiv 2509.25149 appendix B, as Transformer Engine computes it"
    if isinstance(scaling, GroupScaling):
        return "HiFloat4, arXiv 2602.11287 algorithm 1"
    if isinstance(scaling, TensorScaling):
        return "FP8, arXiv 2209.05433; scale as in Transformer Engine's current scaling"
    named = "" if element.name in ELEMENTS else ", with an element that is not among its own"
    rule = "; scale rule arXiv 2506.08027" if _has_rule(fmt, "rceil") else ""
    return f"OCP Microscaling Formats (MX) v1.0, sections 5 and 6.3{named}{rule}"


def _has_rule(fmt: Format, rule: ScaleRule) -> bool:
    return isinstance(fmt.scaling, BlockScaling) and fmt.scaling.rule == rule


def scientific(x: float) -> str:
    """A number above zero, also as a significand times a power of two unless that says no more."""
    mantissa, exponent = math.frexp(x)
    text = number(x)
    if mantissa == 0.5 or exponent == 1:
        return text
    return f"{text} = {2 * mantissa:.12g} x 2^{exponent - 1}"


def _element(fmt: Format) -> list[Line]:
    element = fmt.element
    values = format_properties.positive_values(element)
    smallest, largest = float(values[0]), float(values[-1])
    spans = format_properties.binades(element)
    count = spans[-1].last - spans[0].first + 1
    every = format_properties.all_values(element)
    otherwise = " when rounding to nearest" if fmt.rounding == "stochastic" else ""
    ratio = f"{largest / smallest:.6g}"
    return [
        ("bits", _layout(element)),
        ("largest", scientific(largest)),
        ("smallest normal", scientific(format_properties.smallest_normal(element))),
        ("smallest", scientific(smallest)),
        ("positive numbers", f"{len(values)} in {count} binades, largest / smallest {ratio}"),
        ("overflow", _overflow(element, largest)),
        *_hybrid_overflow(fmt),
        ("underflow", f"{_underflow(element, smallest)}{otherwise}"),
        ("zeros", _codes((every == 0).nonzero(), element)),
        ("Inf", _codes(every.isinf().nonzero(), element)),
        ("NaN", _codes(every.isnan().nonzero(), element)),
        *_unused(element),
    ]


def _layout(element: Element) -> str:
    if isinstance(element, ElementFormat):
        exponent, mantissa = element.exponent_bits, element.mantissa_bits
        if exponent == 1:
            signed = "two's complement" if element.twos_complement else "sign and magnitude"
            return f"{element.bits}, {signed}, multiples of {number(_smallest(element))}"
        return f"1 sign, {exponent} exponent (bias {element.bias}), {mantissa} mantissa"
    if isinstance(element, HiFloat8):
        return "1 sign, a dot that says how many exponent bits follow, exponent, mantissa"
    return f"{element.bits}"


def _smallest(element: Element) -> float:
    return float(format_properties.positive_values(element)[0])


def _overflow(element: Element, largest: float) -> str:
    if format_properties.saturates(element):
        return f"saturates: what is beyond {number(largest)} becomes that"
    return f"to Inf, to nearest from {scientific(format_properties.infinite_from(element))} on"


def _hybrid_overflow(fmt: Format) -> list[Line]:
    """Describe which source is followed, because sources on hybrid rounding to Inf disagree."""
    if fmt.rounding != "hybrid" or format_properties.saturates(fmt.element):
        return []
    return [
        (
            "",
            "The sources disagree from 32768 to 49152. This format follows the code that made "
            "Huawei's golden data: Inf from 40960 on; below it, the value's own low bits decide "
            "between 32768 and Inf. The paper's rule for these bits, read literally, can keep "
            "32768 up to 49152. Another of Huawei's emulations keeps 32768 up to 40960.",
        )
    ]


def _underflow(element: Element, smallest: float) -> str:
    word = "up to" if format_properties.vanishes_from_half(element) else "below"
    return f"magnitudes {word} {number(smallest / 2)} round to zero"


def _codes(codes: Tensor, element: Element) -> str:
    """Hexadecimal codes, neighbors joined to ranges."""
    runs: list[tuple[int, int]] = []
    for code in codes.flatten().tolist():
        if runs and runs[-1][1] == code - 1:
            runs[-1] = (runs[-1][0], code)
        else:
            runs.append((code, code))
    digits = -(-element.bits // 4)
    words = [
        f"0x{low:0{digits}X}" + (f" to 0x{high:0{digits}X}" if high > low else "")
        for low, high in runs
    ]
    return ", ".join(words) or "none"


def _unused(element: Element) -> list[Line]:
    unused = format_properties.never_produced(element)
    if not len(unused):
        return []
    means = ", ".join(
        f"{format_properties.all_values(element)[code]:g}" for code in unused.tolist()
    )
    return [("never produced", f"{_codes(unused, element)} ({means})")]


def _scale(fmt: Format) -> list[Line]:
    """Which scales there are, what they can be, and how they are found."""
    scaling, element = fmt.scaling, fmt.element
    if scaling is None:
        return []
    if isinstance(scaling, TensorScaling):
        power = "; the power of two at or below it" if scaling.power_of_two else ""
        return [
            ("of", "the tensor, float32"),
            ("found", f"{scaling.target:g} / its largest finite magnitude{power}"),
        ]
    size = scaling.size
    low, high = format_properties.scale_range(scaling)
    spread = ("range", f"{scientific(low)} to {scientific(high)}")
    shape = f"{size} x {size} values of the last two axes" if fmt.square else f"{size} values"
    if isinstance(scaling, TwoLevelScaling):
        return [
            ("of", f"{shape}, E4M3; and of the tensor, float32"),
            spread,
            (
                "found",
                f"amax / {E2M1.max:g} of the block, times {E2M1.max:g} x {E4M3.max:g} = "
                f"{nvfp4.LARGEST:g} / amax of the tensor, rounded to E4M3",
            ),
        ]
    if isinstance(scaling, GroupScaling):
        return [
            ("of", f"{shape}, E6M2; one bit of exponent for each 8 of them, one for each 4"),
            ("range", f"{spread[1]}, with the two bits"),
            (
                "found",
                "amax / 7 rounded to E6M2; the bit of 8 is set where their amax is 4 scales "
                "or more, then that of 4 where theirs is 2 or more",
            ),
        ]
    assert isinstance(element, ElementFormat)
    rules = [
        (f"{rule} *" if rule == scaling.rule else rule, _rule(rule, element)) for rule in RULES
    ]
    return [("of", f"{shape}, E8M0 (a power of two)"), spread, ("found by", "rule *:"), *rules]


def _rule(rule: ScaleRule, element: ElementFormat) -> str:
    """In words, and where the largest magnitude of a block comes to lie."""
    words = RULES_IN_WORDS[rule].format(emax=element.emax, significand=element.mantissa_bits + 1)
    carry = CARRY_FROM[rule](element)
    low, high = math.ldexp(carry, element.emax), math.ldexp(carry, element.emax + 1)
    return f"{words}; amax lands in {low:.6g} to {high:.6g}"


def _whole(fmt: Format) -> list[Line]:
    """Element and scales together, and what a NaN or an Inf does."""
    low, high = format_properties.whole_range(fmt)
    lines: list[Line] = []
    if fmt.block_size is not None:
        tensor = (
            ", times the tensor's scale" if format_properties.has_tensor_scale(fmt.scaling) else ""
        )
        beyond = f" (float32 ends at {FLOAT32_MAX:.6g})" if high > FLOAT32_MAX else ""
        lines = [
            ("largest", f"{scientific(high)}{tensor}{beyond}"),
            ("smallest", f"{scientific(low)}{tensor}"),
        ]
    elif isinstance(fmt.scaling, TensorScaling):
        target = fmt.scaling.target
        most = "amax, the tensor's largest finite magnitude"
        if target > high:
            most = f"{number(high)} over the scale, as {target:g} is more than the element has"
        twice = ", up to twice that" if fmt.scaling.power_of_two else ""
        lines = [
            ("largest", most),
            ("smallest", f"amax x {number(low)} / {target:g} = amax / {target / low:.9g}{twice}"),
        ]
    return [
        *lines,
        ("a NaN", format_properties.effect(fmt, math.nan)),
        ("an Inf", format_properties.effect(fmt, math.inf)),
    ]


def _precision(element: Element) -> str:
    """Spacing by binade."""
    rows: list[Sequence[str]] = []
    for span in format_properties.binades(element):
        ends = sorted({span.first, span.last})
        spacing, relative = "-", "-"
        if span.relative is not None:
            spacing = " to ".join(number(math.ldexp(span.relative, e)) for e in ends)
            relative = f"{100 * span.relative:.7g} %"
        rows.append((" to ".join(f"2^{e}" for e in ends), str(span.count), spacing, relative))
    return markdown_table(("binade from", "numbers in each", "spacing", "spacing / 2^E"), rows)
