"""Compute the scales of IF4 (arXiv 2603.28765) and MixFP4 (arXiv 2605.31035).

Each block of 16 values has E2M1 elements or 4-bit integers n from -7 to 7, whichever has the lower
error. The sign bit of the block's E4M3 scale is set for integers. Let a be the largest magnitude of
the tensor and b that of a block:

    encode = 6 * 448 / a            decode = 1 / encode
    s      = E4M3(b / 6 * encode)   m = 1 / (s * decode)
    E2M1 element: x * m             value = (element * s) * decode

In IF4, both element types share the scale, and the integers are spread over the same range:

    n = x * m * float32(7/6)        value = ((n * s) * float32(6/7)) * decode

In MixFP4, a block of integers has a scale of its own:

    t = E4M3(b / 7 * encode)        n = x / (t * decode), by a reciprocal as above
                                    value = (n * t) * decode

MixFP4 calls its integers E1M2 elements, which are the halves of the integers. Its codes have a sign
and a magnitude, and those of IF4 are in two's complement.

The error of a block is the sum of the squared (`mse`) or absolute (`mae`) differences of
(element * s * a) / 2688 from x, times 6/7 for IF4's integers. Each operation is rounded to float32.
Values that are 8 positions apart are added first, and then the 8 sums one by one. On a tie, IF4 has
E2M1 elements and MixFP4 has integers. Stochastic rounding does not affect the choice, which is made
with rounding to nearest.

IF4 has the codes and scales of fouroversix's PyTorch reference, with two exceptions. Where the
rounding of a small scale lets x * m reach 7, the reference stores the code of negative zero, and
here the element saturates. Negative values that underflow to zero keep their sign here.

MixFP4 has no public reference. Its rule is that of algorithm 1 of the paper as a third party
describes it. No source was found for two points: the sign bit is assumed to stand for E1M2, and the
order of rounding is that of IF4.

If a scale underflows to 0, its block becomes zeros. A NaN or an Inf makes its block NaN, by the NaN
code of E4M3, and is ignored when a is computed. A tensor of zeros has encode = 1.
"""

import torch
from torch import Tensor

from megatron.fake_quant.code_points import decode, encode
from megatron.fake_quant.elements import E2M1, E4M3, ElementFormat
from megatron.fake_quant.formats import Format
from megatron.fake_quant.rounding import round_to
from megatron.fake_quant.scales import ScaleDescription, Scales, block_shape, brief_shape
from megatron.fake_quant.scalings.tensor_scale import FLOAT32_MAX, divide_by, finite_amax
from megatron.fake_quant.special_scalings import ChoiceScaling

_NAN = 0x7F
_SIGN = 0x80
_LARGEST_INTEGER = 7.0


def _divided(x: Tensor, divisor: float) -> Tensor:
    """Return x / divisor, correctly rounded.

    If the divisor were a Python scalar, torch might multiply by its reciprocal instead.
    """
    return torch.div(x, torch.full_like(x, divisor))


def _multiplier(scales: Tensor, decoding: Tensor) -> Tensor:
    """Return the factor that maps the values of each block to elements; 0 for a scale of 0."""
    multiplier = (scales * decoding).reciprocal_().clamp_(max=FLOAT32_MAX)
    return multiplier.masked_fill_(scales == 0, 0.0).unsqueeze(-1)


def _unit(scaling: ChoiceScaling) -> float:
    """Return the integer that the number 1 of the alternative element type stands for."""
    return _LARGEST_INTEGER / scaling.alternative.max


def scale_down(
    blocks: Tensor, element: ElementFormat, scaling: ChoiceScaling, *, amax: Tensor | None = None
) -> tuple[Tensor, Scales]:
    """Return the blocks scaled to the range of their element types, and the scales.

    The tensor's scale is computed from `amax`, or from the largest magnitude of `blocks`.
    """
    largest = finite_amax(blocks) if amax is None else amax
    amax = blocks.abs().amax(-1)
    encoding = divide_by(largest, scaling.target)
    decoding = encoding.reciprocal()
    scales = round_to(_divided(amax, E2M1.max) * encoding, E4M3)
    floats = blocks * _multiplier(scales, decoding)
    if scaling.shared:
        integer_scales, integers = scales, floats * (_LARGEST_INTEGER / E2M1.max)
    else:
        integer_scales = round_to(_divided(amax, _LARGEST_INTEGER) * encoding, E4M3)
        integers = blocks * _multiplier(integer_scales, decoding)
    integers /= _unit(scaling)
    error = _error(_scaled_up(round_to(floats, element), scales), blocks, largest, scaling)
    rounded = _scaled_up(round_to(integers, scaling.alternative), integer_scales * _unit(scaling))
    integer_error = _error(rounded, blocks, largest, scaling, integers=True)
    chosen = integer_error < error if scaling.shared else integer_error <= error
    codes = torch.where(chosen, encode(integer_scales, E4M3) | _SIGN, encode(scales, E4M3))
    codes.masked_fill_(~amax.isfinite(), _NAN)
    return torch.where(chosen.unsqueeze(-1), integers, floats), Scales(codes, decoding)


def _scaled_up(elements: Tensor, scales: Tensor) -> Tensor:
    return elements * scales.unsqueeze(-1)


def _error(
    scaled: Tensor,
    blocks: Tensor,
    largest: Tensor,
    scaling: ChoiceScaling,
    *,
    integers: bool = False,
) -> Tensor:
    """Return the error of each block; `scaled` holds rounded elements times block scales."""
    values = scaled * largest
    if integers and scaling.shared:
        values *= E2M1.max / _LARGEST_INTEGER
    difference = _divided(values, scaling.target) - blocks
    error = difference.abs() if scaling.error == "mae" else difference.square()
    first, second = error.tensor_split(2, dim=-1)
    sums = first + second
    total = sums[..., 0]
    for i in range(1, sums.shape[-1]):
        total = total + sums[..., i]
    return total


def scale_up(elements: Tensor, scales: Scales, scaling: ChoiceScaling) -> Tensor:
    """Multiply the elements by their scales, which undoes `scale_down`."""
    chosen = alternative_chosen(scales)
    factors = stored_scales(scaling).to(chosen.device)[scales.block().int()]
    values = _scaled_up(elements, torch.where(chosen, factors * _unit(scaling), factors))
    if scaling.shared:
        shrunk = values * (E2M1.max / _LARGEST_INTEGER)
        values = torch.where(chosen.unsqueeze(-1), shrunk, values)
    return values * scales.whole()


def alternative_chosen(scales: Scales) -> Tensor:
    """Return a mask of the blocks with integer elements, whose scales have the sign bit set."""
    return scales.block() >= _SIGN


def stored_scales(scaling: ChoiceScaling) -> Tensor:
    """Return the magnitude of the scale that each byte stands for."""
    return decode(histogram_bytes(torch.arange(256, dtype=torch.uint8, device="cpu")), E4M3)


def histogram_bytes(stored: Tensor) -> Tensor:
    """Return the byte that represents each scale in histograms: the stored one without its sign."""
    return stored & _NAN


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    return ("nearest", "stochastic") if device == "cpu" and fmt.element == E2M1 else ()


def describe(fmt: Format, scaling: ChoiceScaling, element: ElementFormat) -> ScaleDescription:
    """Return a description of the scales and of the choice between element types."""
    other = scaling.alternative.name
    measure = "absolute" if scaling.error == "mae" else "squared"
    source = "IF4, arXiv 2603.28765, as fouroversix computes it"
    found = "amax / 6 of the block, times 2688 / amax of the tensor, rounded to E4M3"
    integers = f"{other} where the sum of {measure} errors is lower; 7 stands for 6 times the scale"
    if not scaling.shared:
        source = "MixFP4, arXiv 2605.31035, algorithm 1 as a third party describes it"
        integers = (
            f"{other} where the sum of {measure} errors is not higher; amax / 7 replaces amax / 6"
        )
    return ScaleDescription(
        source,
        f"E4M3 per {brief_shape(fmt)} values with a choice of e2m1 or {other}, float32 per tensor",
        f"{block_shape(fmt)}, E4M3, with the element type in its sign; and of the tensor, float32",
        (("found", found), ("other element", integers)),
    )
