"""Define how one operand of a GEMM is split, transformed and quantized."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.hadamard import Hadamard
from megatron.fake_quant.matmul.mean_split import SplitMatrix, split_mean
from megatron.fake_quant.matmul.unrounded import quantize_parts

#: Tensor from which an operand is quantized: the high-precision tensor, or the values that the
#: forward pass multiplied (its quantized copy, dequantized).
Source = Literal["original", "dequantized"]
SOURCES: tuple[Source, ...] = get_args(Source)
#: Part of an operand that is split off and multiplied separately: none, or the mean of its rows.
Split = Literal["none", "mean"]
SPLITS: tuple[Split, ...] = get_args(Split)


@dataclass(frozen=True, slots=True)
class Operand:
    """Split, Hadamard transform and format of one GEMM operand; by default, nothing changes."""

    format: Format | None = None  #: None if the operand is not quantized
    hadamard: Hadamard | None = None  #: transform along the reduction axis, before quantization
    #: tensor to transform and quantize; see `GemmFormats` for "dequantized"
    source: Source = "original"
    #: "mean" if the mean of the rows is multiplied separately; see `mean_split.py`
    split: Split = "none"

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(
                f"unknown split {self.split!r} of an operand; choose {' or '.join(SPLITS)}"
            )
        if self.split != "none" and self.format is None:
            raise ValueError(
                f"the split {self.split} of an operand is for quantizing the rest; give the "
                "operand a format, or remove the split"
            )
        if self.source not in SOURCES:
            raise ValueError(
                f"unknown source {self.source!r} of an operand; choose {' or '.join(SOURCES)}"
            )

    def quantized(
        self,
        x: Tensor,
        *,
        axis: int,
        seed: int | Tensor | None = None,
        fill: bool = False,
        amax: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> SplitMatrix:
        """Split `x`, transform it and quantize it, and return it as the GEMM receives it.

        Args:
            x: the operand.
            axis: reduction axis of the GEMM.
            seed: seed of stochastic rounding.
            fill: True to pad the axis with zeros if the transform's size does not divide it.
            amax: number from which the scale of the whole tensor is computed; see `fake_quantize`.
            dtype: dtype of the tensors that the GEMM multiplies; by default, that of `x`.
        """
        parts = self.prepared(x, axis=axis, fill=fill)
        if self.format is None:
            return parts._replace(dtype=dtype)
        return quantize_parts(parts, self.format, axis, seed=seed, amax=amax, dtype=dtype)

    def prepared(
        self, x: Tensor, *, axis: int, fill: bool = False, signs: int | Tensor | None = None
    ) -> SplitMatrix:
        """Split `x` and transform it, but do not quantize it; see `quantized`.

        `signs` is the seed of the transform's random signs.
        """
        parts = split_mean(x) if self.split == "mean" else SplitMatrix(x)
        transform = self.hadamard
        if transform is None:
            return parts

        def rotated(part: Tensor) -> Tensor:
            return transform.apply(transform.filled(part, axis) if fill else part, axis, seed=signs)

        values, column, row = rotated(parts.values), parts.column, parts.row
        if row is not None and axis == -1:
            row = rotated(row)
        elif column is not None:
            column = rotated(column)
        return SplitMatrix(values, column, row)

    @property
    def changes_values(self) -> bool:
        """True if the operand is quantized or transformed."""
        return self.format is not None or self.hadamard is not None

    def rotated_back(self, x: Tensor, *, signs: int | Tensor | None = None) -> Tensor:
        """Undo this operand's transform along the last axis of `x`, up to rounding to the dtype."""
        return x if self.hadamard is None else self.hadamard.invert(x, -1, seed=signs)

    def drawn(self, signs: int | Tensor | None) -> "Operand":
        """Return this operand with the random signs of its Hadamard transform fixed by `signs`."""
        if self.hadamard is None or signs is None:
            return self
        return replace(self, hadamard=self.hadamard.drawn(int(signs)))

    def __str__(self) -> str:
        """Return the operand as text, such as `none` or `nvfp4:sr+mean+H16:nvfp4+dequantized`."""
        text = "none" if self.format is None else self.format.name
        if self.split != "none":
            text += f"+{self.split}"
        if self.hadamard is not None:
            text += f"+H{self.hadamard.size}:{self.hadamard.signs}"
        return text if self.source == "original" else f"{text}+{self.source}"


AS_IT_IS = Operand()
