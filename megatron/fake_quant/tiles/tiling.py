"""Describe, as data, how attention is computed in tiles, as in flash-attention kernels.

A tile is a range of consecutive keys, together with all queries. `attention.py` computes one
tile after the other, so that no matrix of all queries and all keys exists, and defines the
operations and their order. `checks.py` refuses formats whose blocks a tile would cut.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Order = Literal["forward", "reverse"]
RowSum = Literal["exact", "quantized"]

TILE = 128  #: default number of keys per tile
LARGEST_TILE = 1 << 20
SCALES = (1 / (1 << 32), float(1 << 32))  #: smallest and largest factor of P
#: largest number of query-key pairs of a head for which attention forms whole matrices unless a
#: recipe requests tiles: 64 MiB in float32, as for 4096 queries and keys
WHOLE_PAIRS = 1 << 24
CAUSAL = (1 << 40, 0)  #: window of causal attention: all keys before a query, none after it
_TEXT = re.compile(
    r"tiles of (?P<tile>\d{1,7}) keys(?P<order>, reverse)?(?:, P x (?P<scale>[\d.e+-]{1,30}))?"
    r"(?P<row_sum>, row sum quantized)?"
)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Size and order of the tiles of keys, and the rounding of P in them.

    Raises:
        ValueError: if a value is not accepted; the message lists the accepted values.
    """

    tile: int = TILE  #: number of keys per tile; the last tile may be shorter
    #: "forward" to begin with the first keys; "reverse" to begin with the last ones
    order: Order = "forward"
    #: factor S by which the unnormalized P is multiplied before it is quantized, and by which the
    #: result is divided; None for no factor
    scale: float | None = None
    #: how to compute the row sums of P by which the output is divided: "exact" sums P before
    #: quantization, "quantized" sums the quantized P, which multiplies V
    row_sum: RowSum = "exact"

    def __post_init__(self) -> None:
        if isinstance(self.tile, bool) or not isinstance(self.tile, int):
            raise ValueError(f"a tile of {self.tile!r} keys; give a number of keys, such as {TILE}")
        if not 1 <= self.tile <= LARGEST_TILE:
            raise ValueError(
                f"a tile of {self.tile} keys; choose a number from 1 to {LARGEST_TILE}, such as "
                f"{TILE}"
            )
        for name, choices in (("order", get_args(Order)), ("row_sum", get_args(RowSum))):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"the {name} of tiles {getattr(self, name)!r}; choose {' or '.join(choices)}"
                )
        number = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if self.scale is not None and not (number and SCALES[0] <= self.scale <= SCALES[1]):
            raise ValueError(
                f"the scale of P {self.scale!r} is out of range; choose a number from 2^-32 to "
                "2^32, such as 256"
            )

    def spans(self, keys: int) -> Iterator[tuple[int, slice]]:
        """Yield the number (counted from the first key) and the keys of each tile, in `order`."""
        numbers = range(-(-keys // self.tile))
        for number in reversed(numbers) if self.order == "reverse" else numbers:
            start = number * self.tile
            yield number, slice(start, min(start + self.tile, keys))

    def __str__(self) -> str:
        """Return the text from which `parse` reads these settings."""
        text = f"tiles of {self.tile} keys"
        text += ", reverse" if self.order == "reverse" else ""
        text += "" if self.scale is None else f", P x {self.scale!r}".removesuffix(".0")
        return text + (", row sum quantized" if self.row_sum == "quantized" else "")

    @classmethod
    def parse(cls, text: str) -> "Tiling | None":
        """Return the settings that `text` describes, or None if it describes something else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        return cls(
            int(match["tile"]),
            "reverse" if match["order"] else "forward",
            float(match["scale"]) if match["scale"] else None,
            "quantized" if match["row_sum"] else "exact",
        )


@dataclass(frozen=True, slots=True, eq=False)
class KeyMask:
    """Rule that states which keys are hidden from a query, and that gives the mask of each tile.

    A given mask takes precedence over the positions.
    """

    #: position of each query in the sequence of the keys, as an int64 tensor; None if positions do
    #: not hide keys
    positions: Tensor | None = None
    window: tuple[int, int] = CAUSAL  #: numbers of visible keys before and after a query
    #: True where a key is hidden, `[batch or 1, heads or 1, queries or 1, keys]`
    given: Tensor | None = None
    first: int | None = None  #: position of the first query if all are consecutive; None if unknown

    @classmethod
    def consecutive(
        cls,
        queries: int,
        device: torch.device,
        *,
        first: int = 0,
        window: tuple[int, int] = CAUSAL,
    ) -> "KeyMask":
        """Return the mask of queries at consecutive positions.

        Args:
            queries: number of queries.
            device: device of the queries.
            first: position of the first query.
            window: numbers of visible keys before and after a query.
        """
        positions = torch.arange(first, first + queries, device=device)
        return cls(positions, window, first=first)

    def seeing(self, keys: slice, queries: int, count: int) -> slice:
        """Return the queries that may see any key of a tile; all queries if this is unknown.

        Args:
            keys: keys of the tile.
            queries: number of queries.
            count: number of keys of all tiles.
        """
        first, (before, after) = self.first, self.window
        if first is None or first < 0 or first + queries > count or before < 0 or after < 0:
            return slice(0, queries)  # a query without any visible key attends to all keys alike
        start = min(max(keys.start - after - first, 0), queries)
        return slice(start, min(max(keys.stop + before - first, start), queries))

    def hidden(self, keys: slice, queries: slice | None = None) -> Tensor | None:
        """Return the mask of a tile, `[..., queries or 1, keys]`, or None if it hides no key."""
        if self.given is not None:
            part = self.given[..., keys]
            return part if queries is None or part.shape[-2] == 1 else part[..., queries, :]
        if self.positions is None:
            return None
        positions = self.positions if queries is None else self.positions[queries]
        index = torch.arange(keys.start, keys.stop, device=positions.device)
        ahead = index - positions[:, None]
        before, after = self.window
        hidden = ahead > after
        return hidden if before == CAUSAL[0] else hidden | (ahead < -before)


ALL_VISIBLE = KeyMask()  #: no hidden key
