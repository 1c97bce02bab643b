"""Define classes for the stored scales of a tensor and for a description of scales in words."""

from dataclasses import dataclass

from torch import Tensor

from megatron.fake_quant.block_scaling import WHOLE_AXIS
from megatron.fake_quant.formats import Format


@dataclass(frozen=True, slots=True)
class Scales:
    """Stored scales of a tensor; both fields are None for a format without scales.

    blocks: uint8 codes, one per block `[..., blocks]`, or four bytes per block in HiFloat4; float32
        numbers if block scales have that type.
    tensor: float32 without dimensions, by which dequantization multiplies the whole tensor; or
        `[..., groups]`, if each group of blocks in a row has an outer scale of its own.
    """

    blocks: Tensor | None = None
    tensor: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """Return the fields that are not None, by field name."""
        both = {"blocks": self.blocks, "tensor": self.tensor}
        return {name: part for name, part in both.items() if part is not None}

    def block(self) -> Tensor:
        """Return the block scales, which must exist."""
        assert self.blocks is not None
        return self.blocks

    def whole(self) -> Tensor:
        """Return the scale of the whole tensor, or the outer scales, which must exist."""
        assert self.tensor is not None
        return self.tensor


@dataclass(frozen=True, slots=True)
class ScaleDescription:
    """Description of a scaling, for tables and for `python -m megatron.fake_quant describe`."""

    source: str  #: document that defines the format
    brief: str  #: short description, for a table cell
    shared_by: str  #: values that share a scale, and the scale's number type
    found: tuple[tuple[str, str], ...]  #: (label, text) pairs on how a scale is computed
    range_note: str = ""  #: text printed after the range of the scales


def block_shape(fmt: Format) -> str:
    """Describe in words the shape of a format's blocks."""
    size = fmt.block_size
    if fmt.one_block:
        return "all values of the tensor"
    if fmt.columns:
        return "all values of a column of the last two axes"
    if fmt.height > 1:
        return f"{fmt.height} x {size} values of the last two axes"
    return "all values of a row" if size == WHOLE_AXIS else f"{size} values"


def brief_shape(fmt: Format) -> str:
    """Return the shape of a format's blocks in the short form used in tables."""
    if fmt.one_block or fmt.columns:
        return "tensor of" if fmt.one_block else "column of"
    if fmt.block_size == WHOLE_AXIS:
        return "row of"
    return f"{fmt.height} x {fmt.block_size}" if fmt.height > 1 else f"{fmt.block_size}"
