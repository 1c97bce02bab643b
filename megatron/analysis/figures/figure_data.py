"""Provide the data of all figures of a dump.

The data are the statistics as tables with short names, and the summed histograms of the tensors.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from megatron.analysis.dump.run_endings import alarm
from megatron.analysis.figures.deviations import deviations
from megatron.analysis.figures.sheet import headline
from megatron.analysis.figures.sums import FormatSum, Sums, add_up
from megatron.analysis.judged import JUDGED, OPERANDS
from megatron.analysis.plots.text import brief
from megatron.analysis.progress import with_progress
from megatron.analysis.stats import Statistics
from megatron.analysis.stats.matrix_view import is_operand
from megatron.analysis.store import TensorStore
from megatron.fake_quant import get_format

KINDS = {"forward": "Activations", "weight": "Weights", "gradient": "Gradients"}
#: GEMMs in order of precedence: if several GEMMs read an operand, the figures show its quantization
#: for the first of them.
USES = ("fprop", "dgrad", "wgrad")
_LAYER = re.compile(r"^(.*\blayers\.\d+\.)")
_EXPERT = re.compile(r"\b(experts\.)?local_experts\.\d+\b")
#: Parts of a module's name that carry no information and are removed from its short name.
_NOISE = ("self_attention.", "mlp.", "linear_")

Make = Callable[[], Figure | str]  #: function that draws a figure or returns the text of a file


class NothingToDrawError(Exception):
    """Error raised if the dump lacks the data that a figure needs; the message names the data."""


@dataclass(eq=False)
class FigureData:
    """Data of a dump in the form that the figures use.

    Throughout the figures, a "place" is a module's short name followed by a tensor name, such as
    `qkv input`. It stands for the tensors with these names in all layers.
    """

    store: TensorStore
    statistics: Statistics
    formats: tuple[str, ...]
    progress: bool = False  #: True to report the progress of reading many tensors
    judge: str = OPERANDS  #: group of tensors on which formats are evaluated, one of `JUDGED`

    @functools.cached_property
    def tensors(self) -> pd.DataFrame:
        """Table `Statistics.tensors` with additional columns, and with missing fields filled in.

        The new columns are `tensor` (the index), `part` (the module's short name), `place` (part
        and tensor name), `kind` (one of `KINDS`) and `operand` (whether a matmul reads the tensor).
        """
        table = self.statistics.tensors.copy()
        table["tensor"] = table.index
        modules = table["module"].fillna(table["layer_type"]).fillna("").astype(str)
        table["part"] = modules.map(short_module)
        table["tensor_name"] = table["tensor_name"].fillna("tensor").astype(str)
        table["place"] = (table["part"] + " " + table["tensor_name"]).str.strip()
        table["kind"] = [
            kind_of(name, operation)
            for name, operation in zip(table["tensor_name"], table["operation"], strict=True)
        ]
        table["operand"] = [*map(is_operand, table["layer_type"], table["tensor_name"])]
        table["quant_type"] = table["quant_type"].fillna("unknown").astype(str)
        for name, unknown in (("layer_idx", -1), ("iteration", 0), ("micro_batch", 0)):
            table[name] = table[name].fillna(unknown).astype(int)
        return table

    @functools.cached_property
    def uses(self) -> pd.DataFrame:
        """Table of quantization errors, with one row per tensor and format.

        The table also has the columns of `tensors`.

        Blocks run along the reduction axis of the first GEMM in `USES` that reads the tensor. If no
        GEMM reads the tensor, they run along its last dimension.
        """
        table = self.statistics.formats.copy()
        # Convert categorical columns to text; otherwise, they are sorted in category order.
        for name in ("quantized_format", "axis", "used_by"):
            table[name] = table[name].astype(object).fillna("").astype(str)
        if table.empty:
            return table.join(self.tensors.drop(columns=["tensor"]).head(0), on="tensor")
        rank = table["used_by"].map(_first_use) + (table["axis"] == "column") * 0.5
        order = table.assign(rank=rank).sort_values(["tensor", "rank"], kind="stable")
        first = order.drop_duplicates(["tensor", "quantized_format"]).drop(columns=["rank"])
        beside = [name for name in self.tensors.columns if name not in first.columns]
        joined = first.join(self.tensors[beside], on="tensor")
        wanted = {name: place for place, name in enumerate(self.formats)}
        joined = joined.assign(at=joined["quantized_format"].map(wanted))
        return joined.sort_values(["at", "tensor"], kind="stable").drop(columns=["at"])

    @functools.cached_property
    def judged(self) -> pd.DataFrame:
        """Rows of `uses` for the tensors on which formats are evaluated, as set by `judge`."""
        operands = self.uses["operand"].astype(bool)
        return self.uses[operands if self.judge == OPERANDS else ~operands]

    def kinds(self, table: pd.DataFrame) -> list[str]:
        """Return the kinds of the tensors in `table`, in the order of `KINDS`.

        Args:
            table: rows of `tensors` or `uses`.

        Raises:
            NothingToDrawError: the table has no rows.
        """
        kinds = [kind for kind in KINDS if (table["kind"] == kind).any()]
        if not kinds:
            raise NothingToDrawError(
                self.nothing_judged if "quantized_format" in table else "no tensor could be read"
            )
        return kinds

    @property
    def nothing_judged(self) -> str:
        """Message that explains why no format can be evaluated."""
        if self.uses.empty:
            return "no tensor has values that a format could be applied to"
        other = next(name for name in JUDGED if name != self.judge)
        return f"the dump has no {self.judge} of matmuls; --judge {other} draws its {other}"

    @functools.cached_property
    def sums(self) -> Sums:
        """Histograms of all tensors, summed over the groups that `Sums` describes."""
        if self.tensors.empty:
            return Sums({}, {}, {})
        axes = self.uses.set_index(["tensor", "quantized_format"])["axis"].to_dict()
        return add_up(self.tensors, self.statistics.arrays, axes, self._bar)

    @functools.cached_property
    def deviations(self) -> pd.DataFrame:
        """Deviations of tensors from the unquantized run; computing a row loads two tensors."""
        return deviations(self.tensors, self.load, self._bar)

    def _bar(self, rows: Sequence[Any], what: str) -> Iterable[Any]:
        """Return the rows as an iterable that reports its progress, labeled `what`."""
        return with_progress(rows, what, "tensor", shown=self.progress)

    @functools.cached_property
    def _records(self) -> pd.DataFrame:
        """Table of the records in `store`, indexed by the path of the tensor file."""
        records = self.store.records
        return records.set_index(records["path"].map(str), drop=False)

    def load(self, tensor: int) -> Tensor:
        """Return the tensor with the given index in `tensors`, assembled from its shards.

        Raises:
            UnreadableTensorError: a file is corrupt.
            ValueError: a shard is missing, or the shards are inconsistent.
        """
        row = self.statistics.tensors.loc[tensor]
        record = self._records.loc[str(row["path"])]
        if row["shards"] == 1:
            return self.store.load(record)
        return self.store.load_global(record, dp=int(row["data_rank"]))

    @property
    def places(self) -> list[str]:
        """All places (module and tensor names), with activations and weights before gradients."""
        order = {"forward": 0, "weight": 0, "gradient": 1}
        table = self.tensors.assign(order=self.tensors["kind"].map(order))
        return list(dict.fromkeys(table.sort_values("order", kind="stable")["place"]))

    def places_of(self, *kinds: str) -> list[str]:
        """Return the places (module and tensor names) of the tensors of the given `kinds`."""
        chosen = set(self.tensors.loc[self.tensors["kind"].isin(kinds), "place"])
        return [place for place in self.places if place in chosen]

    def judged_places(self, *kinds: str) -> list[str]:
        """Return the places (module and tensor names) on which formats are evaluated.

        If any `kinds` of tensors are given, only their places are returned.
        """
        table = self.judged[self.judged["kind"].isin(kinds)] if kinds else self.judged
        chosen = set(table["place"])
        return [place for place in self.places if place in chosen]

    @property
    def places_apart(self) -> list[str]:
        """All places (module and tensor names), with operands of matmuls before results."""
        return sorted(self.places, key=lambda place: place not in self._operand_places)

    def label(self, place: str) -> str:
        """Return the name of a place, followed by `(result)` if no matmul reads the tensor."""
        return place if place in self._operand_places else f"{place} (result)"

    @functools.cached_property
    def _operand_places(self) -> set[str]:
        return set(self.tensors.loc[self.tensors["operand"], "place"])

    def summed(self, fmt: str, places: Iterable[str] | None = None) -> FormatSum | None:
        """Return the histograms of one format, summed over layers and places (module, tensor name).

        Only places on which formats are evaluated are included. The result is None if there are no
        histograms.

        Args:
            fmt: name of the format.
            places: places to include; None includes all.
        """
        judged = self.judged_places()
        wanted = set(judged) if places is None else {*judged} & {*places}
        parts = [
            part
            for (_, place, name), part in self.sums.formats.items()
            if name == fmt and place in wanted
        ]
        return sum(parts[1:], start=parts[0]) if parts else None

    def with_blocks(self) -> list[str]:
        """Return the formats that store one scale byte per block."""
        return [name for name in self.formats if get_format(name).scale_bytes == 1]

    @property
    def origin(self) -> str:
        """Phrase that gives the number of tensors and iterations, and the quantization types."""
        return self._origin(self.tensors, "tensors")

    @property
    def judged_origin(self) -> str:
        """Phrase that describes the tensors on which formats are evaluated; see `origin`."""
        return self.origin_of(self.judged)

    def origin_of(self, rows: pd.DataFrame) -> str:
        """Return a phrase like `judged_origin` for some of the rows of `judged`."""
        chosen = self.tensors.loc[rows["tensor"].unique()]
        return self._origin(chosen, f"{self.judge} of matmuls")

    def _origin(self, table: pd.DataFrame, what: str) -> str:
        types = list(dict.fromkeys(table["quant_type"]))
        iterations = table["iteration"].nunique()
        named = ", ".join(map(brief, types[:5])) + (" and others" if len(types) > 5 else "")
        plural = "" if iterations == 1 else "s"
        return f"{len(table):,} {what} of {named}, {iterations} iteration{plural}"

    @functools.cached_property
    def alarm(self) -> str:
        """One-line warning about unfinished runs, or an empty string if there are none."""
        return alarm(self.store)

    def headline(self, figure: Figure, title: str, note: str = "") -> None:
        """Write the title of a figure, a note below it, and a warning about unfinished runs."""
        headline(figure, title, note, self.alarm)


def short_module(name: str) -> str:
    """Return a module's short name: `qkv` for `decoder.layers.3.self_attention.linear_qkv`.

    All experts of a layer have the same short name.
    """
    rest = _EXPERT.sub("experts", _LAYER.sub("", name))
    for word in _NOISE:
        rest = rest.replace(word, "")
    return rest.replace("core_attention", "core")


def kind_of(tensor_name: str, operation: str | None) -> str:
    """Return the kind of a tensor: `forward` (an activation), `weight` or `gradient`."""
    if tensor_name == "weight":
        return "weight"
    backward = operation == "backward" or tensor_name.startswith("grad_")
    return "gradient" if backward else "forward"


def _first_use(used_by: str) -> int:
    """Return the index in `USES` of the first GEMM that reads an operand.

    The result is `len(USES)` if `used_by` contains none of these GEMMs.
    """
    return min((place for place, name in enumerate(USES) if name in used_by), default=len(USES))


def trimmed(counts: NDArray[np.int64], tail: float = 1e-4) -> slice:
    """Return a slice from the first to the last occupied binade, without the smallest values.

    Args:
        counts: number of values in each of the 255 binades.
        tail: maximum share of the values, the smallest in magnitude, to leave out.
    """
    present = np.flatnonzero(counts)
    if not len(present):
        return slice(120, 128)
    below = np.cumsum(counts)
    first = int(np.searchsorted(below, tail * below[-1]))
    return slice(min(first, int(present[-1])), int(present[-1]) + 1)


def medians(table: pd.DataFrame, group: str, x: str, column: str) -> pd.DataFrame:
    """Return a table for `plot_lines` with the median of `column` for each group and x value.

    The groups are in the order of their first appearance in the table.

    Args:
        group: name of the column with the groups.
        x: name of the column with the x values.
        column: name of the column whose median is computed.
    """
    data = table.groupby([group, x], sort=False)[column].median().reset_index()
    order = {name: place for place, name in enumerate(dict.fromkeys(table[group]))}
    data = data.assign(at=data[group].map(order)).sort_values(["at", x])
    return data.rename(columns={group: "group", x: "x", column: "value"})[["group", "x", "value"]]


def median_of(table: pd.DataFrame, keys: Sequence[str], what: str) -> str:
    """Return a phrase such as "a cell is the median of 4 to 8 tensors".

    Args:
        keys: columns that identify a cell, dot or point.
        what: word for a cell, dot or point in the phrase.
    """
    sizes = table.groupby(list(keys)).size()
    if sizes.empty or sizes.max() == 1:
        return f"a {what} is one tensor"
    low, high = int(sizes.min()), int(sizes.max())
    count = f"{high:,}" if low == high else f"{low:,} to {high:,}"
    return f"a {what} is the median of {count} tensors"


def layer_name(layer: int) -> str:
    """Return the label of a layer, such as `L3`, or `?` for an unknown layer (-1)."""
    return f"L{layer}" if layer >= 0 else "?"


def file_name(fmt: str) -> str:
    """Return a format's name for use in file names, with colons replaced by hyphens."""
    return fmt.replace(":", "-")
