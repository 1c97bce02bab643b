"""The formats that were asked for, arranged by what has to be counted for them.

Formats whose blocks are of one size and get the same scale share one count: all of OCP's formats
with blocks of 32 and the rule `floor` do. Formats without blocks are found from the patterns alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fake_quant.formats import (
    BlockScaling,
    ElementFormat,
    Format,
    GroupScaling,
    TwoLevelScaling,
)
from megatron.fake_quant.mx import CARRY_FROM
from megatron.fake_quant.names import get_format

AXES = ("row", "column")


@dataclass(frozen=True, slots=True)
class Group:
    """Formats that give every block the same class."""

    size: int
    square: bool
    formats: tuple[Format, ...]

    @property
    def first(self) -> Format:
        """Any of them, to find a block's class by."""
        return self.formats[0]

    @property
    def emax(self) -> int:
        """Classes of E8M0 scales are the bytes of an element whose largest number has this
        exponent; the byte of a format is lower by as much as its element's is higher. (From 1 on
        the bytes that are cut off at zero are the same ones.)
        """
        element = self.first.element
        return min(element.emax, 1) if isinstance(element, ElementFormat) else 0

    @property
    def by_pairs(self) -> bool:
        """Whether the classes along row and column are counted together. E8M0 scales are few; an
        E4M3 scale takes one of 127 values, and their pairs would be too many.
        """
        return not self.square and isinstance(self.first.scaling, BlockScaling)


@dataclass(frozen=True, slots=True)
class FormatGroups:
    """Formats by the way that they are computed."""

    plain: tuple[Format, ...]  #: without blocks
    groups: tuple[Group, ...]  #: with block scales
    sampled: tuple[Format, ...]  #: whose result does not follow from a value and its class

    @property
    def names(self) -> list[str]:
        """Of all formats."""
        grouped = [fmt for group in self.groups for fmt in group.formats]
        return [fmt.name for fmt in (*self.plain, *grouped, *self.sampled)]


def axes_of(fmt: Format) -> tuple[str, ...]:
    """Along what a format is computed."""
    return ("all",) if fmt.block_size is None or fmt.square else AXES


def make_plan(names: Sequence[str]) -> FormatGroups:
    """The plan for formats by name; a format named twice, by whatever name, counts once.

    Raises:
        ValueError: an unknown format.
    """
    plain: list[Format] = []
    sampled: list[Format] = []
    groups: dict[tuple[object, ...], list[Format]] = {}
    for fmt in dict.fromkeys(get_format(name) for name in names):
        if fmt.rounding != "nearest" or isinstance(fmt.scaling, GroupScaling):
            sampled.append(fmt)
        elif fmt.block_size is None:
            plain.append(fmt)
        else:
            groups.setdefault((fmt.block_size, fmt.square, *_scale_key(fmt)), []).append(fmt)
    made = [Group(int(str(key[0])), bool(key[1]), tuple(of)) for key, of in groups.items()]
    return FormatGroups(tuple(plain), tuple(made), tuple(sampled))


def _scale_key(fmt: Format) -> tuple[object, ...]:
    """What decides on the class of a block, besides its largest magnitude; see `Group.emax`."""
    if isinstance(fmt.scaling, TwoLevelScaling):
        return ("two-level",)
    assert isinstance(fmt.scaling, BlockScaling)
    assert isinstance(fmt.element, ElementFormat)
    return (CARRY_FROM[fmt.scaling.rule](fmt.element), min(fmt.element.emax, 1))
