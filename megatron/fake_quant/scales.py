"""The scales of a quantized tensor, as they are stored."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scales:
    """What a format needs besides the codes of its elements; both None for a format without scales.

    blocks: uint8, a code a block `[..., blocks]`, or four bytes a block in HiFloat4.
    tensor: float32 without dimensions, by which the whole tensor is multiplied when dequantized.
    """

    blocks: Tensor | None = None
    tensor: Tensor | None = None

    def parts(self) -> dict[str, Tensor]:
        """Those that there are, by name."""
        both = {"blocks": self.blocks, "tensor": self.tensor}
        return {name: part for name, part in both.items() if part is not None}

    def block(self) -> Tensor:
        """`blocks`, of a format that has them."""
        assert self.blocks is not None
        return self.blocks

    def whole(self) -> Tensor:
        """`tensor`, of a format that has one."""
        assert self.tensor is not None
        return self.tensor
