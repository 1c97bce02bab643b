"""Simulated low-precision number formats: `fake_quantize(x, "mxfp8")` and the table of formats.

The core deals with numbers only, not with models or layers. Start reading with `formats.py` (the
definitions of the formats) and `names.py` (their names). Next come `reference.py`, which splits a
tensor into elements and scales in plain torch operations, and its helpers `rounding.py`, `mx.py`,
`nvfp4.py`, `hifloat8.py` and `hifloat4.py`. `quantize.py` is the entry point. `fused/` does the
same faster; `packing.py` gives the codes and scales themselves. `operators.py` registers all of it
with torch.compile, torch.export and torch.func.
"""

from megatron.fake_quant.formats import FORMATS, Format
from megatron.fake_quant.hadamard import Hadamard
from megatron.fake_quant.names import get_format
from megatron.fake_quant.packing import QuantizedTensor, dequantize, quantize
from megatron.fake_quant.quantize import fake_quantize

__all__ = [
    "FORMATS",
    "Format",
    "Hadamard",
    "QuantizedTensor",
    "dequantize",
    "fake_quantize",
    "get_format",
    "quantize",
]
