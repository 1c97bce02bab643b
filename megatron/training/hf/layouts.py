"""How a tensor of ours is put together from Hugging Face's tensors, for any number of ranks.

A layout lists strips: runs of rows (or columns) of one or several tensors, in the order in which
all tensor-parallel ranks together hold them. A rank holds the part of that list which falls into
its own share. The same pieces say what a rank reads and, when a checkpoint is written, where what
it holds belongs.
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
    """Rows (or columns) of a tensor of theirs."""

    source: Source
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """A strip's part that lies on one rank."""

    source: Source
    dim: int  #: 0: rows, 1: columns
    start: int  #: in theirs
    stop: int
    at: int  #: where it starts in the rank's own tensor


@dataclass(frozen=True)
class Layout:
    """A tensor of ours."""

    sources: tuple[Source, ...]
    strips: Callable[[int], list[Strip]]  #: by the number of ranks
    dim: int = 0  #: along which the strips run
    split: bool = True  #: each rank has its share; else every rank has all
    padded: bool = False  #: the ranks may hold more than the strips fill, at the end

    def pieces(self, *, rank: int, ranks: int, length: int) -> list[Piece]:
        """What one rank holds.

        length: the extent of its own tensor along `dim`.
        """
        if not self.split:
            rank, ranks = 0, 1
        begin, end = rank * length, (rank + 1) * length
        found, position = [], 0
        for strip in self.strips(ranks):
            extent = strip.stop - strip.start
            first, last = max(begin, position), min(end, position + extent)
            if first < last:
                shift = strip.start - position
                piece = Piece(strip.source, self.dim, first + shift, last + shift, first - begin)
                found.append(piece)
            position += extent
        assert position == length * ranks or (self.padded and position < length * ranks), (
            f"{self.sources}: {position} in theirs, {length} x {ranks} in ours"
        )
        return found


def whole(source: Source) -> Layout:
    """Every rank has all of it: norms and the router."""
    return Layout((source,), lambda _: [Strip(source, 0, source.shape[0])], split=False)


def rows(*sources: Source) -> Layout:
    """Each rank has an equal share of the rows of each: gate and up, one behind the other."""

    def strips(ranks: int) -> list[Strip]:
        return [
            Strip(s, rank * (s.shape[0] // ranks), (rank + 1) * (s.shape[0] // ranks))
            for rank in range(ranks)
            for s in sources
        ]

    return Layout(sources, strips)


def columns(source: Source) -> Layout:
    """Each rank has an equal share of the columns: projections back to the hidden size."""
    return Layout((source,), lambda _: [Strip(source, 0, source.shape[1])], dim=1)


def vocabulary(source: Source) -> Layout:
    """Rows of tokens; the last ranks' padding has no counterpart."""
    return Layout((source,), lambda _: [Strip(source, 0, source.shape[0])], padded=True)


def query_groups(*sources: Source, groups: int) -> Layout:
    """Queries, keys and values, one behind the other in each query group."""

    def strips(_: int) -> list[Strip]:
        return [
            Strip(s, group * (s.shape[0] // groups), (group + 1) * (s.shape[0] // groups))
            for group in range(groups)
            for s in sources
        ]

    return Layout(sources, strips)
