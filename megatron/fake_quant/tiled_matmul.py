"""Quantize and multiply the operands of attention in tiles; see `tiled_attention.py`.

`TiledMatmul.product` computes every product of a tile, and `TiledMatmul.quantized` quantizes every
operand. Both do for parts of matrices what `gemm.py` does for whole matrices.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.fake_quant.gemm import Observer
from megatron.fake_quant.gemm_formats import OF_FORWARD, SLOTS, GemmFormats
from megatron.fake_quant.mean_split import SplitMatrix, with_means
from megatron.fake_quant.operand import Operand
from megatron.fake_quant.products import matmul, matmul_then_scale, multiply
from megatron.fake_quant.random_bits import derive_seed, draw_seed
from megatron.fake_quant.unrounded import quantize_parts


class TileOperand(NamedTuple):
    """Operand of a GEMM, in the form in which the GEMM multiplies it."""

    matrix: SplitMatrix  #: quantized values, `[B, rows, columns]`
    axis: int  #: reduction axis, -1 or -2

    def rows(self, index: slice) -> "TileOperand":
        """Return some rows of the operand."""
        matrix = self.matrix._replace(values=self.matrix.values[:, index])
        if matrix.column is not None:
            matrix = matrix._replace(column=matrix.column[:, index])
        return self._replace(matrix=matrix)

    def columns(self, index: slice) -> "TileOperand":
        """Return some columns of the operand."""
        matrix = self.matrix._replace(values=self.matrix.values[..., index])
        if matrix.row is not None:
            matrix = matrix._replace(row=matrix.row[..., index])
        return self._replace(matrix=matrix)

    def dense(self) -> Tensor:
        """Return the quantized values as one tensor."""
        return self.matrix.dense()


@dataclass(frozen=True, slots=True)
class TiledMatmul:
    """One of the two matmuls of attention, with the two of its gradients."""

    formats: GemmFormats
    alpha: float = 1.0  #: factor of the accumulated products
    #: seed of stochastic rounding and random signs; required if `formats.random`
    seed: int | None = None
    #: function that is called with each operand that is quantized whole, before it is quantized
    observe: Observer | None = None

    @property
    def operands(self) -> dict[str, Operand]:
        """Return the operands by slot."""
        return {slot: getattr(self.formats, slot) for slot in SLOTS}

    def prepared(self) -> "TiledMatmul":
        """Return this matmul with a seed and with the random signs of its transforms drawn."""
        if not self.formats.random:
            return self
        seed = draw_seed(None) if self.seed is None else self.seed
        operands = {
            slot: operand.drawn(derive_seed(seed, slot.partition("_")[0]))
            for slot, operand in self.operands.items()
        }
        formats = replace(self.formats, **operands)  # type: ignore[arg-type]
        return replace(self, formats=formats, seed=seed)

    def quantized(
        self, slot: str, x: Tensor, *, axis: int, tile: int | None = None, amax: float | None = None
    ) -> TileOperand:
        """Return an operand as its GEMM multiplies it.

        Args:
            slot: one of `gemm_formats.SLOTS`.
            x: the operand in float32.
            axis: reduction axis of the GEMM.
            tile: number of the tile, or None if `x` is a whole matrix.
            amax: number from which the scale of the whole tensor, if any, is computed.
        """
        operand: Operand = getattr(self.formats, slot)
        parts = operand.prepared(x, axis=axis, fill=slot.startswith("wgrad"))
        if operand.format is None:
            return TileOperand(parts, axis)
        seed = None
        if operand.format.stochastic:
            assert self.seed is not None
            seed = derive_seed(self.seed, slot, tile) if tile else derive_seed(self.seed, slot)
        if self.observe is not None and tile is None:
            self.observe(slot, parts.values, operand, axis, seed, None)
        given = None if amax is None else torch.tensor(amax, device=x.device)
        return TileOperand(quantize_parts(parts, operand.format, axis, seed=seed, amax=given), axis)

    def source(self, slot: str, x: Tensor, copy: Callable[[], Tensor]) -> Tensor:
        """Return the tensor from which an operand of the backward pass is quantized.

        `copy` returns the values of `x` that the forward pass multiplied.
        """
        if self.formats.straight_through:
            return copy()
        if getattr(self.formats, slot).source == "dequantized":
            forward: Operand = getattr(self.formats, OF_FORWARD[slot])
            return forward.rotated_back(copy())
        return x

    def product(self, gemm: str, a: TileOperand, b: TileOperand) -> Tensor:
        """Return the product of a GEMM (fprop, dgrad or wgrad) in float32, times `alpha`."""
        left = a.matrix if a.axis == -1 else a.matrix.t()
        right = b.matrix.t() if b.axis == -1 else b.matrix
        plain = matmul if gemm == "fprop" else matmul_then_scale
        product = multiply(left, right, self.alpha, plain)
        product = with_means(product, left, right, self.alpha)
        if gemm == "fprop" or not self.formats.straight_through:
            return product
        return self.formats.fprop_a.rotated_back(product)  # undo the forward pass's transform
