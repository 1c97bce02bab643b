"""Simulate how matrix units add up products, for example with `accumulated_matmul`.

Start reading with `accumulator.py`, which defines the accumulators as data, and `scalar.py`, which
defines what they return for one dot product. `names.py` converts names, and `matmul.py` is the
entry point.

`product.py` multiplies the operands of a GEMM whose formats have scales: `format_checks.py` refuses
formats that a unit does not multiply, and `unit_matrix.py` takes the operands apart.
"""

from megatron.fake_quant.accumulate.accumulator import ACCUMULATORS, Accumulator, SumType
from megatron.fake_quant.accumulate.matmul import accumulated_matmul
from megatron.fake_quant.accumulate.names import get_accumulator

__all__ = ["ACCUMULATORS", "Accumulator", "SumType", "accumulated_matmul", "get_accumulator"]
