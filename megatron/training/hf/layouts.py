"""Map tensors of a Hugging Face checkpoint to the model's tensors, for any number of ranks.

A model tensor is a parameter of megatron-core's model; a source tensor is a tensor of a Hugging
Face checkpoint. A `Layout` lists strips: ranges of rows (or columns) of one or several source
tensors, in the order in which the tensor-parallel ranks hold them. Each rank holds the pieces of
these strips that fall into its shard. The pieces determine what a rank reads from a checkpoint, and
where its weights go when a checkpoint is written.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Name and shape of a tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Strip:
    """A range of rows (or columns) of a tensor of a Hugging Face checkpoint."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """The part of a `Strip` (a range of rows or columns) that one rank holds."""

    source: Source
    dim: int  #: dimension along which the tensor is divided: 0 for rows, 1 for columns
    start: int  #: index in the source tensor at which this part starts
    stop: int  #: index in the source tensor at which this part ends, exclusive
    offset: int  #: index in the rank's shard at which this part starts


@dataclass(frozen=True)
class Layout:
    """The rule by which a model tensor is built from checkpoint tensors and divided among ranks."""

    sources: tuple[Source, ...]
    #: function that takes the number of ranks, and returns the strips (ranges of rows or columns)
    #: of which the model tensor consists
    strips: Callable[[int], list[Strip]]
    dim: int = 0  #: dimension along which the strips are concatenated
    split: bool = True  #: True if each rank has a shard; if not, every rank has the whole tensor
    padded: bool = False  #: True if the shards of the last ranks may end with padding

    def pieces(self, *, rank: int, ranks: int, length: int) -> list[Piece]:
        """Return the parts of checkpoint tensors that form one rank's shard of the model tensor.

        Args:
            rank: index of the rank in the group of ranks that share the tensor.
            ranks: number of ranks in this group.
            length: size of each rank's shard along `dim`.
        """
        if not self.split:
            rank, ranks = 0, 1
        begin, end = rank * length, (rank + 1) * length
        pieces, position = [], 0
        for strip in self.strips(ranks):
            extent = strip.stop - strip.start
            first, last = max(begin, position), min(end, position + extent)
            if first < last:
                shift = strip.start - position
                piece = Piece(strip.source, self.dim, first + shift, last + shift, first - begin)
                pieces.append(piece)
            position += extent
        assert position == length * ranks or (self.padded and position < length * ranks), (
            f"{self.sources}: {position} in the sources, {length} x {ranks} in the model"
        )
        return pieces


def whole(source: Source) -> Layout:
    """Return the `Layout` of a tensor that every rank holds entirely, such as a norm's weight."""
    return Layout((source,), lambda _: [Strip(source, 0, source.shape[0])], split=False)


def rows(*sources: Source) -> Layout:
    """Return a `Layout` in which each rank holds an equal share of the rows of every source.

    A rank's shares are concatenated. The gate and up projections of an MLP form one model tensor in
    this way.
    """

    def strips(ranks: int) -> list[Strip]:
        return [
            Strip(s, rank * (s.shape[0] // ranks), (rank + 1) * (s.shape[0] // ranks))
            for rank in range(ranks)
            for s in sources
        ]

    return Layout(sources, strips)


def columns(source: Source) -> Layout:
    """Return a `Layout` in which each rank holds an equal share of the columns of the source.

    Projections back to the hidden size are divided in this way.
    """
    return Layout((source,), lambda _: [Strip(source, 0, source.shape[1])], dim=1)


def vocabulary(source: Source) -> Layout:
    """Return the `Layout` of a tensor with one row per token, such as the embedding.

    The source has no padding rows, but the shards of the last ranks may have some.
    """
    return Layout((source,), lambda _: [Strip(source, 0, source.shape[0])], padded=True)


def query_groups(*sources: Source, groups: int) -> Layout:
    """Return a `Layout` in which the query, key and value rows of a query group are adjacent."""

    def strips(_: int) -> list[Strip]:
        return [
            Strip(s, group * (s.shape[0] // groups), (group + 1) * (s.shape[0] // groups))
            for group in range(groups)
            for s in sources
        ]

    return Layout(sources, strips)
