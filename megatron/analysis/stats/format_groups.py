"""Group the requested formats, so that values are counted only once for each group.

Formats share a count if their blocks have the same size and their scales are the same up to a
constant factor. For example, all OCP formats with blocks of 32 and the scale rule `floor` form a
group. Formats without blocks need only the number of occurrences of each bit pattern.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fake_quant.formats import Format
from megatron.fake_quant.names import get_format
from megatron.fake_quant.scalings.mx import carry_from

AXES = ("row", "column")


@dataclass(frozen=True, slots=True)
class Group:
    """Group of formats whose block scales are the same up to a constant factor."""

    size: int  #: number of values per block, along the axis of the block
    square: bool
    formats: tuple[Format, ...]

    @property
    def first(self) -> Format:
        """First format of the group. It represents the others when block scales are computed."""
        return self.formats[0]

    @property
    def emax(self) -> int:
        """Common exponent for which the scale classes of all formats in the group are computed.

        The scale class of a block with an E8M0 scale is the scale byte of an element type whose
        largest value has this exponent. A format whose element type reaches n binades higher stores
        a byte that is lower by n. (A byte that is clipped to zero for exponent 1 is also clipped to
        zero for every higher exponent.)
        """
        return _class_emax(self.first)

    @property
    def by_pairs(self) -> bool:
        """True if values are counted by the scales of both their row block and their column block.

        A tensor has only a few different E8M0 scales. E4M3 scales have 127 possible values, which
        form too many pairs.
        """
        return not self.square and self.first.block_scale == "E8M0"


@dataclass(frozen=True, slots=True)
class FormatGroups:
    """Formats, grouped by the method with which their errors are computed."""

    plain: tuple[Format, ...]  #: formats without block scales
    groups: tuple[Group, ...]  #: groups of formats with block scales
    #: formats that are measured value by value; see `direct.py`
    sampled: tuple[Format, ...]

    @property
    def names(self) -> list[str]:
        """Names of all formats."""
        grouped = [fmt for group in self.groups for fmt in group.formats]
        return [fmt.name for fmt in (*self.plain, *grouped, *self.sampled)]


def axes_of(fmt: Format) -> tuple[str, ...]:
    """Return the axes along which a format is measured: "row" and "column", or only "all"."""
    return ("all",) if fmt.block_size is None or fmt.square else AXES


def group_formats(names: Sequence[str]) -> FormatGroups:
    """Group the formats with these names; a format that is listed twice counts once.

    If a run computes a format's scale from the amaxes of other tensors, the scale is computed here
    from the amax of the measured tensor.

    Raises:
        ValueError: if a format is unknown.
    """
    plain: list[Format] = []
    sampled: list[Format] = []
    groups: dict[tuple[object, ...], list[Format]] = {}
    for fmt in dict.fromkeys(get_format(name).with_own_amax() for name in names):
        if fmt.rounding != "nearest" or not fmt.by_class:
            sampled.append(fmt)
        elif fmt.block_size is None:
            plain.append(fmt)
        else:
            groups.setdefault((fmt.block_size, fmt.square, *_scale_key(fmt)), []).append(fmt)
    blocked = [Group(int(str(key[0])), bool(key[1]), tuple(of)) for key, of in groups.items()]
    return FormatGroups(tuple(plain), tuple(blocked), tuple(sampled))


def _scale_key(fmt: Format) -> tuple[object, ...]:
    """Return the format properties that, together with a block's amax, determine its scale class.

    `Group.emax` explains the exponent, which is the second property of some formats.
    """
    if fmt.scale_rule is None:
        return (fmt.scaling, fmt.element)
    return (carry_from(fmt), _class_emax(fmt))


def _class_emax(fmt: Format) -> int:
    exponent = math.frexp(fmt.element.max)[1] - 1
    return min(exponent, 1)
