"""The module of each scaling, which holds all that depends on how a format scales its values.

Each module offers the functions of `ScalingModule`. To add a scaling, add its class to `formats.py`
and one module to the table here. Such a format is computed by `reference.py`, and its statistics
are measured value by value, until fused kernels and statistics by class support it.
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
    """The functions of a scaling."""

    def scale_down(self, blocks: Tensor, element: Any, scaling: Any) -> tuple[Tensor, Scales]:
        """Return float32 blocks scaled to the range of their elements, and the scales."""

    def scale_up(self, elements: Tensor, scales: Scales) -> Tensor:
        """Undo `scale_down`."""

    def kernel_roundings(self, fmt: Format, device: str) -> tuple[str, ...]:
        """Return the rounding modes that have a fused kernel on a type of device."""

    def describe(self, fmt: Format, scaling: Any, element: Any) -> ScaleDescription:
        """Describe the scales in words."""


class BlockScalingModule(ScalingModule, Protocol):
    """The functions of a scaling with block scales."""

    def stored_scales(self, scaling: Any) -> Tensor:
        """Return the factor of blocks by scale code: float32, with NaN for at least one code."""


_MODULES: Mapping[type, ScalingModule] = MappingProxyType(
    {
        BlockScaling: mx,
        TwoLevelScaling: nvfp4,
        GroupScaling: hifloat4,
        TensorScaling: tensor_scale,
    }
)


def module_of(scaling: Scaling) -> ScalingModule:
    """Return the module with the functions of a scaling."""
    return _MODULES[type(scaling)]


def stored_scales(scaling: Scaling) -> Tensor:
    """Return the factor of blocks by scale code; HiFloat4 has 512 entries, see `hifloat4.py`."""
    return cast(BlockScalingModule, module_of(scaling)).stored_scales(scaling)


def kernel_roundings(fmt: Format, device: str) -> tuple[str, ...]:
    """Return the rounding modes of a format that have a fused kernel on a type of device."""
    module = tensor_scale if fmt.scaling is None else module_of(fmt.scaling)
    return module.kernel_roundings(fmt, device)


def describe(fmt: Format) -> ScaleDescription | None:
    """Describe the scales of a format in words; None if it has no scales."""
    if fmt.scaling is None:
        return None
    return module_of(fmt.scaling).describe(fmt, fmt.scaling, fmt.element)
