"""View a collected tensor as a stack of matrices, to find its tokens, channels and blocks.

The view is contiguous and has the shape `[outer, rows, columns]`. Each row is divided into runs of
`run` values: the last dimension of the tensor, or one head if that dimension holds all heads. A
block along a row never crosses the boundary of a run, so two heads never share a block. A block
along a column never crosses the boundary between two matrices. The blocks are therefore the same as
in the operand of the matmul:

    tensor         dims      view               a column runs along
    linear         s b h     [1, s * b, h]      tokens; s and b are flattened
    weight         o h       [1, o, h]          output units
    attention      s b n d   [1, s, b * n * d]  queries or keys of one sequence and head
    attn. output   s b h     [1, s, b * h]      queries; h = heads * head_dim, run = head_dim
    probabilities  b a s k   [b * a, s, k]      queries
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.tensor_record import TENSOR_NAMES

PAIRWISE = ("attention_probs", "attention_scores")


@dataclass(frozen=True, slots=True)
class MatrixView:
    """Dimensions of a tensor that is viewed as a stack of matrices."""

    shape: tuple[int, ...]
    outer: int
    rows: int
    columns: int
    run: int  #: number of columns per head, or `columns` if a row is not divided into heads
    token_dims: int  #: number of leading dimensions that index tokens; the others index channels

    @property
    def tokens(self) -> tuple[int, ...]:
        """Sizes of the leading dimensions, which index tokens."""
        return self.shape[: self.token_dims]

    @property
    def channels(self) -> tuple[int, ...]:
        """Sizes of the trailing dimensions, which index channels (hidden units, heads, or keys)."""
        return self.shape[self.token_dims :]


def matrix_view_of(
    shape: tuple[int, ...],
    *,
    layer_type: str | None,
    tensor_name: str | None,
    head_dim: int | None = None,
) -> MatrixView:
    """Return the matrix view of a tensor, given fields of its record.

    Args:
        head_dim: size of a head, for attention tensors whose last dimension holds all heads.
    """
    dims = len(shape)
    last = shape[-1] if dims else 1
    if layer_type == "attention" and dims >= 3:
        if tensor_name in PAIRWISE:
            outer = math.prod(shape[:-2])
            return MatrixView(shape, outer, shape[-2], last, last, dims - 1)
        fits = dims == 3 and head_dim is not None and head_dim > 0 and last % head_dim == 0
        run = head_dim if fits and head_dim is not None else last
        return MatrixView(shape, 1, shape[0], math.prod(shape[1:]), run, 2)
    rows = math.prod(shape[:-1]) if dims else 1
    return MatrixView(shape, 1, rows, last, last, max(dims - 1, 0))


#: For each operand, the GEMM that quantizes it along rows and the GEMM that quantizes it along
#: columns; see `fake_quant.matmul.gemm`.
_USES: dict[tuple[str, str], tuple[str, str]] = {
    ("linear", "input"): ("fprop", "wgrad"),
    ("linear", "weight"): ("fprop", "dgrad"),
    ("linear", "grad_output"): ("dgrad", "wgrad"),
    ("attention", "query"): ("fprop", "wgrad"),
    ("attention", "key"): ("fprop", "dgrad"),
    ("attention", "value"): ("dgrad", "fprop"),
    ("attention", "attention_probs"): ("fprop", "wgrad"),
    ("attention", "grad_output"): ("dgrad", "wgrad"),
}


def is_operand(layer_type: Any, tensor_name: Any) -> bool:
    """Return whether a tensor is an operand of a matmul.

    A tensor of an unknown kind, for example from another program, counts as an operand.
    """
    known = tensor_name in TENSOR_NAMES.get(layer_type, ())
    return not known or (layer_type, tensor_name) in _USES


def used_by(layer_type: Any, tensor_name: Any, axis: str) -> str:
    """Return the names of the GEMMs that quantize this operand along `axis`, joined by "+".

    The string is empty if the tensor is not a known operand.
    """
    uses = _USES.get((layer_type, tensor_name))
    if uses is None:
        return ""
    return "+".join(uses) if axis == "all" else uses[("row", "column").index(axis)]
