"""Define what a panel needs, and what it returns."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from megatron.analysis.serve.address import Address
from megatron.analysis.serve.catalog import AXES, Catalog
from megatron.analysis.serve.charts import Figure
from megatron.analysis.serve.contents import Contents
from megatron.analysis.serve.measuring import Answer
from megatron.analysis.stats.result import FormatArrays, TensorArrays

SECOND = "#c4587c"  #: color of the second tensor


@dataclass(frozen=True)
class Shown:
    """A panel that is ready to be shown."""

    figure: Figure | None
    note: str = ""
    table: pd.DataFrame | None = None  #: numbers for the download
    second: Figure | None = None  #: figure beside the first one


@dataclass(frozen=True)
class Subject:
    """A tensor and what is needed to draw it."""

    catalog: Catalog
    contents: Contents
    tensor: int
    beside: int | None  #: tensor to compare with
    address: Address
    formats: tuple[str, ...]  #: formats to compare; the chosen one is among them

    @property
    def axis(self) -> str:
        """Axis along which the blocks of the tensor run: row or column."""
        at = int(self.catalog.axis_in(self.address.gemm)[self.tensor])
        return AXES[max(at, 0)]

    @property
    def is_weight(self) -> bool:
        """True if the tensor is a weight, whose rows are output units instead of tokens."""
        return str(self.catalog.field(self.tensor, "tensor_name")).endswith("weight")

    @property
    def row_name(self) -> str:
        """Name of a row of the tensor, for the label of an axis."""
        return "row (output unit)" if self.is_weight else "token"

    def answer(self, tensor: int | None = None) -> Answer:
        """Return the statistics of the given tensor, by default the subject's."""
        return self.contents.answer(
            self.catalog, self.tensor if tensor is None else tensor, self.formats
        )

    def arrays(self, tensor: int | None = None) -> TensorArrays:
        """Return the histograms of the given tensor, by default the subject's."""
        arrays = self.answer(tensor).arrays
        assert arrays is not None
        return arrays

    def in_format(self, fmt: str) -> FormatArrays | None:
        """Return the histograms of the tensor in a format; None if there are none."""
        formats = self.arrays().formats
        return formats.get((fmt, self.axis), formats.get((fmt, "all")))

    def numbers(self, fmt: str, tensor: int | None = None) -> dict[str, float]:
        """Return the errors of a tensor (by default the subject's) in a format; may be empty."""
        own = self.answer(tensor).formats
        return own.get((fmt, self.axis), own.get((fmt, "all"), {}))

    def label(self, tensor: int) -> str:
        """Return a label that distinguishes a tensor from the one that it is compared with."""
        catalog = self.catalog
        run = next(r for r in catalog.runs if r["code"] == catalog.run[tensor])
        return f"{catalog.name(tensor)}, {run['type']}, iteration {int(catalog.iteration[tensor])}"
