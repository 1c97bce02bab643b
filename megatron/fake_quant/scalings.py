"""Find the module that implements a scaling, such as `mx.py` for MX block scales.

The module contains all code that depends on the scaling, and provides the functions of
`ScalingModule`. To add a scaling, add its class to `formats.py` and one module to the table here. A
format with the new scaling is computed by `reference.py`, and its statistics are measured value by
value, until the fused kernels and the statistics by class support it.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Protocol, cast

from torch import Tensor

from megatron.fake_quant import hifloat4, mx, nvfp4, tensor_scale
from megatron.fake_quant.formats import (
    BlockScaling,
    Format,
    GroupScaling,
    Scaling,
    TensorScaling,
    TwoLevelScaling,
)
from megatron.fake_quant.scales import ScaleDescription, Scales


class ScalingModule(Protocol):
    """Functions that a module must provide to implement a scaling."""

    def scale_down(self, blocks: Tensor, element: Any, scaling: Any) -> tuple[Tensor, Scales]:
        """Return float32 blocks scaled to the range of the element type, and the scales."""

    def scale_up(self, elements: Tensor, scales: Scales) -> Tensor:
        """Return the float32 values that elements and scales stand for."""

    def kernel_roundings(self, fmt: Format, device: str) -> tuple[str, ...]:
        """Return the rounding modes for which the format has a fused kernel on this device type."""

    def describe(self, fmt: Format, scaling: Any, element: Any) -> ScaleDescription:
        """Return a description of the scales in words."""


class BlockScalingModule(ScalingModule, Protocol):
    """Functions that a module must provide to implement a scaling that has block scales."""

    def stored_scales(self, scaling: Any) -> Tensor:
        """Return the factor that each scale code stands for, as float32; at least one is NaN."""


_MODULES: Mapping[type, ScalingModule] = MappingProxyType(
    {
        BlockScaling: mx,
        TwoLevelScaling: nvfp4,
        GroupScaling: hifloat4,
        TensorScaling: tensor_scale,
    }
)


def module_of(scaling: Scaling) -> ScalingModule:
    """Return the module that implements a scaling."""
    return _MODULES[type(scaling)]


def stored_scales(scaling: Scaling) -> Tensor:
    """Return the factor that each scale code stands for. HiFloat4 has 512 codes (`hifloat4.py`)."""
    return cast(BlockScalingModule, module_of(scaling)).stored_scales(scaling)


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes for which the format has a fused kernel on this device type."""
    module = tensor_scale if fmt.scaling is None else module_of(fmt.scaling)
    return module.kernel_roundings(fmt, device)


def describe(fmt: Format) -> ScaleDescription | None:
    """Return a description of a format's scales in words, or None if it has no scales."""
    if fmt.scaling is None:
        return None
    return module_of(fmt.scaling).describe(fmt, fmt.scaling, fmt.element)
