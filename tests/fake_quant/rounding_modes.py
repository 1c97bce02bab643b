"""A rounding mode that is declared but implemented nowhere, to test that every path refuses it."""

from types import MappingProxyType

import pytest

from megatron.fake_quant import formats, get_format
from megatron.fake_quant.elements import ElementFormat, HiFloat8
from megatron.fake_quant.formats import Format
from megatron.fake_quant.rounding_modes import RoundingMode

MODE = "toward_zero"
#: One format per rounding function and scaling.
NAMES = ("mxfp8", "mxfp4:2d", "nvfp4", "hifp8", "hifp8:t15", "hifp4", "fp8_e4m3")
REFUSAL = rf"does not implement the rounding mode '{MODE}'; it has nearest.*choose one of these"


def declare_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare `MODE` for all element types."""
    modes = {**formats.ROUNDINGS, MODE: RoundingMode("rz", "toward zero")}
    monkeypatch.setattr(formats, "ROUNDINGS", MappingProxyType(modes))
    for element in (ElementFormat, HiFloat8):
        monkeypatch.setattr(element, "roundings", (*element.roundings, MODE))


def in_mode(name: str) -> Format:
    """Return a named format with the rounding mode `MODE`."""
    fmt = get_format(name)
    return Format(f"{name}:rz", fmt.element, fmt.scaling, MODE)  # type: ignore[arg-type]
