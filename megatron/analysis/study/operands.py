"""Load the operands of the matmuls in a pass, and recompute attention operands that are not saved.

Attention multiplies two tensors that a dump does not contain by default: the probabilities P, and
the gradient dS of the scores. Both are recomputed in high precision, as the layer computes them:
P from Q and K, and dS by differentiating softmax and PV. A saved P is used as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from megatron import cpu_matmul
from megatron.analysis.study.candidates import HIGH_PRECISION
from megatron.analysis.study.passes import Pass
from megatron.analysis.verification import recorded_formats
from megatron.analysis.verification.recompute_attention import (
    by_head,
    gathered,
    mask_of,
    masked_scores,
    unnormalized_probabilities,
)
from megatron.analysis.verification.recorded_formats import NotCheckedError, Softmax
from megatron.fake_quant.matmul.gemm import quantized_matmul

Load = Callable[[Any], Tensor]
#: Operands of attention with the dimensions sequence, batch, head and head_dim, in this order.
_OF_HEADS = ("query", "key", "value")


#: Implementation of a linear layer that includes a norm; its recorded input is the norm's input.
NORM_INSIDE = "transformer_engine.LayerNormLinear"


@dataclass(frozen=True)
class Matmul:
    """Operands of a matmul C = alpha A B^T and of its two gradient GEMMs, in the saved dtype."""

    row: Any  #: record that describes the pass
    operation: str  #: linear, qk or pv
    a: Tensor
    b: Tensor
    c: Tensor | None  #: gradient of C; None if it was not saved
    alpha: float = 1.0
    #: function that returns the argument `unnormalized` of `quantized_matmul`; None except for PV
    unnormalized: Callable[[], tuple[Tensor, Tensor]] | None = None


def matmuls(of_pass: Pass, load: Load) -> Iterator[Matmul]:
    """Yield the operands of each matmul in a pass.

    Raises:
        NotCheckedError: if the operands do not belong together, or the run's attention cannot be
            recomputed.
        UnreadableTensorError: if a file cannot be read.
    """
    if of_pass.layer_type == "linear":
        yield _linear(of_pass.ranks[0], load)
    else:
        yield from _attention(of_pass, load)


def _linear(by_name: Mapping[str, Any], load: Load) -> Matmul:
    if "input" not in by_name:
        raise NotCheckedError("no input")
    if by_name["input"].implementation == NORM_INSIDE:
        raise NotCheckedError(f"an input that a {NORM_INSIDE} recorded before its norm")
    loaded = {name: load(row) for name, row in by_name.items()}
    _check(loaded, dims=2)
    tensors = {name: x.flatten(0, -2) for name, x in loaded.items()}
    a, b, c = tensors["input"], tensors["weight"], tensors.get("grad_output")
    if a.shape[1] != b.shape[1] or (c is not None and c.shape != (len(a), len(b))):
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
        raise NotCheckedError(f"operands that do not fit together: {shapes}")
    return Matmul(next(iter(by_name.values())), "linear", a, b, c)


def _attention(of_pass: Pass, load: Load) -> Iterator[Matmul]:
    first = of_pass.first
    ranks = [{name: load(row) for name, row in by_name.items()} for by_name in of_pass.ranks]
    for tensors in ranks:
        _check(tensors, dims=3)  # the gradient of the result has heads and head_dim in one
        _check({name: tensors[name] for name in tensors if name in _OF_HEADS}, dims=4)
    if not pd.isna(first.cp_size) and len(ranks) != int(first.cp_size):
        raise NotCheckedError("missing keys and values of a context-parallel rank")
    softmax = (
        recorded_formats.softmax_of_card(of_pass.card, first.module, int(first.iteration))
        or Softmax()
    )
    try:
        key = gathered([tensors["key"] for tensors in ranks])
        value = None
        if all("value" in tensors for tensors in ranks):
            value = gathered([tensors["value"] for tensors in ranks])
        for rank, tensors in enumerate(ranks):
            row = next(iter(of_pass.ranks[rank].values()))
            mask = mask_of(len(tensors["query"]), rank, len(ranks), softmax.window)
            hidden = mask.hidden(slice(0, len(key)))
            assert hidden is not None
            yield from _of_rank(row, tensors, (key, value), softmax, hidden)
    except (RuntimeError, ValueError) as error:
        line = str(error).partition("\n")[0]
        raise NotCheckedError(f"operands that do not fit together: {line}") from None


def _of_rank(
    row: Any,
    tensors: Mapping[str, Tensor],
    keys_and_values: tuple[Tensor, Tensor | None],
    softmax: Softmax,
    hidden: Tensor,
) -> Iterator[Matmul]:
    """Yield the matmuls QK^T and PV of one rank.

    Args:
        row: record that describes the pass.
        tensors: tensors of the rank by name.
        keys_and_values: keys and values of all ranks that share the sequences.
        softmax: parameters of the softmax.
        hidden: mask that is true where a key is hidden from a query.
    """
    query, (key, value) = tensors["query"], keys_and_values
    heads = query.shape[2]
    scale = 1 / math.sqrt(query.shape[3]) if softmax.scale is None else softmax.scale
    q_BMD, k_BND = by_head(query, heads), by_head(key, heads)
    if value is None:
        yield Matmul(row, "qk", q_BMD, k_BND, None, scale)
        return
    v_BDN = by_head(value, heads).transpose(1, 2)
    scores_BMN = quantized_matmul(q_BMD, k_BND, HIGH_PRECISION, alpha=scale).requires_grad_()
    masked = masked_scores(scores_BMN, softmax, hidden, in_fp32=softmax.in_fp32)
    p_BMN = masked.softmax(-1).to(query.dtype)
    ds_BMN = do_BMD = None
    if (grad := tensors.get("grad_output")) is not None:
        do_BMD = by_head(grad.view(*query.shape[:3], -1), heads)
        context_BMD = cpu_matmul.bmm(p_BMN, v_BDN.transpose(1, 2))
        (ds_BMN,) = torch.autograd.grad(context_BMD, scores_BMN, do_BMD)
    yield Matmul(row, "qk", q_BMD, k_BND, ds_BMN, scale)
    p_BMN = p_BMN.detach()
    if (saved := tensors.get("attention_probs")) is not None:
        if saved.shape != (query.shape[1], heads, *p_BMN.shape[1:]):
            raise ValueError(f"attention_probs {list(saved.shape)}, query {list(query.shape)}")
        p_BMN = saved.flatten(0, 1)

    def unnormalized() -> tuple[Tensor, Tensor]:
        masked = masked_scores(scores_BMN.detach(), softmax, hidden)
        return unnormalized_probabilities(masked, query.dtype)

    yield Matmul(row, "pv", p_BMN, v_BDN, do_BMD, unnormalized=unnormalized)


def _check(tensors: Mapping[str, Tensor], *, dims: int) -> None:
    """Raise `NotCheckedError` unless all operands are nonempty and have the same supported dtype.

    Each must have `dims` dimensions or more.
    """
    dtypes = sorted({str(x.dtype).removeprefix("torch.") for x in tensors.values()})
    if len(dtypes) > 1 or dtypes[0] not in ("bfloat16", "float16", "float32"):
        raise NotCheckedError(f"operands of {' and '.join(dtypes)}")
    for name, x in tensors.items():
        if not x.numel():
            raise NotCheckedError("an empty operand")
        if x.dim() < dims:
            raise NotCheckedError(f"{name} of shape {list(x.shape)}, which has too few dimensions")
