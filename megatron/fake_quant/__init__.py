"""Simulate low-precision number formats, for example with `fake_quantize(x, "mxfp8")`.

Most modules deal with numbers only, not with models or layers. Start reading with `formats.py` (the
definitions of the formats, with `elements.py` and `block_scaling.py`) and `names.py` (their names).
Next come `reference.py`, which splits a tensor into elements and scales in plain torch operations,
and what it calls: `scalings/`, which has one module per kind of scales, such as `mx.py`, and
`rounding.py` with `hifloat8.py`. `quantize.py` is the entry point, and `packing.py` returns codes
and scales. `fused/` computes the same results faster, `operators.py` makes these functions work
with torch.compile, torch.export and torch.func, and `inspect/` describes formats on the command
line.

`matmul/` quantizes and multiplies the operands of a matmul and its gradients. `tiles/` does the
same for attention in tiles, and `accumulate/` sums products as the matrix units of particular
processors do. `quant_type.py`, `recipe/` and `policy/` choose the format of each matmul of a model.
"""

from megatron.fake_quant.accumulate import accumulated_matmul
from megatron.fake_quant.formats import FORMATS, Format
from megatron.fake_quant.matmul.hadamard import Hadamard
from megatron.fake_quant.names import get_format
from megatron.fake_quant.packing import QuantizedTensor, dequantize, quantize
from megatron.fake_quant.quantize import fake_quantize

__all__ = [
    "FORMATS",
    "Format",
    "Hadamard",
    "QuantizedTensor",
    "accumulated_matmul",
    "dequantize",
    "fake_quantize",
    "get_format",
    "quantize",
]
