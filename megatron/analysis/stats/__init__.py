"""Statistics of the tensors of a dump, and what each number format would do to them.

    store = TensorStore("enhanced_tensor_logs/mxfp8")
    statistics = stats.compute(store, ["mxfp8", "mxfp4", "hifp8"], progress=True)

`result.py` describes what `compute` returns. The work is done in this order:

    format_groups     formats that can share one count of the values
    logical_tensors   records -> tensors and their parts; `matrix_view`: axes of their blocks
    cache             results of earlier calls
    executors, jobs   one job per part, on threads or a Dask cluster; `serialization`: its result
    tensor            one part: `chunks`, `kernels/` (compiled loops), `direct` (formats without)
    values, moments, histogram, errors        mergeable statistics of the values and formats
    merge             results of parts -> results of tensors
    result_columns, result, export            tables; text, CSV and JSON
    measure           the same without formats, for the quick look
"""

from megatron.analysis.stats.engine import compute
from megatron.analysis.stats.result import (
    FORMAT_COLUMNS,
    HEADROOM_EDGES,
    IDENTITY_COLUMNS,
    QUANTILES,
    VALUE_COLUMNS,
    FormatArrays,
    Statistics,
    TensorArrays,
)

__all__ = [
    "FORMAT_COLUMNS",
    "HEADROOM_EDGES",
    "IDENTITY_COLUMNS",
    "QUANTILES",
    "VALUE_COLUMNS",
    "FormatArrays",
    "Statistics",
    "TensorArrays",
    "compute",
]
