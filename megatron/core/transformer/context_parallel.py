"""Context parallelism of the local attention: every rank gathers all keys and values.

The ranks of a context-parallel group share each sequence. Everything but attention looks at one
token at a time; attention needs the keys and values of all of them, and in the wheel only
Transformer Engine's has a way to get them: the local one refuses to be built. Ours gathers K and V
over the group before the matmuls, the `all_gather` of the wheel's `cp_comm_type`. Each matmul is
then one GEMM over whole rows of keys, so that blocks along the keys are those of a single rank; the
ring and all-to-all variants cut those rows, or need Transformer Engine, and are refused.

The backward pass sums the gradients of K and V over the ranks, each of which has the share of its
own queries, and leaves to each its own part (a reduce-scatter, in the dtype of K and V).

With a causal mask later tokens have more keys to look at. For an equal load Megatron cuts a
sequence into 2 * cp chunks and gives rank r the chunks r and 2 * cp - 1 - r (a zigzag): see
`get_batch_on_this_cp_rank` and, for the rotary embedding, `get_pos_emb_on_this_cp_rank`. Gathered
keys and values are put back into the order of the sequence, and a mask goes by the positions that
the queries have there.

Of a format whose scale spans a tensor (NVFP4, FP8), the scale of a rank's queries is that of its
own; blocks along queries and, in linear layers, along tokens are formed of this rank's tokens. Both
differ from one rank's, the latter unless a block divides a chunk. Stochastic rounding draws on each
rank for itself, also for the keys and values that all of them have.

What it costs: all keys and values, and a row of scores over all keys for each query of this rank,
where a ring keeps a part; with selective recomputation (`core_attn`) both live only while they are
used, and are gathered again. No work is saved on what the mask hides, as in the wheel's attention.
"""

import copy
from dataclasses import dataclass

import torch

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType

COMM_TYPE = "all_gather"  #: of the wheel's `cp_comm_type`, the one that is done here


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """The two chunks, of 2 * size, of each sequence that a context-parallel rank has."""
    return rank, 2 * size - 1 - rank


def check_comm_type(cp_comm_type: str | None) -> None:
    """Refuse a way of communication that was asked for and is not this one.

    Raises:
        ValueError: see above; None is accepted.
    """
    if cp_comm_type not in (None, COMM_TYPE):
        raise ValueError(
            f"cp_comm_type is {cp_comm_type!r}, which is Transformer Engine's; the local attention "
            f"gathers keys and values: give {COMM_TYPE!r} (--cp-comm-type {COMM_TYPE}) or leave it "
            "out"
        )


def as_one_rank(config):
    """`config` for the wheel's constructor, which does nothing with the size but refuse it."""
    if config.context_parallel_size == 1:
        return config
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    return alone


@dataclass(frozen=True)
class ContextParallelism:
    """What one attention layer needs to know of its context-parallel group."""

    group: torch.distributed.ProcessGroup
    causal: bool  #: hide later keys where no mask is given
    window_size: tuple[int, int] | None  #: keys before and after a query that it sees; else all

    @classmethod
    def of(cls, attention, cp_comm_type: str | None) -> "ContextParallelism | None":
        """That of a `DotProductAttention` that is otherwise built; None without such parallelism.

        Raises:
            ValueError: another way of communication, or a group that is not the configured one.
        """
        group = getattr(attention.pg_collection, "cp", None)
        if group is None:
            group = parallel_state.get_context_parallel_group(check_initialized=False)
        size, wanted = 1 if group is None else group.size(), attention.config.context_parallel_size
        if size != wanted:
            raise ValueError(
                f"context_parallel_size is {wanted} in the configuration, but the context-parallel "
                f"group has {size} rank(s); initialize megatron.core.parallel_state with the same "
                "context_parallel_size"
            )
        if size == 1:
            return None
        check_comm_type(cp_comm_type)
        softmax = attention.scale_mask_softmax
        causal = softmax.attn_mask_type == AttnMaskType.causal
        return cls(group, causal=causal, window_size=softmax.window_size)

    def positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Where this rank's `length` tokens stand in the sequence."""
        size = self.group.size()
        if length % 2:
            raise ValueError(
                f"this rank has {length} tokens of each sequence, but context parallelism gives "
                f"every rank two chunks of one size; make the sequence a multiple of {2 * size}"
            )
        half = torch.arange(length // 2, device=device)
        return torch.cat([half + chunk * half.numel() for chunk in self._chunks()])

    def _chunks(self) -> tuple[int, int]:
        return chunks_of(self.group.rank(), self.group.size())

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[s / cp, ...] of each rank to [s, ...] in order of the sequence; the gradients of all
        ranks are summed.
        """
        size = self.group.size()
        by_rank = gather_from_sequence_parallel_region(part, group=self.group).chunk(2 * size)
        held = [chunk for rank in range(size) for chunk in chunks_of(rank, size)]
        return torch.cat([by_rank[held.index(chunk)] for chunk in range(2 * size)])

    def mask(
        self, queries: int, attention_mask: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        """True where a query of this rank must not see a key, with the keys in sequence order.

        A mask that is given has a row for each query of this rank, as `get_batch_on_this_cp_rank`
        cuts it. Against a sliding window it does not count, as in the wheel.

        Raises:
            ValueError: it has another shape.
        """
        position, keys = self.positions(queries, device), queries * self.group.size()
        ahead = torch.arange(keys, device=device) - position[:, None]
        if self.window_size is not None:
            before, after = self.window_size
            return (ahead < -before) | (ahead > after)
        if attention_mask is None:
            return ahead > 0 if self.causal else None
        if attention_mask.shape[-2] not in (1, queries) or attention_mask.shape[-1] != keys:
            raise ValueError(
                f"the attention mask has the shape {list(attention_mask.shape)}, but this rank has "
                f"{queries} queries for {keys} keys; cut it with get_batch_on_this_cp_rank, or "
                "leave it out: a causal mask is made here"
            )
        return attention_mask

    def whole(self, query, key, value, attention_mask):
        """Key, value and mask for this rank's `query`, [s / cp, b, heads, d].

        Raises:
            ValueError: keys for other tokens than the queries', or see `mask` and `positions`.
        """
        if not query.shape[0] == key.shape[0] == value.shape[0]:
            raise ValueError(
                f"context-parallel attention got {query.shape[0]} queries for {key.shape[0]} keys; "
                "it is for training on whole sequences: keys and queries of the same tokens"
            )
        mask = self.mask(query.shape[0], attention_mask, query.device)
        return self.gather(key), self.gather(value), mask
