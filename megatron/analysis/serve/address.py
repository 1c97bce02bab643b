"""Represent the state of the page as the query of its URL.

Every view has its own URL, which stays valid after a reload and after a restart of the server. A
query may contain anything; an invalid value is replaced by the default.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from megatron.analysis.serve.catalog import GEMMS, Catalog
from megatron.analysis.serve.statistics import BY_NAME, OUTPUT_SQNR
from megatron.fake_quant.names import UnknownFormatError, get_format

MAP, TENSOR, TRAINING, RUNS = "map", "tensor", "training", "runs"
VIEWS = (MAP, TENSOR, TRAINING, RUNS)
BY_TENSOR, BY_ITERATION = "tensor", "iteration"
VALUES, MAGNITUDES, ERRORS, DIFFERENCE = "values", "magnitudes", "errors", "difference"
IMAGES = (VALUES, MAGNITUDES, ERRORS, DIFFERENCE)
_LONGEST = 4000  #: maximum length of a query
_LONGEST_VALUE = 300
_SHORT = {
    "view": "v",
    "run": "run",
    "other": "with",
    "format": "format",
    "statistic": "stat",
    "gemm": "gemm",
    "by": "by",
    "iteration": "it",
    "place": "place",
    "show": "show",
    "tensor": "t",
    "beside": "beside",
    "image": "img",
    "zoom": "z",
    "head": "head",
    "sequence": "seq",
}


@dataclass(frozen=True)
class Address:
    """State of the page. An empty string or -1 stands for the default."""

    view: str = MAP
    run: str = ""  #: ID of the run
    other: str = ""  #: ID of the run to compare with
    format: str = ""
    statistic: str = "sqnr_db"
    gemm: str = ""  #: GEMM whose operands are shown; empty for all
    by: str = BY_TENSOR  #: content of the columns of the map
    iteration: int = -1
    place: str = ""  #: module and tensor name, if the columns are iterations
    show: str = ""  #: "all" for operands and results
    tensor: str = ""  #: ID of the tensor
    beside: str = ""  #: ID of the tensor to compare with
    image: str = VALUES
    zoom: str = ""  #: visible part of the image: top, bottom, left and right, joined by "-"
    head: int = 0
    sequence: int = 0

    @classmethod
    def parse(cls, search: str | None) -> Address:
        """Return the address that a query encodes; values that are not valid are ignored."""
        given = fields_of((search or "").removeprefix("?")[:_LONGEST])
        found: dict[str, Any] = {}
        for item in fields(cls):
            text = given.get(_SHORT[item.name], "")[:_LONGEST_VALUE]
            if text and (value := _CHECKS[item.name](text)) is not None:
                found[item.name] = value
        return cls(**found)

    def search(self) -> str:
        """Return the address as a query; fields with default values are left out."""
        default = Address()
        given = {
            _SHORT[item.name]: getattr(self, item.name)
            for item in fields(self)
            if getattr(self, item.name) != getattr(default, item.name)
        }
        return f"?{urlencode(given)}"

    def but(self, **changes: Any) -> Address:
        """Return a copy of the address with some fields changed."""
        return replace(self, **changes)

    @property
    def region(self) -> tuple[int, ...] | None:
        """Visible part of the image: top, bottom, left and right; None for all of it."""
        return tuple(map(int, self.zoom.split("-"))) if self.zoom else None

    def resolved(self, catalog: Catalog, formats: list[str]) -> Address:
        """Return the address with its defaults filled in from a dump.

        The default run is the newest one, and the default iteration is its last one. The default
        format is that of the run.
        """
        runs = {run["id"]: run for run in catalog.runs}
        if not runs:
            return self
        run = self.run if self.run in runs else [*runs][-1]
        other = self.other if self.other in runs and self.other != run else ""
        own = runs[run]["type"].rpartition("_")[2]
        fmt = self.format or (own if own in formats else formats[0] if formats else "")
        iterations = runs[run]["iterations"]
        iteration = self.iteration if self.iteration in iterations else iterations[-1]
        place = self.place if self.place in catalog.places else ""
        if self.by == BY_ITERATION and not place:
            operands = [p for p, o in zip(catalog.places, catalog.place_operands, strict=True) if o]
            place = (operands or catalog.places)[0]
        changes = {"run": run, "other": other, "format": fmt, "place": place}
        return self.but(iteration=iteration, **changes)


def fields_of(query: str) -> dict[str, str]:
    """Return the fields of a query; empty if it has more fields than any view needs."""
    try:
        return dict(parse_qsl(query, keep_blank_values=True, max_num_fields=64))
    except ValueError:
        return {}


def _one_of(*choices: str) -> Callable[[str], str | None]:
    return lambda text: text if text in choices else None


def _matching(pattern: str) -> Callable[[str], str | None]:
    return lambda text: text if re.fullmatch(pattern, text) else None


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,15}", text) else None


def _count(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d{1,9}", text) else None


def _format(text: str) -> str | None:
    try:
        return get_format(text).name
    except (UnknownFormatError, ValueError):
        return None


_TENSOR_ID = r"[0-9a-f]{16}"
_CHECKS: dict[str, Callable[[str], Any]] = {
    "view": _one_of(*VIEWS),
    "run": lambda text: text,
    "other": lambda text: text,
    "format": _format,
    "statistic": _one_of(*BY_NAME, OUTPUT_SQNR.name),
    "gemm": _one_of(*GEMMS),
    "by": _one_of(BY_TENSOR, BY_ITERATION),
    "iteration": _number,
    "place": lambda text: text,
    "show": _one_of("all"),
    "tensor": _matching(_TENSOR_ID),
    "beside": _matching(_TENSOR_ID),
    "image": _one_of(*IMAGES),
    "zoom": _matching(r"\d{1,10}(-\d{1,10}){3}"),
    "head": _count,
    "sequence": _count,
}
