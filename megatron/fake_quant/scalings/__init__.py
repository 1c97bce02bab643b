"""Find the module that implements a scaling, such as `mx.py` for MX block scales.

The module contains all code that depends on the scaling, and provides the functions of
`ScalingModule`. To add a scaling, add its data to `block_scaling.py` or `special_scalings.py`, and
one module to the table here. A format with the new scaling is computed by `reference.py`, and its
statistics are measured value by value, until the fused kernels and the statistics by class support
it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol, cast

from torch import Tensor

from megatron.fake_quant.block_scaling import GLOBAL, BlockScaling
from megatron.fake_quant.elements import ElementFormat
from megatron.fake_quant.formats import Format, Scaling
from megatron.fake_quant.scales import ScaleDescription, Scales
from megatron.fake_quant.scalings import (
    absmax,
    element_choice,
    float8_scales,
    float32_scales,
    hifloat4,
    macro_blocks,
    mx,
    pair_exponents,
    tensor_scale,
)
from megatron.fake_quant.special_scalings import ChoiceScaling, TensorScaling


class ScalingModule(Protocol):
    """Functions that a module must provide to implement a scaling."""

    #: Function of float32 blocks, an element type and a scaling. It returns the blocks, scaled to
    #: the range of the element type, and their scales. If the scaling has a scale for the whole
    #: tensor, the function also takes `amax`, from which it computes this scale; if `amax` is None,
    #: it computes the scale from the tensor's own amax.
    scale_down: Callable[..., tuple[Tensor, Scales]]

    def scale_up(self, elements: Tensor, scales: Scales, scaling: Any) -> Tensor:
        """Return the float32 values that scaled elements and their scales stand for."""

    def kernel_roundings(self, fmt: Format, device: str) -> tuple[str, ...]:
        """Return the rounding modes for which the format has a fused kernel on this device type."""

    def describe(self, fmt: Format, scaling: Any, element: Any) -> ScaleDescription:
        """Return a description of the scales in words."""


class BlockScalingModule(ScalingModule, Protocol):
    """Functions that a module must provide to implement a scaling that has block scales."""

    def stored_scales(self, scaling: Any) -> Tensor:
        """Return the float32 factors of all scale codes; at least one factor must be NaN."""

    def histogram_bytes(self, stored: Tensor) -> Tensor:
        """Return one byte per block, which represents the block's scale in histograms."""


class ChoiceModule(BlockScalingModule, Protocol):
    """Functions that a module must provide if each block chooses between two element types."""

    def alternative_chosen(self, scales: Scales) -> Tensor:
        """Return a mask of the blocks whose elements have the scaling's alternative type."""


#: Modules that implement a scaling, by its `method`.
_MODULES: Mapping[str, ScalingModule] = MappingProxyType(
    {
        "mx": mx,
        "float8": float8_scales,
        "float32": float32_scales,
        "hifloat4": hifloat4,
        "tensor": tensor_scale,
        "pair_exponents": pair_exponents,
        "absmax": absmax,
        "element_choice": element_choice,
        "macro_blocks": macro_blocks,
    }
)


def module_of(scaling: Scaling) -> ScalingModule:
    """Return the module that implements the computation of `scaling`."""
    return _MODULES[scaling.method]


def stored_scales(scaling: Scaling) -> Tensor:
    """Return the factors of all scale codes: 256, or 512 for scalings such as HiFloat4's."""
    return cast(BlockScalingModule, module_of(scaling)).stored_scales(scaling)


def histogram_bytes(stored: Tensor, scaling: Scaling) -> Tensor:
    """Return one byte per block, which represents the block's scale in histograms."""
    return cast(BlockScalingModule, module_of(scaling)).histogram_bytes(stored)


def target(fmt: Format) -> float | None:
    """Return the number to which a format's float32 scale maps the maximum of a tensor or group.

    The result is None if the format has no such scale.
    """
    if isinstance(fmt.scaling, TensorScaling | ChoiceScaling):
        return fmt.scaling.target
    if not fmt.has_outer_scale:
        return None
    assert isinstance(fmt.scaling, BlockScaling)
    assert isinstance(fmt.element, ElementFormat)
    return float8_scales.target(fmt.scaling, fmt.element)


def alternative_chosen(scales: Scales, scaling: Scaling) -> Tensor:
    """Return a mask of the blocks whose elements have the scaling's alternative type."""
    return cast(ChoiceModule, module_of(scaling)).alternative_chosen(scales)


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    module = tensor_scale if fmt.scaling is None else module_of(fmt.scaling)
    return module.kernel_roundings(fmt, device)


def describe(fmt: Format) -> ScaleDescription | None:
    """Return a description of a format's scales in words, or None if it has no scales."""
    if fmt.scaling is None:
        return None
    description = module_of(fmt.scaling).describe(fmt, fmt.scaling, fmt.element)
    if fmt.columns:
        text = (
            "the scale differs along the reduction axis, so hardware cannot apply it after the sum "
            "of a dot product; the simulation multiplies dequantized values"
        )
        description = replace(description, found=(*description.found, ("in a matmul", text)))
    if fmt.amax_source != GLOBAL:
        return description
    brief = description.brief.replace("float32 per tensor", "float32 per tensor over all ranks")
    text = (
        "that of the tensor is the largest over all ranks that hold a part of a matmul's operand; "
        "outside a training run, the caller gives it (`amax` of fake_quantize)"
    )
    return replace(description, brief=brief, found=(*description.found, ("amax", text)))
