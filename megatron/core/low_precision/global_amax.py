"""Compute the amax of operands that are divided among ranks, for formats with `:global`.

The tensor-wide scale of such a format follows from the largest magnitude (amax) of the logical
operand, which is the operand of the same GEMM if nothing is sharded. Each rank computes the amax of
its part, and an all-reduce over the groups that divide the operand returns the maximum. Replicas
need no reduction. A sharded run then has the same scales as an unsharded one.

The groups follow from the `dims` with which a layer describes its operands to the collection: a
bracket names the group that divides a dimension, and context parallelism divides the sequence `s`.

    matmul              slots               operand   dims            reduced over
    linear, column      fprop_a, wgrad_a    X         s b h           cp
                        fprop_b, dgrad_b    W         o[tp] h         tp
                        dgrad_c, wgrad_c    dY        s b o[tp]       tp, cp
    linear, row         fprop_a, wgrad_a    X         s b h[tp]       tp, cp
                        fprop_b, dgrad_b    W         o h[tp]         tp
                        dgrad_c, wgrad_c    dY        s b o           cp
    expert, column      fprop_a, wgrad_a    X         t h             replicas of the expert
                        fprop_b, dgrad_b    W         o[etp] h        etp
                        dgrad_c, wgrad_c    dY        t o[etp]        etp, replicas of the expert
    expert, row         fprop_a, wgrad_a    X         t h[etp]        etp, replicas of the expert
                        fprop_b, dgrad_b    W         o h[etp]        etp
                        dgrad_c, wgrad_c    dY        t o             replicas of the expert
    QK^T                fprop_a, wgrad_a    Q         b a[tp] s d     tp, cp
                        fprop_b, dgrad_b    K         b a[tp] k d     tp
                        dgrad_c, wgrad_c    dS        b a[tp] s k     tp, cp
    PV                  fprop_a, wgrad_a    P         b a[tp] s k     tp, cp
                        fprop_b, dgrad_b    V^T       b a[tp] d k     tp
                        dgrad_c, wgrad_c    dO        b a[tp] s d     tp, cp

Sequence parallelism divides neither X of a column-parallel layer nor dY of a row-parallel one: both
are gathered before the matmul. So are keys and values under context parallelism. Data-parallel
ranks have different micro-batches. Each of these is a tensor of its own, with or without sharding,
so nothing is reduced over data-parallel ranks.

Every expert is a GEMM of its own, in the unsharded run too, so nothing is reduced over experts. The
logical X of an expert has all tokens of the micro-batch that are routed to the expert. The ranks of
the tp x cp group hold the tokens of a micro-batch, and the dispatcher exchanges tokens within an
etp x ep group:

- If the etp x ep group contains the tp x cp group, an expert has all of its tokens on one rank (or
  on the etp ranks that share the expert). If it is larger, an expert's tensor has tokens of several
  data-parallel ranks. The dispatcher joins them, and they remain one tensor.
- If the etp x ep group is a part of the tp x cp group, the tp x cp group has several replicas of
  the expert, and each gets a part of the tokens. Ranks with other experts run theirs at the same
  time, so one all-reduce over the tp x cp group serves all of them. Each rank writes its amax to
  the element of a vector that belongs to its ep rank.
- Other layouts are refused.

The two operands of a GEMM are reduced one after the other, even if their groups are equal (QK^T
and PV without context parallelism, fprop of a row-parallel layer). One reduction for both would
need both amaxes before the first operand is quantized. A GEMM transforms and quantizes one operand
at a time instead, so that it never holds the transformed copies of both.

All ranks of a group run the same GEMMs in the same order, so their collectives match. An expert
without tokens takes part with an amax of 0. A slot that is skipped, such as those of the gradient
of a frozen weight, is skipped on all ranks. Recomputation of activations repeats the reduction.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.collection.capture import over_context
from megatron.core import parallel_state
from megatron.fake_quant.operator_rules import is_direct
from megatron.fake_quant.operators import amax_of
from megatron.fake_quant.scalings.tensor_scale import local_amax

#: Name that `groups_of` returns for the replicas of an expert in a tp x cp group.
REPLICAS = "replicas"


@dataclass(frozen=True, slots=True)
class _Reduction:
    """All-reduce of a maximum; each expert has its own element of the vector that is reduced."""

    group: torch.distributed.ProcessGroup
    element: int = 0
    size: int = 1

    def __call__(self, amax: Tensor) -> Tensor:
        """Return the maximum of `amax` over the ranks that use the same element of the vector."""
        amaxes = amax.new_zeros(self.size)
        amaxes[self.element] = amax
        torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, self.group)
        return amaxes[self.element]


def groups_of(dims: str, *, cp_size: int, is_expert: bool) -> frozenset[str]:
    """Return the names of the groups that divide an operand with the given `dims`.

    Args:
        dims: letter and group of each dimension, as in the records of collected tensors.
        cp_size: number of context-parallel ranks.
        is_expert: True if the operand belongs to an expert, whose tokens have the letter `t`.
    """
    letters = over_context(dims, {"cp_size": cp_size}).split()
    groups = {letter.partition("[")[2].rstrip("]").partition(":")[0] for letter in letters} - {""}
    if "t" in letters:
        groups.add(REPLICAS if is_expert else "cp")
    return frozenset(groups)


def global_amax(x: Tensor, dims: str, *, is_expert: bool) -> Tensor:
    """Return the amax of the logical operand of which this rank multiplies the part `x`.

    All ranks that hold a part of the operand must call this function.
    """
    amax = amax_of(x) if is_direct(x) else local_amax(x)
    reduction = _reduction(dims, is_expert=is_expert)
    return amax if reduction is None else reduction(amax)


def _reduction(dims: str, *, is_expert: bool) -> _Reduction | None:
    """Return the reduction over an operand's groups; None if this rank has the whole operand."""
    if not parallel_state.model_parallel_is_initialized():
        return None
    cp_size = parallel_state.get_context_parallel_world_size()
    groups = groups_of(dims, cp_size=cp_size, is_expert=is_expert)
    reduction = None
    if REPLICAS in groups:
        reduction = _over_replicas()
        groups -= {REPLICAS}
    if reduction is None and groups:
        reduction = _Reduction(_GROUPS[groups]())
    return None if reduction is None or reduction.group.size() == 1 else reduction


#: Function that returns a process group, by the names of the parallel axes that divide an operand.
_GROUPS: Mapping[frozenset[str], Callable[[], torch.distributed.ProcessGroup]] = {
    frozenset({"tp"}): parallel_state.get_tensor_model_parallel_group,
    frozenset({"cp"}): parallel_state.get_context_parallel_group,
    frozenset({"tp", "cp"}): parallel_state.get_tensor_and_context_parallel_group,
    frozenset({"etp"}): parallel_state.get_expert_tensor_parallel_group,
}


def _over_replicas() -> _Reduction | None:
    """Return the reduction over an expert's replicas for a micro-batch; None for a single replica.

    The reduction includes the etp ranks that share the expert.

    Raises:
        ValueError: if the tokens of a micro-batch are exchanged with a part of another one.
    """
    sharing = parallel_state.get_tensor_and_context_parallel_group()
    exchanging = parallel_state.get_expert_tensor_and_model_parallel_group()
    of_batch, of_exchange = (
        set(torch.distributed.get_process_group_ranks(group)) for group in (sharing, exchanging)
    )
    if of_batch <= of_exchange:
        return None
    if not of_exchange < of_batch:
        raise ValueError(
            f"a format with :global is set for experts, but the ranks {sorted(of_exchange)} that "
            f"exchange tokens are neither a part of the ranks {sorted(of_batch)} that share a "
            "micro-batch nor all of them; choose --expert-tensor-parallel-size times "
            "--expert-model-parallel-size so that it divides tensor-parallel times context-"
            "parallel size or is a multiple of it, or choose the format without :global"
        )
    return _Reduction(
        sharing,
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
