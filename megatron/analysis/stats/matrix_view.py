"""View a collected tensor as matrices, to find its tokens, its channels, and its blocks.

The view is contiguous, of shape `[outer, rows, columns]`. A new block along a row begins after
every `run` values, which is the last dimension: two heads never share a block. A new block along a
column begins with every `outer`. The blocks are therefore those of the matmul's operand:

    tensor         dims      view               columns run along
    linear         s b h     [1, s * b, h]      tokens, s and b flattened
    weight         o h       [1, o, h]          output units
    attention      s b n d   [1, s, b * n * d]  queries or keys, for each sequence and head
    its output     s b h     [1, s, b * h]      queries; h is heads times head_dim, the `run`
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
    """The sizes of a tensor of this shape as a stack of matrices."""

    shape: tuple[int, ...]
    outer: int
    rows: int
    columns: int
    run: int  #: values along a row after which a new block begins; divides `columns`
    token_dims: int  #: number of leading dimensions that count tokens; the others count channels

    @property
    def tokens(self) -> tuple[int, ...]:
        """Return the sizes of the dimensions that count tokens."""
        return self.shape[: self.token_dims]

    @property
    def channels(self) -> tuple[int, ...]:
        """Return the sizes of the other dimensions: hidden units; heads and head_dim; keys."""
        return self.shape[self.token_dims :]


def matrix_view_of(
    shape: tuple[int, ...],
    *,
    layer_type: str | None,
    tensor_name: str | None,
    head_dim: int | None = None,
) -> MatrixView:
    """Return the view of a record's tensor.

    Args:
        head_dim: width of a head, for attention tensors whose last dimension holds all heads.
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


#: GEMMs that quantize an operand along its rows and along its columns; see `fake_quant.gemm`.
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
    """Return whether a tensor is an operand of a matmul and not only a result.

    A tensor of an unknown kind, as in a foreign dump, counts as an operand.
    """
    known = tensor_name in TENSOR_NAMES.get(layer_type, ())
    return not known or (layer_type, tensor_name) in _USES


def used_by(layer_type: Any, tensor_name: Any, axis: str) -> str:
    """Return the GEMMs that quantize this operand along `axis`; empty for a matmul's result."""
    uses = _USES.get((layer_type, tensor_name))
    if uses is None:
        return ""
    return "+".join(uses) if axis == "all" else uses[("row", "column").index(axis)]
