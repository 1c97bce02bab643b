"""Add context parallelism to the local attention: every rank gathers all keys and values.

The ranks of a context-parallel group share each sequence. Only attention combines tokens, and it
needs the keys and values of all tokens. In the wheel, only Transformer Engine's attention can get
them; the constructor of the local attention raises an error. Our attention gathers K and V over the
group before the matmuls, which the wheel's `cp_comm_type` calls `all_gather`. Each matmul is then
one GEMM over whole rows of keys, so blocks along the keys are the same as on a single rank. The
ring and all-to-all variants cut these rows, or need Transformer Engine, and are refused.

The backward pass sums the gradients of K and V over the ranks, each of which contributes the share
of its own queries. Each rank keeps its own part (a reduce-scatter, in the dtype of K and V).

Under a causal mask, later tokens attend to more keys. To balance the load, Megatron cuts a sequence
into 2 * cp chunks and gives rank r the chunks r and 2 * cp - 1 - r (a zigzag): see
`get_batch_on_this_cp_rank` and, for the rotary embedding, `get_pos_emb_on_this_cp_rank`. Gathered
keys and values are put back into the order of the sequence, and a mask is computed from the
positions of the queries in the sequence.

If a format has one scale per tensor (NVFP4, FP8), each rank computes the scale of its own queries,
unless the format's name ends with `:global`; see `low_precision/global_amax.py`.
Blocks along queries and, in linear layers, along tokens are formed from this rank's tokens. Both
differ from a run on one rank, except that blocks agree if their size divides a chunk's length.
Stochastic rounding draws separate random bits on each rank, even for the gathered keys and values.

The cost is memory for all keys and values, and for the scores of this rank's queries with all keys,
where a ring would keep only a part of them. With selective recomputation (`core_attn`) both exist
only while they are used, and keys and values are gathered again. Masked scores are computed, as in
the wheel's attention.
"""

import copy
from dataclasses import dataclass

import torch

from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.fake_quant.tiles.tiling import KeyMask

COMM_TYPE = "all_gather"  #: the only supported value of megatron-core's `cp_comm_type`


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return the indices of the two chunks, out of 2 * size per sequence, that a rank holds."""
    return rank, 2 * size - 1 - rank


def check_comm_type(cp_comm_type: str | None) -> None:
    """Raise ValueError for any communication type except `COMM_TYPE` and None.

    Raises:
        ValueError: if another communication type is requested.
    """
    if cp_comm_type not in (None, COMM_TYPE):
        raise ValueError(
            f"cp_comm_type is {cp_comm_type!r}, which is Transformer Engine's; the local attention "
            f"gathers keys and values: give {COMM_TYPE!r} (--cp-comm-type {COMM_TYPE}) or leave it "
            "out"
        )


def as_one_rank(config):
    """Return `config` with a context-parallel size of 1, as megatron-core's attention requires.

    The constructor uses the size only to check it.
    """
    if config.context_parallel_size == 1:
        return config
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    return alone


@dataclass(frozen=True)
class ContextParallelism:
    """The context-parallel group of one attention layer, and the settings of the layer's mask."""

    group: torch.distributed.ProcessGroup
    causal: bool  #: True if queries cannot see later keys when no mask is given
    #: numbers of keys that a query sees before and after itself; None without a sliding window
    window_size: tuple[int, int] | None

    @classmethod
    def of(cls, attention, cp_comm_type: str | None) -> "ContextParallelism | None":
        """Return the context parallelism of a `DotProductAttention`, or None if it is not used.

        Raises:
            ValueError: if another communication type is requested, or if the group does not have
                the configured size.
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
        """Return the sequence positions of the `length` tokens that this rank holds."""
        size = self.group.size()
        if length % 2:
            raise ValueError(
                f"this rank has {length} tokens of each sequence, but context parallelism gives "
                f"every rank two chunks of equal size; make the sequence a multiple of {2 * size}"
            )
        half = torch.arange(length // 2, device=device)
        return torch.cat([half + chunk * half.numel() for chunk in self._chunks()])

    def _chunks(self) -> tuple[int, int]:
        return chunks_of(self.group.rank(), self.group.size())

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather all ranks' parts [s / cp, ...] into [s, ...], in the order of the sequence.

        The backward pass sums the gradients of all ranks.
        """
        size = self.group.size()
        by_rank = gather_from_sequence_parallel_region(part, group=self.group).chunk(2 * size)
        held = [chunk for rank in range(size) for chunk in chunks_of(rank, size)]
        return torch.cat([by_rank[held.index(chunk)] for chunk in range(2 * size)])

    def mask(
        self, queries: int, attention_mask: torch.Tensor | None, device: torch.device
    ) -> KeyMask:
        """Return the mask of the keys that are hidden from the queries of this rank.

        The keys are in the order of the sequence. A given mask has one row per query of this rank,
        as returned by `get_batch_on_this_cp_rank`. A sliding window takes precedence over a given
        mask, as in the wheel.

        Raises:
            ValueError: if the given mask has another shape.
        """
        positions, keys = self.positions(queries, device), queries * self.group.size()
        if self.window_size is not None:
            return KeyMask(positions, tuple(self.window_size))
        if attention_mask is None:
            return KeyMask(positions if self.causal else None)
        if attention_mask.shape[-2] not in (1, queries) or attention_mask.shape[-1] != keys:
            raise ValueError(
                f"the attention mask has the shape {list(attention_mask.shape)}, but this rank has "
                f"{queries} queries for {keys} keys; cut it with get_batch_on_this_cp_rank, or "
                "leave it out: a causal mask is made here"
            )
        return KeyMask(given=attention_mask)

    def whole(self, query, key, value, attention_mask):
        """Return the gathered key and value, and the `KeyMask` of this rank's queries.

        `query` has the shape [s / cp, b, heads, d].

        Raises:
            ValueError: if keys and queries have different numbers of tokens, if this number is odd,
                or if the given mask has another shape.
        """
        if not query.shape[0] == key.shape[0] == value.shape[0]:
            raise ValueError(
                f"context-parallel attention got {query.shape[0]} queries for {key.shape[0]} keys; "
                "it needs whole sequences, with the keys and queries of the same tokens"
            )
        mask = self.mask(query.shape[0], attention_mask, query.device)
        return self.gather(key), self.gather(value), mask
