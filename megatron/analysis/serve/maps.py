"""Compute the map: a statistic by layer and tensor, or by layer and iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.analysis.figures.figure_data import layer_name
from megatron.analysis.serve.address import BY_ITERATION, Address
from megatron.analysis.serve.catalog import Catalog
from megatron.analysis.serve.contents import NotShownError
from megatron.analysis.serve.statistics import BY_NAME, Numbers, Statistic

NO_TENSOR = -1
MOST_CELLS = 1 << 20  #: maximum number of cells; layers of a damaged index may have any numbers


@dataclass(frozen=True)
class Map:
    """Values of a map's cells, and the tensor that a click on each cell opens."""

    rows: list[str]
    columns: list[str]
    values: NDArray[np.float64]  #: median of each cell; NaN if none of its tensors is measured
    tensors: NDArray[np.int64]  #: worst tensor of each cell, or the first if none is measured
    counts: NDArray[np.int64]  #: number of tensors of each cell
    statistic: Statistic
    chosen: NDArray[np.int64]  #: all tensors of the map
    measured: NDArray[np.float64]  #: statistic of each tensor in `chosen`; NaN if it has none
    waiting: int = 0  #: number of tensors in `chosen` that have not been measured yet
    not_finite: int = 0  #: number of measured tensors in `chosen` with NaN or Inf

    @property
    def without(self) -> int:
        """Number of tensors that have no value, although they are not waiting to be measured."""
        return int(np.isnan(self.measured).sum()) - self.waiting


def build(catalog: Catalog, numbers: Numbers, address: Address) -> Map:
    """Return the map of an address whose defaults are filled in."""
    statistic = BY_NAME[address.statistic]
    chosen = chosen_tensors(catalog, address)
    axis = catalog.axis_in(address.gemm)[chosen]
    rows = numbers.rows_of(catalog.ids[chosen], catalog.stamps[chosen])
    measured = numbers.column(statistic, rows, address.format, axis)
    missing = numbers.missing(rows, [address.format] if statistic.of_format else [])
    missing &= ~numbers.failed(catalog.ids[chosen], catalog.stamps[chosen])
    special = sum(numbers.column(BY_NAME[name], rows, "", axis) > 0 for name in ("nan", "inf"))
    layers, row_of = np.unique(catalog.layer[chosen], return_inverse=True)
    if address.by == BY_ITERATION:
        shown, column_of = np.unique(catalog.iteration[chosen], return_inverse=True)
        columns = [str(number) for number in shown]
    else:
        shown, column_of = np.unique(catalog.place[chosen], return_inverse=True)
        order = sorted(
            range(len(shown)),
            key=lambda i: (catalog.place_kinds[shown[i]] == "gradient", shown[i]),
        )
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        column_of = position[column_of.reshape(-1)]
        columns = [catalog.places[shown[i]] for i in order]
    size = len(layers), len(columns)
    check_size(*size)
    cell = row_of.reshape(-1) * size[1] + column_of.reshape(-1)
    values, tensors, counts = _cells(cell, measured, chosen, size[0] * size[1], statistic)
    return Map(
        [layer_name(int(layer)) for layer in layers],
        columns,
        values.reshape(size),
        tensors.reshape(size),
        counts.reshape(size),
        statistic,
        chosen,
        measured,
        int((missing & np.isnan(measured)).sum()),
        int(np.count_nonzero(special)),
    )


def check_size(rows: int, columns: int) -> None:
    """Raise NotShownError if a map has too many cells."""
    if rows * columns > MOST_CELLS:
        raise NotShownError(
            f"the map would have {rows:,} x {columns:,} cells; at most {MOST_CELLS:,} are shown"
        )


def chosen_tensors(catalog: Catalog, address: Address) -> NDArray[np.int64]:
    """Return the tensors that the map of an address shows."""
    codes = {run["id"]: run["code"] for run in catalog.runs}
    mask = catalog.run == codes.get(address.run, -1)
    if address.by == BY_ITERATION:
        place = catalog.places.index(address.place) if address.place in catalog.places else -1
        mask &= catalog.place == place
    else:
        mask &= catalog.iteration == address.iteration
        if address.show != "all":
            mask &= catalog.operand
    if address.gemm:
        mask &= catalog.axis_in(address.gemm) >= 0
    return np.flatnonzero(mask)


def _cells(
    cell: NDArray[np.int64],
    measured: NDArray[np.float64],
    chosen: NDArray[np.int64],
    size: int,
    statistic: Statistic,
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Return each cell's median of the statistic, worst tensor and number of tensors."""
    counts = np.bincount(cell, minlength=size)
    medians = np.full(size, np.nan)
    tensors = np.full(size, NO_TENSOR, np.int64)
    tensors[cell[::-1]] = chosen[::-1]  # the first tensor of each cell
    known = np.flatnonzero(~np.isnan(measured))
    if len(known):
        order = known[np.lexsort((measured[known], cell[known]))]
        cells, first, sizes = np.unique(cell[order], return_index=True, return_counts=True)
        low, high = first + (sizes - 1) // 2, first + sizes // 2
        with np.errstate(invalid="ignore"):
            middle = (measured[order[low]] + measured[order[high]]) / 2
        medians[cells] = np.where(np.isnan(middle), measured[order[low]], middle)
        last = first + sizes - 1
        if statistic.worst == "low":
            worst = first
        elif statistic.worst == "high":
            worst = last
        else:
            ends = np.abs(measured[order[first]]) > np.abs(measured[order[last]])
            worst = np.where(ends, first, last)
        tensors[cells] = chosen[order[worst]]
    return medians, tensors, counts


def by_badness(statistic: Statistic, measured: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the positions of the measured tensors, the worst first."""
    known = np.flatnonzero(~np.isnan(measured))
    values = measured[known]
    if statistic.worst == "far":
        values = -np.abs(values)
    elif statistic.worst == "high":
        values = -values
    return known[np.argsort(values, kind="stable")]
