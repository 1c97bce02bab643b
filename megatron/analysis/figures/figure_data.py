"""What the figures of a dump are made from: the tables of its statistics with short names beside
them, and the histograms of its tensors added up.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from megatron.analysis.dump.run_endings import alarm
from megatron.analysis.figures.deviations import deviations
from megatron.analysis.figures.sums import FormatSum, Sums, add_up
from megatron.analysis.outputs.names import JUDGED, OPERANDS
from megatron.analysis.plots.style import ALARM, FAINT
from megatron.analysis.stats import Statistics
from megatron.analysis.stats.matrix_view import is_operand
from megatron.analysis.store import TensorStore
from megatron.fake_quant import get_format
from megatron.fake_quant.formats import BlockScaling, TwoLevelScaling

KINDS = {"forward": "Activations", "weight": "Weights", "gradient": "Gradients"}
#: GEMMs in the order in which one of them stands for an operand that several quantize.
USES = ("fprop", "dgrad", "wgrad")
LETTERS = 15  #: characters of a note per inch
_LAYER = re.compile(r"^(.*\blayers\.\d+\.)")
_EXPERT = re.compile(r"\blocal_experts\.\d+\b")
_NOISE = ("self_attention.", "mlp.", "linear_")


Make = Callable[[], Figure | str]  #: draws a figure or writes a text when it is called


class NothingToDrawError(Exception):
    """What a figure needs and the dump does not have, in words."""


@dataclass(eq=False)
class FigureData:
    """A dump with its statistics, as the figures take it."""

    store: TensorStore
    found: Statistics
    formats: tuple[str, ...]
    progress: bool = False  #: show a bar on a terminal where many tensors are read
    judge: str = OPERANDS  #: the tensors by which formats are judged, one of `JUDGED`

    @functools.cached_property
    def tensors(self) -> pd.DataFrame:
        """`Statistics.tensors`, in order of layers, with `place` and `kind` beside it."""
        table = self.found.tensors.copy()
        table["tensor"] = table.index
        modules = table["module"].fillna(table["layer_type"]).fillna("").astype(str)
        table["part"] = modules.map(short_module)
        table["tensor_name"] = table["tensor_name"].fillna("tensor").astype(str)
        table["place"] = (table["part"] + " " + table["tensor_name"]).str.strip()
        table["kind"] = [
            kind_of(*each) for each in zip(table["tensor_name"], table["operation"], strict=True)
        ]
        table["operand"] = [*map(is_operand, table["layer_type"], table["tensor_name"])]
        table["quant_type"] = table["quant_type"].fillna("unknown").astype(str)
        for name, unknown in (("layer_idx", -1), ("iteration", 0), ("micro_batch", 0)):
            table[name] = table[name].fillna(unknown).astype(int)
        return table

    @functools.cached_property
    def uses(self) -> pd.DataFrame:
        """A row a tensor and format, the tensor's columns beside it: blocks run as in the GEMM that
        comes first in `USES`, else along the last dimension.
        """
        table = self.found.formats.copy()
        for name in ("quantized_format", "axis", "used_by"):  # categories would sort by themselves
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
        """Rows of `uses` by which formats are judged: operands or results, see `judge`."""
        operands = self.uses["operand"].astype(bool)
        return self.uses[operands if self.judge == OPERANDS else ~operands]

    def kinds(self, table: pd.DataFrame) -> list[str]:
        """Those of `KINDS` that some row of `tensors` or `uses` is of.

        Raises:
            NothingToDrawError: there is no row.
        """
        found = [kind for kind in KINDS if (table["kind"] == kind).any()]
        if not found:
            raise NothingToDrawError(
                self.nothing_judged if "quantized_format" in table else "no tensor could be read"
            )
        return found

    @property
    def nothing_judged(self) -> str:
        """The reason why no format can be judged."""
        if self.uses.empty:
            return "no tensor has values that a format could be applied to"
        other = next(name for name in JUDGED if name != self.judge)
        return f"the dump has no {self.judge} of matmuls; --judge {other} draws its {other}"

    @functools.cached_property
    def sums(self) -> Sums:
        """Histograms of all tensors, added up by layer, place and format; read once."""
        if self.tensors.empty:
            return Sums({}, {}, {})
        axes = self.uses.set_index(["tensor", "quantized_format"])["axis"].to_dict()
        return add_up(self.tensors, self.found.arrays, axes, self._bar)

    @functools.cached_property
    def deviations(self) -> pd.DataFrame:
        """See `deviations.deviations`; two tensors are loaded for each row."""
        return deviations(self.tensors, self.load, self._bar)

    def _bar(self, rows: Sequence[Any], what: str) -> Iterable[Any]:
        """The rows, one after the other, under a bar."""
        hidden = None if self.progress else True  # None: hidden where there is no terminal
        bar: Iterable[Any] = tqdm(rows, desc=what, unit="tensor", disable=hidden, leave=False)
        return bar

    @functools.cached_property
    def _records(self) -> pd.DataFrame:
        """The store's table by path."""
        records = self.store.records
        return records.set_index(records["path"].map(str), drop=False)

    def load(self, tensor: int) -> Tensor:
        """The logical tensor of a row of `tensors`.

        Raises:
            UnreadableTensorError: a file is corrupt.
            ValueError: its shards do not make a whole.
        """
        row = self.found.tensors.loc[tensor]
        record = self._records.loc[str(row["path"])]
        if row["shards"] == 1:
            return self.store.load(record)
        return self.store.load_global(record, dp=int(row["data_rank"]))

    @property
    def places(self) -> list[str]:
        """Places in the order in which a forward, then a backward pass comes to them."""
        order = {"forward": 0, "weight": 0, "gradient": 1}
        table = self.tensors.assign(order=self.tensors["kind"].map(order))
        return list(dict.fromkeys(table.sort_values("order", kind="stable")["place"]))

    def places_of(self, *kinds: str) -> list[str]:
        """The places of one kind: forward, weight, gradient."""
        mine = set(self.tensors.loc[self.tensors["kind"].isin(kinds), "place"])
        return [place for place in self.places if place in mine]

    def judged_places(self, *kinds: str) -> list[str]:
        """Return the places by which formats are judged; of the given kinds, or of all kinds."""
        chosen = self.judged[self.judged["kind"].isin(kinds)] if kinds else self.judged
        mine = set(chosen["place"])
        return [place for place in self.places if place in mine]

    @property
    def places_apart(self) -> list[str]:
        """All places, those of operands first and those of results second."""
        return sorted(self.places, key=lambda place: place not in self._operand_places)

    def label(self, place: str) -> str:
        """Return the name of a place, with the suffix `(result)` if no matmul reads its tensors."""
        return place if place in self._operand_places else f"{place} (result)"

    @functools.cached_property
    def _operand_places(self) -> set[str]:
        return set(self.tensors.loc[self.tensors["operand"], "place"])

    def summed(self, fmt: str, places: Iterable[str] | None = None) -> FormatSum | None:
        """Return the histograms of one format, summed over layers and the given places.

        Only places by which formats are judged count.
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
        """The formats that have a scale for each block."""
        kinds = (BlockScaling, TwoLevelScaling)
        return [name for name in self.formats if isinstance(get_format(name).scaling, kinds)]

    @property
    def origin(self) -> str:
        """A phrase with the number of tensors, their types and iterations."""
        return self._origin(self.tensors, "tensors")

    @property
    def judged_origin(self) -> str:
        """The same phrase for the tensors by which formats are judged."""
        chosen = self.tensors.loc[self.judged["tensor"].unique()]
        return self._origin(chosen, f"{self.judge} of matmuls")

    def _origin(self, table: pd.DataFrame, what: str) -> str:
        runs = list(dict.fromkeys(table["quant_type"]))
        iterations = table["iteration"].nunique()
        named = ", ".join(runs[:5]) + (" and others" if len(runs) > 5 else "")
        plural = "" if iterations == 1 else "s"
        return f"{len(table):,} {what} of {named}, {iterations} iteration{plural}"

    @functools.cached_property
    def alarm(self) -> str:
        """One line about runs that did not finish; empty if all did."""
        return alarm(self.store)

    def headline(self, figure: Figure, title: str, note: str = "") -> None:
        """Write the title of a figure, the note below it, and a warning on unfinished runs."""
        headline(figure, title, note, self.alarm)


def short_module(name: str) -> str:
    """`decoder.layers.3.self_attention.linear_qkv` as `qkv`; all experts alike."""
    rest = _EXPERT.sub("experts", _LAYER.sub("", name))
    for word in _NOISE:
        rest = rest.replace(word, "")
    return rest.replace("core_attention", "core")


def kind_of(tensor_name: str, operation: str | None) -> str:
    """forward (activations), weight or gradient."""
    if tensor_name == "weight":
        return "weight"
    backward = operation == "backward" or tensor_name.startswith("grad_")
    return "gradient" if backward else "forward"


def _first_use(used_by: str) -> int:
    """Place of the first of an operand's GEMMs; behind them a tensor that no GEMM quantizes."""
    return min((place for place, name in enumerate(USES) if name in used_by), default=len(USES))


def trimmed(counts: NDArray[np.int64], tail: float = 1e-4) -> slice:
    """The binades that hold all but a thin lower tail."""
    present = np.flatnonzero(counts)
    if not len(present):
        return slice(120, 128)
    below = np.cumsum(counts)
    first = int(np.searchsorted(below, tail * below[-1]))
    return slice(min(first, int(present[-1])), int(present[-1]) + 1)


def sheet(
    width: float, height: float, rows: int = 1, columns: int = 1, **kw: Any
) -> tuple[Figure, list[Axes]]:
    """A figure and its axes in a list; drawn without a window."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1, wspace=0.03, hspace=0.03)  # type: ignore[union-attr,call-arg]
    axes = figure.subplots(rows, columns, squeeze=False, **kw)
    return figure, list(axes.flat)


def share_y(axes: Sequence[Axes]) -> None:
    """One range for all that have data, wide enough for each; the first says what it is."""
    drawn = [ax for ax in axes if ax.has_data()]
    limits = [ax.get_ylim() for ax in drawn]
    for ax in drawn:
        ax.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    for ax in drawn[1:]:
        ax.set_ylabel("")
        ax.tick_params(axis="y", which="both", labelleft=False)


def medians(table: pd.DataFrame, group: str, x: str, column: str) -> pd.DataFrame:
    """The median of a column by group and x, for `plot_lines`; groups in order of appearance."""
    found = table.groupby([group, x], sort=False)[column].median().reset_index()
    order = {name: place for place, name in enumerate(dict.fromkeys(table[group]))}
    found = found.assign(at=found[group].map(order)).sort_values(["at", x])
    return found.rename(columns={group: "group", x: "x", column: "value"})[["group", "x", "value"]]


def legend(figure: Figure, axes: Iterable[Axes], *, columns: int = 8) -> None:
    """One legend for all axes, below them."""
    found: dict[str, Any] = {}
    for ax in axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(name, handle)
    if found:
        figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=min(columns, len(found))
        )


def median_of(table: pd.DataFrame, keys: Sequence[str], what: str) -> str:
    """Return a phrase: the number of tensors of which a cell, dot or point is the median."""
    sizes = table.groupby(list(keys)).size()
    if sizes.empty or sizes.max() == 1:
        return f"a {what} is one tensor"
    low, high = int(sizes.min()), int(sizes.max())
    count = f"{high:,}" if low == high else f"{low:,} to {high:,}"
    return f"a {what} is the median of {count} tensors"


def headline(figure: Figure, title: str, note: str = "", warning: str = "") -> None:
    """Write the title of a figure, a note below it, and a warning in red."""
    width = int(figure.get_figwidth() * LETTERS)
    lines = [(line, FAINT) for line in textwrap.wrap(note, width)]
    lines += [(line, ALARM) for line in textwrap.wrap(warning, width)]
    # constrained layout reserves space for the title only, so it gets empty lines for the notes
    text = title + "\n" * len(lines)
    figure.suptitle(text, x=0.012, ha="left", fontsize=13, fontweight="bold")
    for number, (line, colour) in enumerate(lines):
        figure.text(
            0.012,
            1 - (0.34 + 0.17 * number) / figure.get_figheight(),
            line,
            ha="left",
            va="top",
            fontsize=9,
            color=colour,
        )
