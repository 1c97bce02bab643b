"""Describe accumulators, for `python -m megatron.fake_quant accumulate`.

The errors in a description are measured on the code that sums, with random operands.
"""

import textwrap
from collections.abc import Iterable

import torch
from torch import Tensor

from megatron.fake_quant.accumulate import Accumulator, SumType, accumulated_matmul
from megatron.fake_quant.accumulate.accumulator import GROUP, RUNNING_BITS, STAGE_BITS
from megatron.fake_quant.accumulate.element_types import get_element_type
from megatron.fake_quant.elements import E4M3, Cast
from megatron.fake_quant.inspect.format_table import markdown_table
from megatron.fake_quant.rounding import round_to

Line = tuple[str, str]

WIDTH, LABEL = 100, 20
HEADER = ("accumulator", "products per step", "bits of a term", "running sum", "second sum", "unit")
#: products per dot product, and rows per operand, in the measurement of errors
LENGTH, ROWS = 4096, 16
_SEED = 20
_RESEARCH = "none; a research accumulator"
_MODEL = "MMA-Sim, arXiv 2511.10909: no bit differed in 12,000 dot products"
#: exception since an H100 was measured
_ZEROS = ", before products with a zero were ignored, as on an H100"
_MEASURED = "MATLAB-tensor-core, arXiv 2512.07004: no bit differs from results measured on"
_PROMOTION = "DeepSeek-V3, arXiv 2412.19437, section 3.3; DeepGEMM"


def markdown(accumulators: Iterable[Accumulator]) -> str:
    """Return a table of accumulators in Markdown."""
    return markdown_table(HEADER, map(_row, accumulators))


def _row(accumulator: Accumulator) -> tuple[str, ...]:
    unit = accumulator.hardware.partition(";")[0] or _RESEARCH
    if not accumulator.simulated:
        return (accumulator.name, "", "", "", "", "none; torch.matmul in float32")
    bits = "all" if accumulator.align_bits is None else str(accumulator.align_bits)
    every = accumulator.promote_every
    return (
        accumulator.name,
        str(accumulator.step),
        bits,
        _type(accumulator.keep),
        "" if every is None else f"{_type(accumulator.promote_to)}, every {every} products",
        unit,
    )


def describe(accumulator: Accumulator) -> str:
    """Return a description of the steps of `accumulator` and of the resulting errors, as text."""
    sections = [("", _summary(accumulator))]
    if accumulator.simulated:
        sections += [("a step", _step(accumulator)), ("measured error", _errors(accumulator))]
    text = [accumulator.name]
    for title, lines in sections:
        text += ["", title] if title else []
        text += [part for line in lines for part in _wrapped(*line)]
    return "\n".join(text)


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"  {label:<{LABEL}}",
        subsequent_indent=" " * (LABEL + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(accumulator: Accumulator) -> list[Line]:
    if not accumulator.simulated:
        return [
            ("unit", "none: products are summed by torch.matmul in float32, in its own order"),
            ("elements", "of every type"),
            ("scales", "are multiplied with the operands, as without an accumulator"),
        ]
    elements = ", ".join(accumulator.elements) or "of every type"
    if not accumulator.mixes:
        elements += "; both operands have the same type"
    unit = accumulator.hardware or _RESEARCH
    return [
        ("unit", unit),
        ("elements", elements),
        ("scales", _scales(accumulator)),
        *_sources(accumulator),
    ]


def _sources(accumulator: Accumulator) -> list[Line]:
    if not accumulator.hardware:
        return []
    texts = [_MODEL + (_ZEROS if accumulator.design == "fused" else "")]
    if accumulator.measured_on:
        texts.append(f"{_MEASURED} {accumulator.measured_on}")
    if accumulator.promote_every is not None:
        texts.append(_PROMOTION)
    return [("sources" if index == 0 else "", text) for index, text in enumerate(texts)]


def _scales(accumulator: Accumulator) -> str:
    block = accumulator.scale_block
    if accumulator.scales == "after":
        return "of a tensor or row, which are multiplied with the result; no block scales"
    if accumulator.scales == "promotion":
        return (
            f"float32 scales of 1 x {block} elements, whose product is multiplied with the running "
            "sum when it is promoted; scales of a tensor or row are multiplied with the result"
        )
    kind = str(accumulator.scale_type).upper()
    if accumulator.scales == "exponents":
        return f"one {kind} scale per {block} elements; its exponent is added to that of each term"
    return (
        f"one {kind} scale per {block} elements; the significands of both scales multiply the sum "
        f"of {GROUP} products, and their exponents align it"
    )


def _step(accumulator: Accumulator) -> list[Line]:
    """Return lines that describe the operations within a step, in their order."""
    bits, keep = accumulator.align_bits, accumulator.keep
    terms = f"{accumulator.step} products" if accumulator.step > 1 else "1 product"
    if accumulator.design == "grouped":
        terms += (
            f" in {accumulator.step // GROUP} groups of {GROUP}, each of which is summed exactly"
        )
    lines = [("adds", f"{terms}, and the running sum")]
    if bits is None:
        lines.append(("alignment", "exact"))
    elif accumulator.design == "two_stage":
        halves = "the even and the odd products separately, " if accumulator.interleave == 2 else ""
        lines.append(
            (
                "alignment",
                f"{halves}truncated to {bits} fractional bits below the largest exponent of the "
                f"products; their sum and the running sum are then rounded down to {STAGE_BITS} "
                f"and {RUNNING_BITS} fractional bits below the larger exponent of these two",
            )
        )
    else:
        lines.append(
            (
                "alignment",
                f"each term is truncated to {bits} fractional bits below the largest exponent; "
                f"that of a {_exponent(accumulator)}",
            )
        )
    lines.append(("running sum", f"{_type(keep)}: {_layout(keep)}"))
    if accumulator.promote_every is not None:
        second = accumulator.promote_to
        lines.append(
            (
                "second sum",
                f"after every {accumulator.promote_every} products, the running sum is added to a "
                f"sum of the type {_type(second)} and starts again from zero: {_layout(second)}",
            )
        )
    return lines


def _exponent(accumulator: Accumulator) -> str:
    if accumulator.design == "grouped":
        return "group is the sum of its scales' exponents"
    scales = " and scales'" if accumulator.scales == "exponents" else ""
    return f"product is the sum of its elements'{scales} exponents"


def _type(kept: SumType) -> str:
    names = {(8, 23): "fp32", (8, 7): "bf16", (5, 10): "fp16"}
    name = names.get((kept.exponent_bits, kept.mantissa_bits))
    name = name or f"e{kept.exponent_bits}m{kept.mantissa_bits}"
    return f"{name} {'truncated' if kept.rounding == 'rz' else 'to nearest'}"


def _layout(kept: SumType) -> str:
    rounding = "toward zero" if kept.rounding == "rz" else "to nearest, ties to even"
    return (
        f"1 sign, {kept.exponent_bits} exponent and {kept.mantissa_bits} mantissa bits, rounded "
        f"{rounding}"
    )


def _errors(accumulator: Accumulator) -> list[Line]:
    """Return lines with the errors for operands of both signs and for positive operands."""
    random = torch.Generator().manual_seed(_SEED)
    name = (accumulator.elements or ("e4m3",))[0]
    normal, uniform = [], []
    for _ in range(2):  # both operands
        normal.append(_quantized(torch.randn(ROWS, LENGTH, generator=random), accumulator, name))
        uniform.append(_quantized(torch.rand(ROWS, LENGTH, generator=random), accumulator, name))
    _, rms = _error(normal, accumulator, name)
    bias, positive_rms = _error(uniform, accumulator, name)
    scales = "one scale per operand"
    if _inside(accumulator):
        scales = f"{str(accumulator.scale_type).upper()} scales of {accumulator.scale_block}"
    return [
        ("operands", f"{name} elements with {scales}, {LENGTH} products per sum"),
        ("normal deviates", f"relative rms {rms:.1e}"),
        ("uniform from 0 to 1", f"relative rms {positive_rms:.1e}, bias {100 * bias:+.2g} %"),
    ]


def _inside(accumulator: Accumulator) -> bool:
    """Return whether the unit itself applies block scales."""
    return accumulator.scales in ("exponents", "significands")


def _quantized(x: Tensor, accumulator: Accumulator, name: str) -> tuple[Tensor, Tensor]:
    """Return elements and block scales for `x`; the scales are ones if the unit applies none.

    A scale maps the maximum of a block or of all values to the largest number, at most 448.
    """
    element = get_element_type(name)
    largest = min(element.max, 448.0)
    x = x * (largest / x.abs().max())
    block = accumulator.scale_block if _inside(accumulator) else None
    blocks = x.reshape(len(x), -1, block or LENGTH)
    scales = torch.ones(blocks.shape[:2])
    if block is not None:
        scales = blocks.abs().amax(-1) / largest
        if accumulator.scale_type == "e8m0":
            scales = torch.ldexp(torch.ones_like(scales), torch.frexp(scales).exponent)
        else:
            scales = round_to(scales * E4M3.max, E4M3)
            blocks = blocks * E4M3.max
    values = (blocks / scales.unsqueeze(-1)).flatten(1)
    if isinstance(element, Cast):
        return values.to(element.dtype).float(), scales
    return round_to(values, element), scales


def _error(
    operands: list[tuple[Tensor, Tensor]], accumulator: Accumulator, name: str
) -> tuple[float, float]:
    """Return the mean and the rms of the error, divided by those of the exact result."""
    (a, a_scales), (b, b_scales) = operands
    exact = _whole(a, a_scales) @ _whole(b, b_scales).t()
    scales = (a_scales, b_scales) if _inside(accumulator) else None
    result = accumulated_matmul(a, b, accumulator, elements=(name, name), scales=scales)
    error = result.double() - exact
    rms = (error.square().mean() / exact.square().mean()).sqrt()
    return (error.mean() / exact.mean()).item(), rms.item()


def _whole(elements: Tensor, scales: Tensor) -> Tensor:
    """Return the values that elements and scales stand for, in float64."""
    blocks = elements.double().reshape(*scales.shape, -1)
    return (blocks * scales.double().unsqueeze(-1)).flatten(1)
