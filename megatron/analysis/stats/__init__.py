"""Statistics of the tensors of a dump, and what each number format would do to them.

    from megatron.analysis import stats
    from megatron.analysis.store import TensorStore

    store = TensorStore("enhanced_tensor_logs/mxfp8")
    found = stats.compute(store, ["mxfp8", "mxfp4", "hifp8"], progress=True)
    found.tensors      a row a logical tensor: what it is, and the statistics of its values
    found.formats      a row a tensor, format and axis: what the format does to it
    found.problems     files that were left out, and why (`Problem`)
    found.arrays(7)    histograms of tensor 7: from the cache, else computed when asked for

A *logical* tensor is what the ranks of a run hold together: shards are merged by their `dims`,
replicas count once, partial sums are added. Data-parallel ranks have other data and are tensors of
their own (`data_rank`). Each shard is quantized by itself, as its rank did for its matmul.

Formats are any that `megatron.fake_quant.get_format` knows. What a value becomes is what
`fake_quantize(x, format, axis)` gives, to the bit, in the dtype of the tensor. Blocks run along two
axes, because each GEMM quantizes its operands along its own reduction axis:

    axis "row"      along the last dimension: hidden units, head_dim, keys of probabilities
    axis "column"   along tokens (linear layers: sequence and batch flattened), along queries or
                    keys (attention), along output units (weights)
    axis "all"      formats without blocks

`used_by` says for which GEMM a collected operand is quantized along that axis (`fprop`, `dgrad`,
`wgrad`; empty for results). Square blocks (`mxfp8:2d`) are the same along both and have axis "all".
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
