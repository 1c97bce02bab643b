"""Quantize and multiply the operands of attention in tiles; see `attention.py`.

`TiledMatmul.product` computes every product of a tile, and `TiledMatmul.quantized` quantizes every
operand. Both do for parts of matrices what `gemm.py` does for whole matrices. If a GEMM has an
accumulator, its operands are `UnitTile` objects: elements and scales, as the unit reads them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.fake_quant.accumulate.product import (
    accumulated_product,
    accumulated_sums,
    scaled_sums,
)
from megatron.fake_quant.accumulate.unit_matrix import UnitMatrix, unit_matrix
from megatron.fake_quant.matmul.gemm import Observer
from megatron.fake_quant.matmul.gemm_formats import OF_FORWARD, SLOTS, GemmFormats
from megatron.fake_quant.matmul.mean_split import SplitMatrix, with_means
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.matmul.products import matmul, matmul_then_scale, multiply
from megatron.fake_quant.matmul.unrounded import quantize_parts
from megatron.fake_quant.random_bits import derive_seed, draw_seed


class TileOperand(NamedTuple):
    """Operand of a GEMM, in the form in which the GEMM multiplies it."""

    matrix: SplitMatrix  #: quantized values, `[B, rows, columns]`
    axis: int  #: reduction axis, -1 or -2

    def rows(self, index: slice) -> "TileOperand":
        """Return the operand's rows in the range `index`."""
        matrix = self.matrix._replace(values=self.matrix.values[:, index])
        if matrix.column is not None:
            matrix = matrix._replace(column=matrix.column[:, index])
        return self._replace(matrix=matrix)

    def columns(self, index: slice) -> "TileOperand":
        """Return the operand's columns in the range `index`."""
        matrix = self.matrix._replace(values=self.matrix.values[..., index])
        if matrix.row is not None:
            matrix = matrix._replace(row=matrix.row[..., index])
        return self._replace(matrix=matrix)

    def dense(self) -> Tensor:
        """Return the quantized values as one tensor."""
        return self.matrix.dense()


class UnitTile(NamedTuple):
    """Operand of a GEMM with an accumulator, as the matrix unit reads it.

    Rows and columns are those of the tensor `[B, rows, columns]`. In `unit`, the reduction axis is
    the last one.
    """

    unit: UnitMatrix
    axis: int  #: reduction axis, -1 or -2
    scale_block: int | None  #: values per scale that the unit applies; None if it applies none
    whole: Callable[[], Tensor]  #: function that returns the quantized values before any cut

    def rows(self, index: slice) -> "UnitTile":
        """Return the operand's rows in the range `index`."""
        return self._cut(-2, index)

    def columns(self, index: slice) -> "UnitTile":
        """Return the operand's columns in the range `index`."""
        return self._cut(-1, index)

    def dense(self) -> Tensor:
        """Return the quantized values of a whole operand as one tensor."""
        return self.whole()

    def _cut(self, axis: int, index: slice) -> "UnitTile":
        if axis == self.axis:
            return self._replace(unit=self.unit.columns(index, self.scale_block))
        return self._replace(unit=self.unit.rows(index))


AnyOperand = TileOperand | UnitTile


@dataclass(frozen=True, slots=True)
class TiledMatmul:
    """One of the two matmuls of attention, with the two GEMMs that compute its gradients."""

    formats: GemmFormats
    alpha: float = 1.0  #: factor of the accumulated products
    #: seed of stochastic rounding and random signs; if None, `prepared` draws one where needed
    seed: int | None = None
    #: function that receives each operand that is quantized as a whole matrix, before quantization
    observe: Observer | None = None
    #: dtype of Q, K, V and the output's gradient, in which a unit reads operands without a format
    dtype: torch.dtype = torch.float32

    @property
    def operands(self) -> dict[str, Operand]:
        """Operands of the three GEMMs, by slot."""
        return {slot: getattr(self.formats, slot) for slot in SLOTS}

    def prepared(self, dtype: torch.dtype) -> "TiledMatmul":
        """Return a copy of this matmul with `dtype`, and with a seed and random signs if needed.

        `dtype` is the dtype of Q, K and V.
        """
        if not self.formats.random:
            return replace(self, dtype=dtype)
        seed = draw_seed(None) if self.seed is None else self.seed
        operands = {
            slot: operand.drawn(derive_seed(seed, slot.partition("_")[0]))
            for slot, operand in self.operands.items()
        }
        formats = replace(self.formats, **operands)  # type: ignore[arg-type]
        return replace(self, formats=formats, seed=seed, dtype=dtype)

    def quantized(
        self, slot: str, x: Tensor, *, axis: int, tile: int | None = None, amax: float | None = None
    ) -> AnyOperand:
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
        accumulator = self.formats.simulated_accumulator(slot.partition("_")[0])
        if operand.format is None:
            if accumulator is None:
                return TileOperand(parts, axis)
            values = parts.values.to(self.dtype)
            unit = unit_matrix(values, None, axis, accumulator)
            return UnitTile(unit, axis, accumulator.scale_block, values.float)
        seed = None
        if operand.format.stochastic:
            assert self.seed is not None
            seed = derive_seed(self.seed, slot, tile) if tile else derive_seed(self.seed, slot)
        if self.observe is not None and tile is None:
            self.observe(slot, parts.values, operand, axis, seed, None)
        given = None if amax is None else torch.tensor(amax, dtype=torch.float32, device=x.device)
        quantize = partial(quantize_parts, parts, operand.format, axis, seed=seed, amax=given)
        if accumulator is None:
            return TileOperand(quantize(), axis)
        unit = unit_matrix(parts.values, operand.format, axis, accumulator, seed=seed, amax=given)
        return UnitTile(unit, axis, accumulator.scale_block, lambda: quantize().dense())

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

    def product(self, gemm: str, a: AnyOperand, b: AnyOperand) -> Tensor:
        """Return the product of a GEMM (fprop, dgrad or wgrad) in float32, times `alpha`.

        An accumulator begins a new sum for each product.
        """
        accumulator = self.formats.simulated_accumulator(gemm)
        if accumulator is not None:
            left, right = _units(a, b)
            product = accumulated_product(left, right, accumulator, self.alpha)
        else:
            product = self._plain(gemm, a, b)
        if gemm == "fprop" or not self.formats.straight_through:
            return product
        return self.formats.fprop_a.rotated_back(product)  # undo the forward pass's transform

    def continued(self, sums: Tensor, a: AnyOperand, b: AnyOperand) -> Tensor:
        """Return the sums of fprop after an accumulator has added the products of a tile to `sums`.

        The scales of rows and tensors are not applied; `finished` does this after the last tile.
        """
        accumulator = self.formats.simulated_accumulator("fprop")
        assert accumulator is not None
        return accumulated_sums(*_units(a, b), accumulator, start=sums)

    def finished(self, sums: Tensor, a: AnyOperand, b: AnyOperand) -> Tensor:
        """Return the product that `continued` has summed; `a` and `b` may belong to any tile."""
        return scaled_sums(sums, *_units(a, b), self.alpha)

    def _plain(self, gemm: str, a: AnyOperand, b: AnyOperand) -> Tensor:
        """Return the product of a GEMM without an accumulator."""
        assert isinstance(a, TileOperand)
        assert isinstance(b, TileOperand)
        left = a.matrix if a.axis == -1 else a.matrix.t()
        right = b.matrix.t() if b.axis == -1 else b.matrix
        plain = matmul if gemm == "fprop" else matmul_then_scale
        product = multiply(left, right, self.alpha, plain)
        return with_means(product, left, right, self.alpha)


def _units(a: AnyOperand, b: AnyOperand) -> tuple[UnitMatrix, UnitMatrix]:
    assert isinstance(a, UnitTile)
    assert isinstance(b, UnitTile)
    return a.unit, b.unit
