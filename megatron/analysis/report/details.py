"""Build the details that the report shows after a click on a tensor.

The details are the tensor's statistics, histogram, quantization errors and block maps.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.analysis.dump.tensor_files import UnreadableTensorError
from megatron.analysis.figures.figure_data import FigureData, trimmed
from megatron.analysis.figures.scale_maps import scale_map
from megatron.analysis.report.json_numbers import short
from megatron.analysis.stats import FormatArrays
from megatron.analysis.stats.result import Counts
from megatron.analysis.text_table import shown as printed
from megatron.fake_quant import get_format

ROWS, BLOCKS = 48, 48  #: maximum number of rows, and of blocks per row, in a block map
NO_SCALE = -128  #: byte that represents a block without a scale
#: Columns of `FigureData.tensors` (`VALUES`) and of `FigureData.uses` (`NUMBERS`) to show.
VALUES = (
    "count",
    "min",
    "max",
    "mean",
    "std",
    "rms",
    "amax",
    "kurtosis",
    "zeros",
    "nan",
    "inf",
    "outlier_channels",
    "dead_channels",
)
NUMBERS = (
    "sqnr_db",
    "cosine",
    "relative_bias",
    "gain",
    "underflow",
    "saturated",
    "clipping_error",
    "underflow_error",
    "grid_error",
    "poisoned",
    "codes_used",
    "block_range",
    "headroom",
    "axis_disagreement",
)


def details(figure_data: FigureData, chosen: Sequence[int]) -> dict[str, Any]:
    """Return the details of the chosen tensors, keyed by the tensor's index as a string."""
    uses: dict[int, list[dict[str, Any]]] = {tensor: [] for tensor in chosen}
    # Convert all rows with one call, because one call per tensor would take most of the time.
    rows = figure_data.uses[figure_data.uses["tensor"].isin(list(chosen))]
    for use in rows.to_dict("records"):
        uses[use["tensor"]].append(use)
    return {str(tensor): _detail(figure_data, tensor, uses[tensor]) for tensor in chosen}


def _detail(figure_data: FigureData, tensor: int, uses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    row = figure_data.tensors.loc[tensor]
    arrays = figure_data.statistics.arrays(tensor)
    binades = arrays.positive + arrays.negative
    shown = trimmed(binades)
    detail: dict[str, Any] = {
        "file": printed(Path(row["path"]).name),
        "module": str(row["module"] or ""),
        "shape": [int(size) for size in row["shape"]],
        "dtype": str(row["dtype"]),
        "shards": int(row["shards"]),
        "note": str(row["note"]),
        "facts": {name: short(row[name]) for name in VALUES},
        "first": int(shown.start) - 127,
        "values": binades[shown].tolist(),
        "smaller": int(binades[: shown.start].sum()),
        "formats": {},
        "maps": {},
    }
    for use in uses:
        part = arrays.formats[use["quantized_format"], use["axis"]]
        detail["formats"][use["quantized_format"]] = _in_format(use, part, binades, shown)
    detail["maps"] = _maps(figure_data, tensor)
    return detail


def _in_format(
    use: dict[str, Any], part: FormatArrays, binades: Counts, shown: slice
) -> dict[str, Any]:
    """Return a tensor's quantization errors in one format, in total and for each binade in `shown`.

    Args:
        use: row of `FigureData.uses`.
        part: histograms of the format.
        binades: number of finite nonzero values of the tensor in each binade.
        shown: binades to include.
    """
    values = part.values[shown]
    error = np.where(values > 0, part.relative_error[shown] / np.maximum(values, 1), np.nan)
    poisoned = binades - part.values - part.overflow
    return {
        "axis": use["axis"],
        "used_by": use["used_by"],
        "lost": part.underflow[shown].tolist(),
        "saturated": part.saturated[shown].tolist(),
        "poisoned": poisoned[shown].tolist(),
        "smaller_lost": int(part.underflow[: shown.start].sum()),
        "error": [short(value) for value in error],
        "numbers": {column: short(use[column]) for column in NUMBERS},
    }


def _maps(figure_data: FigureData, tensor: int) -> dict[str, Any]:
    """Return a map of a tensor's block scales, along its last dimension, for each suitable format.

    A format is suitable if it stores one scale byte per block and its blocks are not square. The
    result is empty if the tensor cannot be loaded, for instance because parts are missing.
    """
    formats = [name for name in figure_data.with_blocks() if not get_format(name).square]
    if not formats:
        return {}
    try:
        whole: Tensor = figure_data.load(tensor)
        tables = {name: scale_map(whole, name, rows=ROWS, blocks=BLOCKS) for name in formats}
    except (UnreadableTensorError, ValueError):
        return {}
    return {name: _packed(table, name) for name, table in tables.items()}


def _e4m3_codes(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    codes: NDArray[np.uint8] = (
        torch.from_numpy(np.nan_to_num(values)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    )
    return codes


def _packed(table: pd.DataFrame, fmt: str) -> dict[str, Any]:
    """Return a scale map for JSON, with one signed byte per block, encoded in Base64.

    The byte is the exponent of an E8M0 scale, or the code of an E4M3 scale (NVFP4).
    """
    exponents = table.to_numpy()
    powers = get_format(fmt).block_scale == "E8M0"
    # NO_SCALE is not in the range of uint8, and NumPy 2.5 refuses to convert it.
    stored = exponents if powers else _e4m3_codes(2.0**exponents).astype(np.int16)
    content = np.where(np.isnan(exponents), NO_SCALE, stored).astype(np.int8).tobytes()
    rows = [int(i) for i in table.index]
    columns = [int(i) for i in table.columns]
    return {
        "powers": powers,
        "rows": len(rows),
        "every": rows[1] - rows[0] if len(rows) > 1 else 1,
        "columns": len(columns),
        "size": columns[1] - columns[0] if len(columns) > 1 else 1,
        "bytes": base64.b64encode(content).decode(),
    }
