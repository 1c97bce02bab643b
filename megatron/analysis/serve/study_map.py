"""Compute the map of the SQNR of the matmuls' results, from the table of a study.

A study measures only the requested runs, iterations and formats. The map shows the results of its
own run, iteration and format; a message replaces the map if one of them was not studied. The other
candidates of a study, recipes and simulated accumulators, are left out.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.figures.figure_data import layer_name, short_module
from megatron.analysis.serve import maps
from megatron.analysis.serve.address import BY_ITERATION, BY_TENSOR, Address
from megatron.analysis.serve.catalog import Catalog
from megatron.analysis.serve.maps import Map
from megatron.analysis.serve.statistics import OUTPUT_SQNR

_MOST_NAMED = 12  #: maximum number of iterations or formats in a message


def study_map(catalog: Catalog, study: pd.DataFrame | None, address: Address) -> Map:
    """Return the map of an address; it has no rows if nothing was studied.

    Its columns are the GEMMs of one iteration, or the iterations of one module.
    """
    own = _chosen(study, address)
    if own.empty:
        none = np.zeros((0, 0))
        numbers = np.zeros((0, 0), np.int64)
        chosen = np.zeros(0, np.int64)
        return Map([], [], none, numbers, numbers, OUTPUT_SQNR, chosen, np.zeros(0))
    own = own.assign(column=_columns(own, address))
    maps.check_size(own["layer_idx"].nunique(), own["column"].nunique())
    groups = own.groupby(["layer_idx", "column"], sort=False)["sqnr_db"]
    # the median of inf and -inf is NaN; use the worse of the two instead
    cells = groups.median().fillna(groups.min()).unstack().sort_index()
    if address.by == BY_ITERATION:
        cells = cells.sort_index(axis=1)
    counts = groups.count().unstack().reindex(index=cells.index, columns=cells.columns)
    tensors, chosen = _tensors(catalog, address, cells)
    return Map(
        [layer_name(int(layer)) for layer in cells.index],
        [str(name) for name in cells.columns],
        cells.to_numpy(float),
        tensors,
        counts.fillna(0).to_numpy(np.int64),
        OUTPUT_SQNR,
        chosen,
        own["sqnr_db"].to_numpy(float),
        not_finite=int((own["nonfinite"] > 0).sum()),
    )


def _chosen(study: pd.DataFrame | None, address: Address) -> pd.DataFrame:
    """Return the results that the map of an address shows.

    A result with NaN or Inf has an SQNR of -inf, so that it counts as worse than any other.
    """
    if study is None:
        return pd.DataFrame()
    own = _of_formats(study)
    own = own[(own["run_id"] == address.run) & (own["format"] == address.format)]
    if address.gemm:
        own = own[own["gemm"] == address.gemm]
    if address.by == BY_TENSOR:
        own = own[own["iteration"] == address.iteration]
    else:
        own = own[own["module"].map(short_module) == module_of(address)]
    return own.assign(sqnr_db=own["sqnr_db"].mask(own["nonfinite"] > 0, -np.inf))


def _of_formats(study: pd.DataFrame) -> pd.DataFrame:
    """Return the results of formats alone: without a recipe or a simulated accumulator."""
    return study[(study["recipe"] == "") & (study["accumulator"] == "")]


def module_of(address: Address) -> str:
    """Return the short name of the module to which the tensor of an address belongs."""
    return address.place.rpartition(" ")[0]


def _columns(own: pd.DataFrame, address: Address) -> pd.Series:
    if address.by == BY_ITERATION:
        return own["iteration"].astype(int)
    operation = own["operation"].where(own["operation"] != "linear", "")
    names = own["module"].map(short_module) + " " + operation + " " + own["gemm"]
    return names.str.split().str.join(" ")


def _tensors(
    catalog: Catalog, address: Address, cells: pd.DataFrame
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return an operand of the module of each cell, and all operands of the map's iterations."""
    tensors = np.full(cells.shape, maps.NO_TENSOR, np.int64)
    by_iteration = address.by == BY_ITERATION
    iterations = [int(name) for name in cells.columns] if by_iteration else [address.iteration]
    found = []
    for iteration in iterations:
        plain = address.but(by=BY_TENSOR, show="", gemm="", iteration=iteration)
        base = maps.chosen_tensors(catalog, plain)
        found.append(base)
        parts = [catalog.places[p].rpartition(" ")[0] for p in catalog.place[base]]
        first: dict[tuple[int, str], int] = {}
        for tensor, layer, part in zip(base, catalog.layer[base], parts, strict=True):
            first.setdefault((int(layer), part), int(tensor))
        for j, name in enumerate(cells.columns):
            if by_iteration and int(name) != iteration:
                continue
            part = module_of(address) if by_iteration else name.split()[0]
            for i, layer in enumerate(cells.index):
                tensors[i, j] = first.get((int(layer), part), maps.NO_TENSOR)
    return tensors, np.concatenate(found)


def not_studied(study: pd.DataFrame | None, address: Address) -> str:
    """Return why the map of an address is empty."""
    if study is None:
        return "There is no table of a study."
    own = _of_formats(study)
    own = own[own["run_id"] == address.run]
    if own.empty:
        return "This run was not studied."
    if address.by == BY_TENSOR:
        others = own["iteration"]
        own = own[own["iteration"] == address.iteration]
        if own.empty:
            names = _named(others.astype(int))
            return f"Iteration {address.iteration} of this run was not studied; studied: {names}."
    elif own[own["module"].map(short_module) == module_of(address)].empty:
        return f"The matmuls of {module_of(address)} were not studied in this run."
    if not (own["format"] == address.format).any():
        names = _named(own["format"])
        return f"{address.format} was not studied in this run; studied: {names}."
    return f"The GEMM {address.gemm} was not studied here." if address.gemm else "Not studied."


def _named(values: pd.Series) -> str:
    names = [str(name) for name in sorted(values.unique())]
    more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
    return ", ".join([*names[:_MOST_NAMED], *more])
