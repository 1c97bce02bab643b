"""Keep the numbers of all tensors as columns, and name the statistics that the map shows.

The numbers are computed by `stats`: statistics of a tensor's values, and of its errors in each
format along both axes. They are kept in memory as float32, about 60 bytes per tensor and format,
and stored in a file beside the cache, so that the next start need not read the cache of every
tensor.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.analysis.outputs.atomic_write import write
from megatron.analysis.serve.records import GrowingArray
from megatron.analysis.stats.cache import code_version
from megatron.bounded_files import open_regular

LINEAR, LOGARITHMIC, AROUND_ZERO = "linear", "logarithmic", "around zero"


@dataclass(frozen=True)
class Statistic:
    """A number of a tensor, and how it is shown."""

    name: str
    label: str
    unit: str = ""
    of_format: bool = False  #: True if the statistic depends on the format
    scale: str = LINEAR  #: scale of the colors
    worst: str = "high"  #: bad end of the range: "low", "high" or "far" (from zero)
    percent: bool = False  #: True if the number is a share, which is shown in percent
    help: str = ""


STATISTICS = (
    Statistic(
        "sqnr_db",
        "SQNR",
        "dB",
        True,
        worst="low",
        help="signal-to-quantization-noise ratio; 6 dB are one bit",
    ),
    Statistic(
        "gain",
        "Gain",
        "%",
        True,
        AROUND_ZERO,
        "far",
        True,
        "below zero: rounding shrinks the tensor",
    ),
    Statistic(
        "underflow",
        "Underflow",
        "%",
        True,
        percent=True,
        help="share of the nonzero values that become zero",
    ),
    Statistic(
        "saturated",
        "Clipped",
        "%",
        True,
        percent=True,
        help="share of the values that would round to more than the format's largest number",
    ),
    Statistic(
        "relative_bias",
        "Bias",
        "%",
        True,
        AROUND_ZERO,
        "far",
        True,
        "mean error divided by the mean magnitude",
    ),
    Statistic(
        "relative_error", "Relative error", "%", True, percent=True, help="mean of |y - x| / |x|"
    ),
    Statistic(
        "cosine",
        "Cosine",
        "",
        True,
        worst="low",
        help="between the tensor and the quantized tensor",
    ),
    Statistic(
        "clipping_error",
        "Error from clipping",
        "%",
        True,
        percent=True,
        help="share of the squared error",
    ),
    Statistic(
        "underflow_error",
        "Error from underflow",
        "%",
        True,
        percent=True,
        help="share of the squared error",
    ),
    Statistic(
        "code_entropy",
        "Code entropy",
        "bits",
        True,
        worst="low",
        help="entropy of the element codes",
    ),
    Statistic(
        "block_range",
        "Range of a block",
        "binades",
        True,
        help="between the largest and the smallest magnitude of a block",
    ),
    Statistic(
        "headroom",
        "Headroom",
        "binades",
        True,
        help="from a block's largest magnitude up to the largest number that its scale allows",
    ),
    Statistic(
        "axis_sqnr_db",
        "Rows against columns",
        "dB",
        True,
        worst="low",
        help="power of the values over that of the difference between both block directions",
    ),
    Statistic("amax", "Largest magnitude", "", scale=LOGARITHMIC),
    Statistic("rms", "RMS", "", scale=LOGARITHMIC, help="root mean square"),
    Statistic(
        "kurtosis",
        "Kurtosis",
        "",
        scale=LOGARITHMIC,
        help="3 for a normal distribution; large for outliers",
    ),
    Statistic("std", "Standard deviation", "", scale=LOGARITHMIC),
    Statistic("mean", "Mean", "", scale=AROUND_ZERO, worst="far"),
    Statistic("skewness", "Skewness", "", scale=AROUND_ZERO, worst="far"),
    Statistic("m0.5", "Median magnitude", "", scale=LOGARITHMIC, worst="low"),
    Statistic("m0.999", "99.9 % magnitude", "", scale=LOGARITHMIC),
    Statistic("smallest", "Smallest magnitude", "", scale=LOGARITHMIC, worst="low"),
    Statistic("zero_share", "Zeros", "%", percent=True, help="share of the values that are zero"),
    Statistic("nan", "NaN", "values"),
    Statistic("inf", "Inf", "values"),
    Statistic(
        "outlier_channels",
        "Outlier channels",
        "",
        help="channels above 6 times the median channel's largest magnitude",
    ),
    Statistic("dead_channels", "Dead channels", "", help="channels that hold only zeros"),
    Statistic(
        "channel_amax_ratio",
        "Channel ratio",
        "",
        scale=LOGARITHMIC,
        help="largest amax of a channel over that of the median channel",
    ),
    Statistic(
        "token_amax_ratio",
        "Token ratio",
        "",
        scale=LOGARITHMIC,
        help="largest amax of a token over that of the median token",
    ),
)
#: SQNR of matmul results, read from the table of a study.
OUTPUT_SQNR = Statistic(
    "output_sqnr_db",
    "SQNR of the results",
    "dB",
    True,
    worst="low",
    help="of each matmul, measured by `study`",
)
BY_NAME = {statistic.name: statistic for statistic in (*STATISTICS, OUTPUT_SQNR)}
VALUES = tuple(statistic.name for statistic in STATISTICS if not statistic.of_format)
ERRORS = tuple(statistic.name for statistic in STATISTICS if statistic.of_format)
_PREFIX = "explorer_"
_MOST_BYTES = 1 << 30  #: maximum size of the file with the numbers


@dataclass(frozen=True)
class Measured:
    """Numbers of one tensor, as the measuring process returns them."""

    values: tuple[float, ...]  #: in the order of `VALUES`
    #: by format: the row-wise numbers, then the column-wise ones, each in the order of `ERRORS`
    errors: dict[str, tuple[float, ...]]


class Numbers:
    """Numbers of all measured tensors, which several threads add and read at the same time."""

    def __init__(self) -> None:
        self.version = 0  #: number of changes
        #: by ID: stamp of a tensor that could not be measured, and why
        self.failures: dict[int, tuple[int, str]] = {}
        self._row_of: dict[int, int] = {}
        self._ids, self._stamps = GrowingArray(np.uint64), GrowingArray(np.uint64)
        self._values = GrowingArray(np.float32, len(VALUES))
        self._errors: dict[str, GrowingArray] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._row_of)

    @property
    def formats(self) -> list[str]:
        """Formats in which at least one tensor was measured."""
        return [*self._errors]

    def add(self, identity: int, stamp: int, measured: Measured) -> None:
        """Add or replace the numbers of a tensor."""
        with self._lock:
            row = self._row_of.get(identity)
            if row is None:
                row = len(self._ids)
                self._ids.extend([identity])
                self._stamps.extend([stamp])
                self._values.extend([measured.values])
                for array in self._errors.values():
                    array.extend(np.full((1, 2 * len(ERRORS)), np.nan))
                self._row_of[identity] = row
            if self._stamps.values[row] != np.uint64(stamp):
                self._stamps.values[row] = stamp
                for array in self._errors.values():
                    array.values[row] = np.nan
            self._values.values[row] = measured.values
            for name, numbers in measured.errors.items():
                if name not in self._errors:
                    self._errors[name] = array = GrowingArray(np.float32, 2 * len(ERRORS))
                    array.extend(np.full((len(self._ids), 2 * len(ERRORS)), np.nan))
                # -Inf marks a number that is undefined, such as the SQNR of zeros; NaN marks one
                # that has not been measured.
                own = np.array(numbers or np.full(2 * len(ERRORS), -np.inf))
                self._errors[name].values[row] = np.where(np.isnan(own), -np.inf, own)
            self.failures.pop(identity, None)
            self.version += 1

    def forget(self, fmt: str) -> None:
        """Remove the numbers of a format."""
        with self._lock:
            self._errors = {name: array for name, array in self._errors.items() if name != fmt}
            self.version += 1

    def fail(self, identity: int, stamp: int, why: str) -> None:
        """Remember why a tensor could not be measured."""
        with self._lock:
            self.failures[identity] = (stamp, why)
            self.version += 1

    def failed(self, ids: NDArray[np.uint64], stamps: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return a mask of the tensors that could not be measured in their current version."""
        with self._lock:
            failures = dict(self.failures)
        mask = np.isin(ids, np.fromiter(failures, np.uint64, len(failures)))
        for at in np.flatnonzero(mask):
            mask[at] = failures[int(ids[at])][0] == int(stamps[at])
        return mask

    def rows_of(self, ids: NDArray[np.uint64], stamps: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the row of each tensor; -1 if it has not been measured since it was written."""
        with self._lock:
            get = self._row_of.get
            rows = np.fromiter((get(i, -1) for i in ids.tolist()), np.int64, len(ids))
            if len(self._stamps):
                rows[(rows >= 0) & (self._stamps.values[rows] != stamps)] = -1
        return rows

    def column(
        self, statistic: Statistic, rows: NDArray[np.int64], fmt: str, axis: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return a statistic of each tensor; NaN if it was not measured or is undefined.

        Args:
            statistic: a member of `STATISTICS`.
            rows: result of `rows_of`.
            fmt: format; unused if the statistic does not depend on it.
            axis: for each tensor, 0 for blocks along rows, 1 along columns, -1 for neither.
        """
        found = np.full(len(rows), np.nan)
        known = rows >= 0
        if not statistic.of_format:
            found[known] = self._values.values[rows[known], VALUES.index(statistic.name)]
        elif fmt in self._errors:
            known = known & (axis >= 0)
            at = axis[known] * len(ERRORS) + ERRORS.index(statistic.name)
            found[known] = self._errors[fmt].values[rows[known], at]
            found[np.isneginf(found)] = np.nan
        return found

    def missing(self, rows: NDArray[np.int64], formats: list[str]) -> NDArray[np.bool_]:
        """Return a mask of the tensors that were not measured, or not in every given format."""
        lacking: NDArray[np.bool_] = rows < 0
        for name in formats:
            if name not in self._errors:
                return np.ones(len(rows), bool)
            known = ~lacking
            lacking[known] = np.isnan(self._errors[name].values[rows[known], 0])
        return lacking

    def save(self, folder: Path) -> None:
        """Write the numbers to a file, and remove the files of other versions of the program."""
        with self._lock:
            table = np.zeros(len(self._ids), self._dtype([*self._errors]))
            table["id"], table["stamp"] = self._ids.values, self._stamps.values
            table["values"] = self._values.values
            for name, array in self._errors.items():
                table[f"errors {name}"] = array.values
        path = self._path(folder)
        write(path, _npy(table))
        for other in folder.glob(f"{_PREFIX}*.npy"):
            if other.name != path.name:
                with contextlib.suppress(OSError):
                    other.unlink()

    def load(self, folder: Path) -> None:
        """Read the numbers that an earlier server wrote; an unsuitable file is ignored."""
        path = self._path(folder)
        try:
            with open_regular(path) as file:
                if file.seek(0, 2) > _MOST_BYTES:
                    return
                file.seek(0)
                table: Any = np.load(file, allow_pickle=False)
            names = [name.removeprefix("errors ") for name in (table.dtype.names or ())[3:]]
            if table.dtype != self._dtype(names) or table.ndim != 1:
                return
        except Exception:  # a damaged header may raise any error; everything can be measured again
            return
        with self._lock:
            ids = np.array(table["id"])
            self._row_of = dict(zip(ids.tolist(), range(len(ids)), strict=True))
            if len(self._row_of) < len(ids):
                self._row_of = {}
                return
            self._ids.extend(ids)
            self._stamps.extend(table["stamp"])
            self._values.extend(table["values"])
            for name in names:
                self._errors[name] = GrowingArray(np.float32, 2 * len(ERRORS))
                self._errors[name].extend(table[f"errors {name}"])
            self.version += 1

    def _path(self, folder: Path) -> Path:
        return folder / f"{_PREFIX}{code_version()}.npy"

    def _dtype(self, formats: list[str]) -> np.dtype[Any]:
        fields: list[tuple[Any, ...]] = [("id", "<u8"), ("stamp", "<u8")]
        fields.append(("values", "<f4", (len(VALUES),)))
        fields += [(f"errors {name}", "<f4", (2 * len(ERRORS),)) for name in formats]
        return np.dtype(fields)


def _npy(table: NDArray[Any]) -> bytes:
    import io

    content = io.BytesIO()
    np.save(content, table, allow_pickle=False)
    return content.getvalue()


def pick(numbers: Mapping[str, float], names: tuple[str, ...]) -> tuple[float, ...]:
    """Return the numbers with the given names from a row of statistics; NaN if one is missing."""
    return tuple(float(numbers.get(name, math.nan)) for name in names)
