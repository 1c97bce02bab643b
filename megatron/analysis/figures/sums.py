"""Adds up the histograms of a dump's tensors: one reading, memory by places and not by tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.stats import FormatArrays, TensorArrays
from megatron.analysis.stats.result import Counts, Numbers

Key = tuple[int, str, str]  #: layer, place, and format or quantization type


@dataclass(frozen=True)
class FormatSum:
    """The arrays of `FormatArrays`, added up over tensors."""

    values: Counts
    underflow: Counts
    saturated: Counts
    squared_error: Numbers
    error: Numbers
    relative_error: Numbers
    codes: Counts
    scales: Counts
    block_range: Counts
    headroom: Counts

    @classmethod
    def of(cls, arrays: FormatArrays) -> FormatSum:
        """Of one tensor."""
        return cls(**{field.name: getattr(arrays, field.name) for field in fields(cls)})

    def __add__(self, other: FormatSum) -> FormatSum:
        joined: dict[str, Any] = {
            field.name: _longer(getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        }
        return FormatSum(**joined)


@dataclass(frozen=True)
class Sums:
    """Histograms of groups of tensors."""

    formats: dict[Key, FormatSum]  #: by layer, place and format
    binades: dict[Key, Counts]  #: [255] values by magnitude, by layer, place and quantization type
    patterns: dict[str, Counts]  #: [65536] values by bfloat16 pattern, by place

    def binades_of(self, places: set[str], quant_type: str | None = None) -> Counts:
        """Of the given places, of one quantization type or all, all layers together."""
        total = np.zeros(255, dtype=np.int64)
        for (_, place, name), counts in self.binades.items():
            if place in places and quant_type in (None, name):
                total += counts
        return total


def add_up(
    tensors: pd.DataFrame,
    arrays: Callable[[int], TensorArrays],
    axes: Mapping[tuple[int, str], str],
    bar: Callable[[Sequence[Any], str], Iterable[Any]] = lambda rows, _: rows,
) -> Sums:
    """Read each tensor's histograms once.

    Args:
        tensors: with `tensor`, `layer_idx`, `place`, `quant_type`.
        arrays: histograms of a tensor.
        axes: of a tensor and format, along which its blocks are taken.
        bar: goes through rows and shows how far it is.
    """
    sums = Sums({}, {}, {})
    rows = tensors[["tensor", "layer_idx", "place", "quant_type"]].itertuples(index=False)
    for row in bar(list(rows), "Adding up"):
        found = arrays(row.tensor)
        where = (int(row.layer_idx), row.place)
        _add(sums.binades, (*where, row.quant_type), found.positive + found.negative)
        _add(sums.patterns, row.place, found.patterns)
        for (name, axis), part in found.formats.items():
            if axes.get((row.tensor, name)) == axis:
                key, one = (*where, name), FormatSum.of(part)
                sums.formats[key] = sums.formats[key] + one if key in sums.formats else one
    return sums


def _add(into: dict, key: object, counts: Counts) -> None:  # type: ignore[type-arg]
    if key in into:
        into[key] = into[key] + counts
    else:
        into[key] = counts.copy()


def _longer(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """The sum; what is shorter has zeros at its end."""
    if len(a) < len(b):
        a, b = b, a
    total: NDArray[Any] = a.copy()
    total[: len(b)] += b
    return total
