"""Statistics of the tensors in a dump and of the errors that number formats cause in them.

    store = TensorStore("enhanced_tensor_logs/mxfp8")
    statistics = stats.compute(store, ["mxfp8", "mxfp4", "hifp8"], progress=True)

`result.py` describes the object that `compute` returns. `engine` runs the steps in this order:

    format_groups     group the formats for which values need to be counted only once
    logical_tensors   combine records into tensors and their parts
    matrix_view       find the tokens, channels and blocks of a tensor
    cache             look up the results of earlier calls
    executors, jobs   run one job per part, on threads or on a Dask cluster
    tensor            measure one part, in chunks (`chunks`)
    kernels           compiled loops, which measure most formats
    direct            slower code for the other formats
    values, moments, histogram, errors        mergeable statistics of the values and the formats
    serialization     convert the result of a job to bytes and back
    merge             merge the results of parts into results of tensors
    result_columns, result                    build the tables
    export            write the tables as text, CSV or JSON

`measure` computes only the statistics of the values, for `quick_analysis`.
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
