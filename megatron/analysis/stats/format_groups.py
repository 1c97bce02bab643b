"""Group the requested formats, so that one count of the values serves a whole group.

Formats share a count if their blocks have the same size and get the same scale. All OCP formats
with blocks of 32 and the rule `floor` are such a group. For formats without blocks, the number of
occurrences of each bit pattern suffices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fake_quant.formats import Format
from megatron.fake_quant.mx import carry_from
from megatron.fake_quant.names import get_format

AXES = ("row", "column")


@dataclass(frozen=True, slots=True)
class Group:
    """Formats that assign the same class to every block; `kernels.scalar_quantizer` defines it."""

    size: int  #: values per block along its axis
    square: bool
    formats: tuple[Format, ...]

    @property
    def first(self) -> Format:
        """Return one format of the group, from which the class of a block is computed."""
        return self.formats[0]

    @property
    def emax(self) -> int:
        """Return the exponent of the largest element for which the classes are computed.

        The class of a block with an E8M0 scale is the scale's byte for an element of this exponent.
        A format whose element reaches n binades higher stores a byte that is lower by n. (From an
        exponent of 1 on, the bytes that are cut off at zero are the same ones.)
        """
        return _class_emax(self.first)

    @property
    def by_pairs(self) -> bool:
        """Return whether values are counted by pairs of a row's class and a column's class.

        A tensor has few different E8M0 scales. E4M3 scales take 127 values, which have too many
        pairs.
        """
        return not self.square and self.first.block_scale == "E8M0"


@dataclass(frozen=True, slots=True)
class FormatGroups:
    """Formats, arranged by the way in which they are computed."""

    plain: tuple[Format, ...]  #: formats without blocks
    groups: tuple[Group, ...]  #: formats with block scales
    sampled: tuple[Format, ...]  #: formats whose result does not follow from a value and its class

    @property
    def names(self) -> list[str]:
        """Return the names of all formats."""
        grouped = [fmt for group in self.groups for fmt in group.formats]
        return [fmt.name for fmt in (*self.plain, *grouped, *self.sampled)]


def axes_of(fmt: Format) -> tuple[str, ...]:
    """Return the axes along which a format is computed."""
    return ("all",) if fmt.block_size is None or fmt.square else AXES


def group_formats(names: Sequence[str]) -> FormatGroups:
    """Return the formats of these names in groups; a format named twice counts once.

    Raises:
        ValueError: if a format is unknown.
    """
    plain: list[Format] = []
    sampled: list[Format] = []
    groups: dict[tuple[object, ...], list[Format]] = {}
    for fmt in dict.fromkeys(get_format(name) for name in names):
        by_class = fmt.scaling is None or fmt.scaling.by_class
        if fmt.rounding != "nearest" or not by_class:
            sampled.append(fmt)
        elif fmt.block_size is None:
            plain.append(fmt)
        else:
            groups.setdefault((fmt.block_size, fmt.square, *_scale_key(fmt)), []).append(fmt)
    blocked = [Group(int(str(key[0])), bool(key[1]), tuple(of)) for key, of in groups.items()]
    return FormatGroups(tuple(plain), tuple(blocked), tuple(sampled))


def _scale_key(fmt: Format) -> tuple[object, ...]:
    """Return what the class of a block depends on besides its largest magnitude.

    `Group.emax` explains the second number.
    """
    if fmt.scale_rule is None:
        return (fmt.block_scale,)
    return (carry_from(fmt), _class_emax(fmt))


def _class_emax(fmt: Format) -> int:
    exponent = math.frexp(fmt.element.max)[1] - 1
    return min(exponent, 1)
