"""Split a matrix into the mean of its rows and the rest, and multiply the two parts separately.

The rows of an operand X [tokens, features] often share a large component, which determines the
scales of the blocks and leaves little precision for the differences between tokens. Averis (arXiv
2603.10444) removes the component before quantization:

    X = 1 mu^T + R        mu: mean of the rows; 1: a column of ones
    X W^T = 1 (mu^T W^T) + R W^T

Only R is quantized. mu stays in high precision, because its product has one row. The sum of both
products is the result. In a product that reduces over tokens, such as dY^T X, the first product is
(dY^T 1) mu^T. If both operands are split, there are four products.

mu is computed in float64 and rounded to the dtype of X, and R = X - mu is rounded to this dtype,
too. The products with mu are computed in float32, even under autocast. They are added to the
product of the quantized parts, and the sum is rounded to the dtype of this product.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.fake_quant.matmul.autocast import no_autocast


class SplitMatrix(NamedTuple):
    """Matrix stored as the sum of two parts, `scale * values + column @ row`."""

    values: Tensor
    #: factors of an outer product, `[..., rows, 1]` and `[..., 1, columns]` in float32; both are
    #: None if the matrix has no such part
    column: Tensor | None = None
    row: Tensor | None = None
    #: float32 scale of the values: a number, or `[..., rows, 1]` or `[..., 1, columns]`; None for 1
    scale: Tensor | None = None
    #: dtype of the tensors that the GEMM multiplies, which may be narrower than that of `values`;
    #: None for the dtype of `values`
    dtype: torch.dtype | None = None

    def is_unrounded(self) -> bool:
        """Return whether rounding the matrix to its dtype could change it; see `unrounded.py`.

        This is not a property, because torch.compile of torch 2.6 cannot trace properties of a
        named tuple.
        """
        return self.scale is not None or self.dtype not in (None, self.values.dtype)

    def t(self) -> "SplitMatrix":
        """Return the transposed matrix, with both parts transposed."""
        scale = self.scale
        if scale is not None and scale.dim():
            scale = scale.transpose(-2, -1)
        matrix = SplitMatrix(self.values.transpose(-2, -1), scale=scale, dtype=self.dtype)
        if self.column is None or self.row is None:
            return matrix
        column, row = self.row.transpose(-2, -1), self.column.transpose(-2, -1)
        return matrix._replace(column=column, row=row)

    def scaled(self) -> Tensor:
        """Return the first part of the matrix, `scale * values`, in float32."""
        values = self.values.float()
        return values if self.scale is None else values * self.scale

    def joined(self) -> "SplitMatrix":
        """Return the matrix with both parts added; a matrix of one part keeps its scale.

        The sum is rounded as in `dense`.
        """
        if self.column is None or self.row is None:
            return self
        return SplitMatrix(self.dense(), dtype=self.dtype)

    def dense(self) -> Tensor:
        """Return the matrix as one tensor, in float32 if it is unrounded or else in its dtype."""
        if self.column is None or self.row is None:
            return self.scaled() if self.is_unrounded() else self.values
        total = self.scaled() + self.column * self.row
        return total if self.is_unrounded() else total.to(self.values.dtype)


def split_mean(x: Tensor) -> SplitMatrix:
    """Split `x`, of shape `[..., rows, columns]`, into the mean of its rows and the rest."""
    total = x.sum(-2, keepdim=True, dtype=torch.float64)
    mean = (total / max(x.shape[-2], 1)).to(x.dtype)  # the mean of no rows is 0
    ones = x.new_ones((*x.shape[:-1], 1), dtype=torch.float32)
    return SplitMatrix(x - mean, ones, mean.float())


def with_means(product: Tensor, a: SplitMatrix, b: SplitMatrix, alpha: float) -> Tensor:
    """Return `alpha * a @ b`; `product` is `alpha` times the product of their first parts."""
    if a.column is None and b.column is None:
        return product
    terms = []
    with no_autocast(product.device.type):
        if a.column is not None and a.row is not None:
            terms.append(a.column * torch.matmul(a.row, b.scaled()))
        if b.column is not None and b.row is not None:
            terms.append(torch.matmul(a.scaled(), b.column) * b.row)
            if a.column is not None and a.row is not None:
                terms.append(a.column * (torch.matmul(a.row, b.column) * b.row))
    rest = terms[0] if len(terms) == 1 else terms[0] + terms[1] + terms[2]
    return (product.float() + alpha * rest).to(product.dtype)
