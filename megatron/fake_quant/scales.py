"""The scales of a quantized tensor as they are stored, and their description in words."""

from dataclasses import dataclass

from torch import Tensor

from megatron.fake_quant.formats import Format


@dataclass(frozen=True, slots=True)
class Scales:
    """The stored scales of a tensor; both are None for a format without scales.

    blocks: uint8 codes, one per block `[..., blocks]`, or four bytes per block in HiFloat4.
    tensor: float32 without dimensions, which multiplies the whole tensor when it is dequantized.
    """

    blocks: Tensor | None = None
    tensor: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """Return the scales that exist, by name."""
        both = {"blocks": self.blocks, "tensor": self.tensor}
        return {name: part for name, part in both.items() if part is not None}

    def block(self) -> Tensor:
        """Return `blocks` of a format that has block scales."""
        assert self.blocks is not None
        return self.blocks

    def whole(self) -> Tensor:
        """Return `tensor` of a format that has a tensor scale."""
        assert self.tensor is not None
        return self.tensor


@dataclass(frozen=True, slots=True)
class ScaleDescription:
    """A scaling in words, for tables and for `python -m megatron.fake_quant describe`."""

    source: str  #: document that defines the format
    brief: str  #: cell of a table
    shared_by: str  #: values that share a scale, and the scale's number type
    found: tuple[tuple[str, str], ...]  #: labeled lines on how a scale is computed
    range_note: str = ""  #: follows the range of the scales


def block_shape(fmt: Format) -> str:
    """Return the shape of a format's blocks in words."""
    size = fmt.block_size
    return f"{size} x {size} values of the last two axes" if fmt.square else f"{size} values"


def brief_shape(fmt: Format) -> str:
    """Return the shape of a format's blocks as a table shows it."""
    return f"{fmt.block_size} x {fmt.block_size}" if fmt.square else f"{fmt.block_size}"
