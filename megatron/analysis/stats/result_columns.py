"""Build the tables `tensors` and `formats` of the computed statistics, column by column.

Numbers are stored in arrays and not as Python objects, so that a row takes only a few hundred
bytes.
"""

from __future__ import annotations

import functools
import math
from array import array
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from megatron.analysis.stats.errors import Errors, FormatErrors
from megatron.analysis.stats.kernels.error_sums import (
    CAUSES,
    CLIPPING_ERROR,
    GRID_ERROR,
    MAGNITUDE_ERROR,
    RELATIVE,
    UNDERFLOW_ERROR,
)
from megatron.analysis.stats.kernels.scalar_quantizer import NAN_E8M0
from megatron.analysis.stats.logical_tensors import LogicalTensor
from megatron.analysis.stats.matrix_view import used_by
from megatron.analysis.stats.result import (
    FORMAT_COLUMNS,
    IDENTITY_COLUMNS,
    QUANTILES,
    VALUE_COLUMNS,
    FormatArrays,
    TensorArrays,
)
from megatron.analysis.stats.values import Values, live_median
from megatron.fake_quant.formats import Format
from megatron.fake_quant.names import get_format
from megatron.fake_quant.scalings import stored_scales

_NAMES = ("quantized_format", "axis", "used_by")
_NUMBERS = tuple(name for name in FORMAT_COLUMNS if name not in ("tensor", *_NAMES))
_WHOLE_VALUES = (
    "count",
    "finite",
    "nan",
    "inf",
    "zeros",
    "negative_zeros",
    "channels",
    "outlier_channels",
    "dead_channels",
)
_WHOLE_NUMBERS = ("compared", "nonzero", "poisoned")
_BLOCK_NUMBERS = FORMAT_COLUMNS[
    FORMAT_COLUMNS.index("blocks") : FORMAT_COLUMNS.index("headroom") + 1
]
_MOMENTS = VALUE_COLUMNS[: VALUE_COLUMNS.index("kurtosis") + 1]


class ResultColumns:
    """Columns of the tables `tensors` and `formats`; tensors can be added in any order."""

    def __init__(self) -> None:
        self._identities: list[tuple[Any, ...]] = []
        self._values = array("d")
        self._numbers = array("d")
        self._names: list[tuple[str, str, str]] = []
        self._tensor_of_format: list[int] = []  # number of the tensor in each row of `formats`
        self._order: list[int] = []  # number of the tensor in each row of `tensors`

    def add(
        self,
        number: int,
        tensor: LogicalTensor,
        values: Values,
        all_errors: FormatErrors,
        note: str,
    ) -> None:
        """Add a tensor to both tables; `number` determines the order of the rows in `tables`."""
        self._order.append(number)
        self._identities.append(_identity(tensor, note))
        numbers = value_numbers(values)
        self._values.extend(numbers[name] for name in VALUE_COLUMNS)
        for (name, axis), errors in all_errors.items():
            use = used_by(tensor.row.layer_type, tensor.row.tensor_name, axis)
            self._tensor_of_format.append(number)
            self._names.append((name, axis, use))
            row = format_numbers(get_format(name), errors)
            self._numbers.extend(row[column] for column in _NUMBERS)

    def tables(self) -> tuple[pd.DataFrame, pd.DataFrame, list[int]]:
        """Return the tables `tensors` and `formats`, and a list of the tensors' numbers.

        The numbers are those with which the rows of `tensors` were added. Both tables are sorted by
        them.
        """
        order = np.argsort(np.array(self._order, np.int64), kind="stable")
        numbers = [self._order[row] for row in order]
        identities = [self._identities[row] for row in order]
        tensors = pd.DataFrame(identities, columns=list(IDENTITY_COLUMNS), dtype=object)
        values = np.frombuffer(self._values).reshape(-1, len(VALUE_COLUMNS))[order]
        for index, name in enumerate(VALUE_COLUMNS):
            column = values[:, index]
            tensors[name] = column.astype(np.int64) if name in _WHOLE_VALUES else column
        for name in ("iteration", "micro_batch", "layer_idx"):
            tensors[name] = pd.array(tensors[name].tolist(), dtype="Int64")
        for name in ("data_rank", "shards"):
            tensors[name] = tensors[name].astype(np.int64)
        return tensors, self._formats(numbers), numbers

    def _formats(self, numbers: list[int]) -> pd.DataFrame:
        row_of = {number: row for row, number in enumerate(numbers)}
        rows = np.array([row_of[number] for number in self._tensor_of_format], np.int64)
        order = np.argsort(rows, kind="stable")
        statistics = np.frombuffer(self._numbers).reshape(-1, len(_NUMBERS))[order]
        columns: dict[str, Any] = {"tensor": rows[order]}
        for index, name in enumerate(_NAMES):
            columns[name] = pd.Categorical([self._names[row][index] for row in order])
        for index, name in enumerate(_NUMBERS):
            column = statistics[:, index]
            columns[name] = column.astype(np.int64) if name in _WHOLE_NUMBERS else column
        return pd.DataFrame({name: columns[name] for name in FORMAT_COLUMNS})


def _identity(tensor: LogicalTensor, note: str) -> tuple[Any, ...]:
    row = tensor.row
    fields = {name: getattr(row, name, None) for name in IDENTITY_COLUMNS}
    fields = {
        name: None if not isinstance(value, list) and pd.isna(value) else value
        for name, value in fields.items()
    }
    fields |= {"data_rank": tensor.data_rank, "shape": tuple(tensor.shape), "path": row.path}
    fields |= {"shards": tensor.files, "note": note}
    return tuple(fields[name] for name in IDENTITY_COLUMNS)


def value_numbers(values: Values) -> dict[str, float]:
    """Return the computed entries of one row of `tensors`, keyed by column name."""
    numbers: dict[str, float] = {name: getattr(values.moments, name) for name in _MOMENTS}
    quantiles = values.histogram.quantiles(QUANTILES)
    numbers |= dict(zip((f"q{share}" for share in QUANTILES), quantiles, strict=True))
    magnitudes = values.histogram.magnitude_quantiles(QUANTILES)
    numbers |= dict(zip((f"m{share}" for share in QUANTILES), magnitudes, strict=True))
    channels = values.channel_amax.ravel()
    return numbers | {
        "channels": len(channels),
        "outlier_channels": len(values.outliers),
        "dead_channels": values.dead_channels,
        "channel_amax_ratio": _over_median(channels),
        "token_amax_ratio": _over_median(values.token_amax.ravel()),
    }


def _over_median(amax: NDArray[np.float64]) -> float:
    median = live_median(amax)
    return float(amax.max()) / median if median else math.nan


def format_numbers(fmt: Format, errors: Errors) -> dict[str, float]:
    """Return the computed entries of one row of `formats`, keyed by column name."""
    numbers = errors.numbers()
    if fmt.block_size is None:
        return numbers | dict.fromkeys(_BLOCK_NUMBERS, math.nan)
    return numbers | errors.block_numbers(scale_exponents(fmt))


@functools.cache
def scale_exponents(fmt: Format) -> NDArray[np.float64]:
    """Return the base-2 logarithms of the block scales that the 256 byte values encode.

    Bytes that do not encode a positive scale yield NaN.
    """
    if fmt.block_scale == "E8M0":
        exponents = np.arange(256, dtype=np.float64) - 127
        exponents[NAN_E8M0] = math.nan
        return exponents
    assert fmt.scaling is not None
    scales = stored_scales(fmt.scaling)[:256].double()
    logarithms: NDArray[np.float64] = scales.where(scales > 0, math.nan).log2().numpy()
    return logarithms


def arrays_of(values: Values, all_errors: FormatErrors) -> TensorArrays:
    """Return the histograms of a tensor's values and of its errors in each format."""
    halves = values.histogram.counts.reshape(2, -1)[:, : 255 * 128].copy()
    halves[:, 0] = 0  # set the counts of zeros to 0, because zeros belong to no binade
    positive, negative = halves.reshape(2, 255, 128).sum(2)
    return TensorArrays(
        exponents=np.arange(-127, 128),
        positive=positive,
        negative=negative,
        patterns=values.histogram.counts,
        channel_amax=values.channel_amax.ravel(),
        token_amax=values.token_amax.ravel(),
        formats={key: _format_arrays(*key, errors) for key, errors in all_errors.items()},
    )


def _format_arrays(name: str, axis: str, errors: Errors) -> FormatArrays:
    values, underflow, saturated, overflow = errors.binade_counts
    sums = errors.binade_sums
    blocks = get_format(name).block_size is not None
    none = np.zeros(0, np.int64)
    return FormatArrays(
        name,
        axis,
        values,
        underflow,
        saturated,
        overflow,
        sums[:CAUSES].sum(0),
        sums[CLIPPING_ERROR],
        sums[UNDERFLOW_ERROR],
        sums[GRID_ERROR],
        sums[MAGNITUDE_ERROR],
        sums[RELATIVE],
        errors.codes,
        errors.scales if blocks else none,
        errors.block_range if blocks else none,
        errors.headroom if blocks else none,
    )
