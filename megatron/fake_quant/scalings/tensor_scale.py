"""Compute one float32 scale for a tensor from its largest magnitude ("current scaling").

    encode = target / a, clamped to normal float32 numbers; 1 if a is 0
    decode = 1 / encode
    value  = round(x * encode) * decode

Each operation is rounded to float32. Transformer Engine computes the same for per-tensor FP8, with
the element type's largest number as target. With `power_of_two`, encode is rounded down to a power
of two, as with Transformer Engine's `force_pow_2_scales`. Ascend scales HiFloat8 tensors to 15
(inputs, weights) and 224 (gradients).

a is the tensor's largest finite magnitude. A NaN stays a NaN and an Inf saturates, and neither
affects the scale of the other values. Transformer Engine sets the scale to 1 if the tensor has an
Inf.

The caller may give a different a, such as the maximum over all ranks or over earlier tensors.
Values beyond it are then scaled beyond the target, and saturate at the largest number of the
element type.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from megatron.fake_quant.elements import Element
from megatron.fake_quant.float32_bits import INFINITY, MAGNITUDE
from megatron.fake_quant.formats import Format
from megatron.fake_quant.scales import ScaleDescription, Scales
from megatron.fake_quant.special_scalings import TensorScaling

SMALLEST_NORMAL, FLOAT32_MAX = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def finite_amax(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of float32 `x`, or 0 if no value is finite.

    The result is a tensor without dimensions.
    """
    magnitude = x.view(torch.int32) & MAGNITUDE
    return magnitude.masked_fill_(magnitude >= INFINITY, 0).amax().view(torch.float32)


def local_amax(x: Tensor) -> Tensor:
    """Return the largest finite magnitude in a tensor of any dtype, or 0 if no value is finite.

    The result is a float32 tensor without dimensions, from which `fake_quantize` computes the same
    scale as from `x` itself.
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    if not x.is_cuda and not torch.compiler.is_compiling():
        # Reading the values once suffices, unless one of them is not finite.
        low, high = x.detach().aminmax()
        largest = torch.maximum(-low, high).float()
        if math.isfinite(largest.item()):
            return largest.abs_()
    return finite_amax(x.detach().float())


def check_amax(fmt: Format, amax: Tensor | None) -> None:
    """Refuse a missing amax if the format needs one, and a superfluous or malformed amax.

    Raises:
        ValueError: if the amax is refused; the message says what to do.
    """
    if amax is None:
        if fmt.amax_source != "own":
            raise ValueError(
                f"format {fmt.name} computes its scale from a {fmt.amax_source} amax, which the "
                "tensor alone does not determine; pass the amax (`amax` of fake_quantize and "
                "quantize, `amax_of` of quantized_matmul), or choose the format without this "
                "variant, which takes the tensor's own amax"
            )
        return
    if not fmt.has_tensor_scale:
        raise ValueError(
            f"format {fmt.name} has no scale for the whole tensor, so it takes no amax; leave "
            "`amax` out"
        )
    if not isinstance(amax, Tensor):
        raise ValueError(f"the amax is {amax!r}; pass a tensor, such as torch.tensor(1.5)")
    if amax.dtype != torch.float32 or amax.dim() > 0:
        raise ValueError(
            f"the amax has the dtype {amax.dtype} and the shape {tuple(amax.shape)}; pass one "
            "finite float32 number of 0 or more, as a tensor without dimensions"
        )


def check_amax_value(fmt: Format, amax: Tensor | None) -> None:
    """Refuse an amax that `check_amax` refuses, or that is negative, NaN or Inf.

    The number in a GPU's memory is not checked, because reading it would wait for the GPU.

    Raises:
        ValueError: if the amax is refused; the message says what to do.
    """
    check_amax(fmt, amax)
    if amax is not None and amax.device.type == "cpu" and not 0 <= amax.item() < math.inf:
        raise ValueError(
            f"the amax is {amax.item():g}; pass a finite number of 0 or more, such as the largest "
            "finite magnitude of a tensor"
        )


def divide_by(amax: Tensor, target: float) -> Tensor:
    """Return target / amax, clamped between 2^-126 and the largest float32; 1 if amax is 0.

    A subnormal quotient, which is possible for a target below 4, might have no finite reciprocal.
    The `/` operator would round twice, because torch divides a number by a tensor by multiplying
    the number by the reciprocal.
    """
    quotient = torch.div(torch.full_like(amax, target), amax).clamp_(SMALLEST_NORMAL, FLOAT32_MAX)
    return quotient.masked_fill_(amax == 0, 1.0)


def encode_scale(amax: Tensor, scaling: TensorScaling) -> Tensor:
    """Return the factor by which a tensor with the maximum `amax` is multiplied before rounding."""
    scale = divide_by(amax, scaling.target)
    if scaling.power_of_two:
        scale = (scale.view(torch.int32) & INFINITY).view(torch.float32)
    return scale


def scale_down(
    blocks: Tensor, element: Element, scaling: TensorScaling, *, amax: Tensor | None = None
) -> tuple[Tensor, Scales]:
    """Return the scaled tensor, and the scale that undoes this.

    Scaling maps `amax` (by default, the tensor's own) to the target, or to less if the scale is a
    power of two.
    """
    encode = encode_scale(finite_amax(blocks) if amax is None else amax, scaling)
    return blocks * encode, Scales(tensor=encode.reciprocal())


def scale_up(elements: Tensor, scales: Scales, scaling: TensorScaling) -> Tensor:
    """Multiply the elements by the stored scale, which undoes `scale_down`."""
    return elements if scaling.apart else elements * scales.whole()


def factors(fmt: Format, finite_amax: Callable[[], Tensor]) -> tuple[float, float]:
    """Return the factors to apply before and after rounding; both are 1 if there is no scale.

    The second factor is also 1 if the scale is kept apart.

    finite_amax: function that returns the tensor's largest finite magnitude; it is called only if
        the format has a scale.
    """
    if not isinstance(fmt.scaling, TensorScaling):
        return 1.0, 1.0
    encode = encode_scale(finite_amax(), fmt.scaling)
    return encode.item(), 1.0 if fmt.scaling.apart else encode.reciprocal().item()


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type.

    The kernels round values one by one, so the result is the same for formats without a scale.
    """
    if fmt.is_cast:
        return ("nearest",) if device == "cpu" else ()
    if "hybrid" in fmt.element.roundings:
        return ("nearest", "stochastic", "hybrid")
    return ("nearest", "stochastic") if fmt.element.ties == "even" else ()


def describe(fmt: Format, scaling: TensorScaling, element: Element) -> ScaleDescription:
    """Return a description of the scale of the whole tensor."""
    source = "FP8, arXiv 2209.05433; scale as in Transformer Engine's current scaling"
    if element.source is not None:
        source = f"{element.source}; scale as in Ascend's tensor-wise recipe"
    brief = f"float32 per tensor, maps the maximum to {scaling.target:g}"
    found = f"{scaling.target:g} / its largest finite magnitude"
    if scaling.amax == "delayed":
        source = source.replace("current scaling", "delayed scaling")
        several = f"{scaling.history} tensors" if scaling.history > 1 else "tensor"
        brief = f"float32 per tensor, maps the maximum of the last {several} to {scaling.target:g}"
        found = f"{scaling.target:g} / the largest magnitude of the {several} before it"
    if scaling.power_of_two:
        brief += ", a power of two"
        found += "; the power of two at or below it"
    return ScaleDescription(source, brief, "the tensor, float32", (("found", found),))
