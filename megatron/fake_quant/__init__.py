"""Simulated low-precision number formats: `fake_quantize(x, "mxfp8")` and the table of formats.

The core knows numbers only, no model and no layer. To read it, start with `formats.py` (what the
formats are), then `element.py`, `block.py` and `hifloat8.py` (how values are rounded), then
`quantize.py` (the one entry point).
"""

from megatron.fake_quant.formats import FORMATS, Format, get_format
from megatron.fake_quant.quantize import fake_quantize

__all__ = ["FORMATS", "Format", "fake_quantize", "get_format"]
