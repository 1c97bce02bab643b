"""Sum the histograms of a dump's tensors.

The histograms of each tensor are read once. Memory use grows with the number of layers and places
(a place is a module and tensor name), but not with the number of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.stats import FormatArrays, TensorArrays
from megatron.analysis.stats.result import Counts, Numbers
from megatron.fake_quant import get_format
from megatron.fake_quant.code_points import code_values
from megatron.fake_quant.inspect import format_properties

#: Key of a sum: layer index, place (module and tensor name), and format or quantization type.
Key = tuple[int, str, str]


@dataclass(frozen=True)
class FormatSum:
    """Histograms of one format (see `FormatArrays`), summed over several tensors."""

    values: Counts
    underflow: Counts
    saturated: Counts
    overflow: Counts
    squared_error: Numbers
    clipping_error: Numbers
    underflow_error: Numbers
    grid_error: Numbers
    error: Numbers
    relative_error: Numbers
    codes: Counts
    scales: Counts
    block_range: Counts
    headroom: Counts

    @classmethod
    def of(cls, arrays: FormatArrays) -> FormatSum:
        """Return a `FormatSum` that contains only the histograms of one tensor."""
        return cls(**{field.name: getattr(arrays, field.name) for field in fields(cls)})

    def __add__(self, other: FormatSum) -> FormatSum:
        joined: dict[str, Any] = {
            field.name: _longer(getattr(self, field.name), getattr(other, field.name))
            for field in fields(self)
        }
        return FormatSum(**joined)


@dataclass(frozen=True)
class Sums:
    """Histograms, each summed over tensors with the same place (module and tensor name)."""

    formats: dict[Key, FormatSum]  #: sums by layer, place and format
    #: number of values in each of 255 binades, by layer, place and quantization type
    binades: dict[Key, Counts]
    patterns: dict[str, Counts]  #: number of values with each bfloat16 bit pattern, by place

    def binades_of(self, places: set[str], quant_type: str | None = None) -> Counts:
        """Return the number of values per binade, summed over all layers of the given places.

        Args:
            places: places (module and tensor names) to include.
            quant_type: quantization type to include; None includes all types.
        """
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
    """Return the sums of the tensors' histograms within the groups that `Sums` describes.

    Args:
        tensors: table with the columns `tensor`, `layer_idx`, `place` and `quant_type`.
        arrays: function that returns the histograms of the tensor with the given index.
        axes: for each tensor and format, the block axis whose histograms are added; histograms of
            the other axis are ignored.
        bar: function that takes the rows and a title, and returns the rows with a progress bar.
    """
    sums = Sums({}, {}, {})
    rows = tensors[["tensor", "layer_idx", "place", "quant_type"]].itertuples(index=False)
    for row in bar(list(rows), "Adding up"):
        histograms = arrays(row.tensor)
        where = (int(row.layer_idx), row.place)
        _add(sums.binades, (*where, row.quant_type), histograms.positive + histograms.negative)
        _add(sums.patterns, row.place, histograms.patterns)
        for (name, axis), part in histograms.formats.items():
            if axes.get((row.tensor, name)) == axis:
                key, term = (*where, name), FormatSum.of(part)
                sums.formats[key] = sums.formats[key] + term if key in sums.formats else term
    return sums


def code_usage(fmt: str, total: FormatSum) -> pd.DataFrame:
    """Return the number of occurrences of each code of `fmt` that rounding can produce.

    The table is for `plot_code_usage`. Codes are sorted by the values that they represent, with -0
    before 0. Codes for NaN and infinity are left out.
    """
    element = get_format(fmt).element
    values = code_values(element).numpy().astype(np.float64)
    usable = np.isfinite(values)
    usable[format_properties.never_produced(element).numpy()] = False
    codes = np.flatnonzero(usable)
    negative_zero = (values[codes] == 0) & np.signbit(values[codes])
    order = codes[np.lexsort((~negative_zero, values[codes]))]
    return pd.DataFrame({"format": fmt, "value": values[order], "count": total.codes[order]})


def _add(sums: dict, key: object, counts: Counts) -> None:  # type: ignore[type-arg]
    if key in sums:
        sums[key] = sums[key] + counts
    else:
        sums[key] = counts.copy()


def _longer(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of two 1-D arrays; the shorter array is padded with zeros at the end."""
    if len(a) < len(b):
        a, b = b, a
    total: NDArray[Any] = a.copy()
    total[: len(b)] += b
    return total
