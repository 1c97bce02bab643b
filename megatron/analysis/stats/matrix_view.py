"""Where the tokens and the channels of a collected tensor are, and along what its blocks run.

A tensor is seen as `[outer, rows, columns]`, contiguous. Blocks along a row begin anew after every
`run` values (the last dimension: two heads never share a block), blocks along a column with every
`outer`. So both are those of the matmul's operand:

    linear       s b h     [1, s * b, h]      columns run along tokens, s and b flattened
    weight       o h       [1, o, h]          along output units
    attention    s b n d   [1, s, b * n * d]  along queries or keys, for each sequence and head
    its output   s b h     [1, s, b * h]      h is heads times head_dim: `run` is head_dim
    probabilities  b a s k  [b * a, s, k]     along queries
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megatron.tensor_record import TENSOR_NAMES

PAIRWISE = ("attention_probs", "attention_scores")


@dataclass(frozen=True, slots=True)
class MatrixView:
    """How a tensor of this shape is read."""

    shape: tuple[int, ...]
    outer: int
    rows: int
    columns: int
    run: int  #: values along a row that blocks do not leave; divides `columns`
    token_dims: int  #: so many dimensions count tokens, those after them channels

    @property
    def tokens(self) -> tuple[int, ...]:
        """Shape of the dimensions that count tokens."""
        return self.shape[: self.token_dims]

    @property
    def channels(self) -> tuple[int, ...]:
        """Shape of those that count channels: hidden units; heads and head_dim; keys."""
        return self.shape[self.token_dims :]


def layout_of(
    shape: tuple[int, ...],
    *,
    layer_type: str | None,
    tensor_name: str | None,
    head_dim: int | None = None,
) -> MatrixView:
    """The layout of a record's tensor.

    Args:
        head_dim: of attention, where the last dimension has all heads.
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


#: GEMM that quantizes an operand along its rows and along its columns; see `fake_quant.gemm`.
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
    """Return whether a matmul reads the tensor; False only for a known result.

    A tensor of an unknown kind, as in a foreign dump, counts as an operand.
    """
    known = tensor_name in TENSOR_NAMES.get(layer_type, ())
    return not known or (layer_type, tensor_name) in _USES


def used_by(layer_type: Any, tensor_name: Any, axis: str) -> str:
    """The GEMMs that quantize this operand along `axis`; empty for the result of a matmul."""
    uses = _USES.get((layer_type, tensor_name))
    if uses is None:
        return ""
    return "+".join(uses) if axis == "all" else uses[("row", "column").index(axis)]
