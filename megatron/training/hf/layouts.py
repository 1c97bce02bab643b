"""Describe how model tensors are assembled from source tensors, for any number of ranks.

A layout lists strips: ranges of rows (or columns) of one or several source tensors, in the order in
which the tensor-parallel ranks hold them. Each rank holds the pieces of these strips that fall into
its shard. The same pieces determine what a rank reads from a checkpoint, and where its weights go
when a checkpoint is written.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Strip:
    """A range of rows (or columns) of a source tensor."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """The part of a strip that one rank holds."""

    source: Source
    dim: int  #: 0: rows, 1: columns
    start: int  #: in the source tensor
    stop: int  #: in the source tensor
    offset: int  #: start in the rank's shard


@dataclass(frozen=True)
class Layout:
    """The sources of a model tensor and their order."""

    sources: tuple[Source, ...]
    strips: Callable[[int], list[Strip]]  #: function from the number of ranks to the strips
    dim: int = 0  #: dimension along which the strips are concatenated
    split: bool = True  #: True: each rank has a shard; False: every rank has the whole tensor
    padded: bool = False  #: True if the last ranks may hold padding after the strips

    def pieces(self, *, rank: int, ranks: int, length: int) -> list[Piece]:
        """Return the pieces that one rank holds.

        Args:
            rank: the rank's number among the ranks that share the tensor.
            ranks: the number of those ranks.
            length: size of the rank's shard along `dim`.
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
    """Return the layout of a tensor that every rank holds entirely: a norm or the router."""
    return Layout((source,), lambda _: [Strip(source, 0, source.shape[0])], split=False)


def rows(*sources: Source) -> Layout:
    """Return a layout that gives each rank an equal share of each source's rows, concatenated.

    The gate and up projections of an MLP form one model tensor in this way.
    """

    def strips(ranks: int) -> list[Strip]:
        return [
            Strip(s, rank * (s.shape[0] // ranks), (rank + 1) * (s.shape[0] // ranks))
            for rank in range(ranks)
            for s in sources
        ]

    return Layout(sources, strips)


def columns(source: Source) -> Layout:
    """Return a layout that gives each rank an equal share of the columns.

    It belongs to projections back to the hidden size.
    """
    return Layout((source,), lambda _: [Strip(source, 0, source.shape[1])], dim=1)


def vocabulary(source: Source) -> Layout:
    """Return the layout of one row per token; the source has no padding, the last ranks may."""
    return Layout((source,), lambda _: [Strip(source, 0, source.shape[0])], padded=True)


def query_groups(*sources: Source, groups: int) -> Layout:
    """Return a layout that concatenates queries, keys and values within each query group."""

    def strips(_: int) -> list[Strip]:
        return [
            Strip(s, group * (s.shape[0] // groups), (group + 1) * (s.shape[0] // groups))
            for group in range(groups)
            for s in sources
        ]

    return Layout(sources, strips)
