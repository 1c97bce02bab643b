"""Full description of one format, which `python -m megatron.fake_quant describe` prints.

The numbers come from `format_properties.py`, which measures them on the quantization code. Each
scaling's own module describes the scales; see `scalings/`.
"""

import math
import textwrap
from collections.abc import Sequence

from torch import Tensor

from megatron.fake_quant import scalings
from megatron.fake_quant.block_scaling import WHOLE_AXIS, BlockScaling
from megatron.fake_quant.elements import Element
from megatron.fake_quant.formats import Format
from megatron.fake_quant.inspect import format_properties
from megatron.fake_quant.inspect.format_table import aliases, markdown_table, number
from megatron.fake_quant.inspect.rounding_bias import NEGLIGIBLE, SMALL, limits, rounding_bias
from megatron.fake_quant.names import further_variants
from megatron.fake_quant.rounding_modes import ROUNDINGS
from megatron.fake_quant.scalings import mx
from megatron.fake_quant.scalings.tensor_scale import FLOAT32_MAX
from megatron.fake_quant.special_scalings import TensorScaling

Line = tuple[str, str]

WIDTH = 100
LABEL = 20
FLOAT32_BITS = 32


def describe(fmt: Format) -> str:
    """Return a description of the range, precision, special values, rounding and scales of `fmt`.

    The description is plain text of about one page.
    """
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


def _wrapped(label: str, text: str) -> list[str]:
    start, indent = f"  {label:<{LABEL}}", " " * (LABEL + 2)
    return textwrap.wrap(
        text,
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
    whole = 8 * fmt.scale_bytes if WHOLE_AXIS in (fmt.block_size, fmt.height) else 0
    row = FLOAT32_BITS if fmt.outer_size == WHOLE_AXIS else 0
    row += 0 if fmt.columns or fmt.one_block else whole
    tensor = FLOAT32_BITS if fmt.has_tensor_scale else 0
    tensor += whole if fmt.one_block else 0
    stored += f"; and {row} for each row" if row else ""
    stored += f"; and {whole} for each column" if fmt.columns else ""
    stored += f"; and {tensor} for the tensor" if tensor else ""
    ties = format_properties.ties(fmt.element)
    variants = further_variants(fmt)
    more = "  ".join(f":{variant}" for variant in variants) or "nothing"
    also = ", ".join(aliases(fmt))
    return [
        *([("also called", also)] if also else []),
        ("source", source(fmt)),
        ("bits per value", stored),
        ("rounding", ROUNDINGS[fmt.rounding].description.format(ties=ties)),
        *_bias(fmt),
        ("suffixes", more),
    ]


def _bias(fmt: Format) -> list[Line]:
    """Return the line that states the bias of stochastic rounding, if the format has this mode.

    The line is also part of the description of a format that rounds to nearest.
    """
    bias = rounding_bias(fmt)
    if bias is None:
        return []
    label = "bias" if fmt.stochastic else "bias of :sr"
    if fmt.amax_source == "delayed":
        return [(label, "unbiased until a value exceeds what the history allows, and clips")]
    if bias.unbiased:
        words = "unbiased: no value clips, and the mean of a product is the product"
        return [(label, words + limits(fmt))]
    causes = [
        f"{100 * part:+.2g} % from {cause}"
        for part, cause in (
            (bias.clipping, "values that clip at the largest number"),
            (bias.scales, "scales that do not undo the division"),
            (bias.correction, "a correction that blocks with different scales share"),
        )
        if abs(part) >= NEGLIGIBLE
    ]
    if not causes:
        words = (
            "slightly biased: some values clip; the mean of a product of normal values has a gain"
        )
        return [(label, f"{words} below {100 * NEGLIGIBLE:.1g} %")]
    word = "slightly biased" if abs(bias.gain) <= SMALL else "biased"
    gain = f"the mean of a product of normal values has the gain {100 * bias.gain:+.2g} %"
    return [(label, f"{word}: {gain}; {', '.join(causes)}")]


def source(fmt: Format) -> str:
    """Return a reference to the document that defines the format."""
    scales = scalings.describe(fmt)
    return (fmt.element.source or mx.source(fmt)) if scales is None else scales.source


def scientific(x: float) -> str:
    """Return a positive number as text in two forms, such as "448 = 1.75 x 2^8".

    The second form is left out for powers of two and for numbers from 1 to 2.
    """
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
    otherwise = " when rounding to nearest" if fmt.stochastic else ""
    ratio = f"{largest / smallest:.6g}"
    normal = []
    if format_properties.has_normal_numbers(element):
        normal = [("smallest normal", scientific(element.smallest_normal))]
    return [
        ("bits", _layout(element)),
        ("largest", scientific(largest)),
        *normal,
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
    if element.is_table:
        return f"{element.bits}, the position in a table of {len(element.values)} numbers"
    if not element.is_cast and not element.tapered:
        exponent, mantissa = element.exponent_bits, element.mantissa_bits
        if exponent == 1:
            signed = "two's complement" if element.twos_complement else "sign and magnitude"
            return f"{element.bits}, {signed}, multiples of {number(_smallest(element))}"
        return f"1 sign, {exponent} exponent (bias {element.bias}), {mantissa} mantissa"
    if element.is_cast:
        return f"{element.bits}"
    return "1 sign, a dot that gives the number of exponent bits, exponent, mantissa"


def _smallest(element: Element) -> float:
    return float(format_properties.positive_values(element)[0])


def _overflow(element: Element, largest: float) -> str:
    if format_properties.saturates(element):
        return f"saturates: values beyond {number(largest)} become {number(largest)}"
    return f"to Inf, to nearest from {scientific(format_properties.infinite_from(element))} on"


def _hybrid_overflow(fmt: Format) -> list[Line]:
    """Return a note on the numbers that hybrid rounding rounds to Inf; the sources disagree."""
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
    if element.is_table:
        negative = max(value for value in element.values if value < 0)
        return f"numbers above {number(negative / 2)} and up to {number(smallest / 2)} become zero"
    word = "up to" if format_properties.vanishes_from_half(element) else "below"
    return f"magnitudes {word} {number(smallest / 2)} round to zero"


def _codes(codes: Tensor, element: Element) -> str:
    """Return text that lists codes as hexadecimal numbers and consecutive codes as ranges."""
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
    """Return lines that describe the format's scales: blocks, range and computation."""
    scales = scalings.describe(fmt)
    if scales is None:
        return []
    lines = [("of", scales.shared_by)]
    if fmt.scaling is not None and fmt.block_size is not None:
        low, high = format_properties.scale_range(fmt.scaling)
        spread = f"{scientific(low)} to {scientific(high)}{scales.range_note}"
        lines.append(("range", "that of float32" if fmt.block_scale == "FP32" else spread))
    return [*lines, *scales.found]


def _whole(fmt: Format) -> list[Line]:
    """Return lines on the format's range, with scales applied, and on the effect of NaN and Inf."""
    low, high = format_properties.whole_range(fmt)
    lines: list[Line] = []
    if fmt.block_scale == "FP32":
        largest = float(format_properties.positive_values(fmt.element)[-1])
        reached = largest
        if isinstance(fmt.scaling, BlockScaling):
            reached = (fmt.scaling.top or largest) * fmt.scaling.share
        smallest = format_properties.positive_values(fmt.element)[0] / reached
        most = "amax, the block's largest magnitude"
        if reached > largest:
            most = (
                f"amax x {number(largest / reached)}, as {reached:g} is more than the element has"
            )
        lines = [("largest", most), ("smallest", f"amax x {number(float(smallest))}")]
    elif fmt.block_size is not None:
        tensor = ", times the tensor's scale" if fmt.has_tensor_scale else ""
        tensor = ", times the outer scale" if fmt.outer_size is not None else tensor
        beyond = f" (float32 ends at {FLOAT32_MAX:.6g})" if high > FLOAT32_MAX else ""
        lines = [
            ("largest", f"{scientific(high)}{tensor}{beyond}"),
            ("smallest", f"{scientific(low)}{tensor}"),
        ]
    elif isinstance(fmt.scaling, TensorScaling):
        target = fmt.scaling.target
        most = "amax, the tensor's largest finite magnitude"
        if fmt.amax_source == "delayed":
            above = "" if high == target else f" x {number(high / target)}"
            most = f"amax{above}, where amax is the largest magnitude of the history"
        if target > high:
            most = f"{number(high)} / the scale, as {target:g} is more than the element has"
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
    """Return a Markdown table of the spacing per binade, or per value of a `TableElement`."""
    if element.is_table:
        values = format_properties.all_values(element)
        steps = [f"{step:.9g}" for step in values.diff().tolist()] + ["-"]
        numbers = [f"{value:.9g}" for value in values.tolist()]
        return markdown_table(("number", "distance to the next"), zip(numbers, steps, strict=True))
    rows: list[Sequence[str]] = []
    for span in format_properties.binades(element):
        ends = sorted({span.first, span.last})
        spacing, relative = "-", "-"
        if span.relative is not None:
            spacing = " to ".join(number(math.ldexp(span.relative, e)) for e in ends)
            relative = f"{100 * span.relative:.7g} %"
        rows.append((" to ".join(f"2^{e}" for e in ends), str(span.count), spacing, relative))
    return markdown_table(("binade from", "numbers in each", "spacing", "spacing / 2^E"), rows)
