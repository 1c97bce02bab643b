"""Compare products of quantized operands with and without a second rounding to bfloat16.

    python benchmarks/operand_rounding.py

Operands are normal random matrices in bfloat16. The exact product is computed in float64 from the
operands in float32. "rounded twice" multiplies the results of `fake_quantize` in bfloat16, which
rounds each quantized value once more; "as multiplied" is `quantized_matmul`. Both products are
bfloat16, so that even a correctly rounded product has an error, which the last column shows.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.console import ArgumentParser
from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import GemmFormats

FORMATS = ("nvfp4", "fp8_e4m3", "fp8_e5m2", "fp8_rowwise", "fp8_block", "mxfp8")
M, N, K = 512, 512, 4096


def relative(product: Tensor, exact: Tensor) -> float:
    """Return the relative error of a product in the Frobenius norm."""
    return float((product.double() - exact).norm() / exact.norm())


def timed(function: Callable[[], Tensor]) -> float:
    """Return the shortest duration of five calls of a function, in milliseconds."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


def main() -> None:
    """Measure the errors and times of both products, and print one table row per format."""
    ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, K, generator=generator).bfloat16() for rows in (M, N))
    print("| format | rounded twice | as multiplied | product rounded once | ms before | ms now |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in FORMATS:
        formats = GemmFormats.uniform(get_format(name))

        def twice(name: str = name) -> Tensor:
            return fake_quantize(a, name) @ fake_quantize(b, name).t()

        def ours(formats: GemmFormats = formats) -> Tensor:
            return quantized_matmul(a, b, formats)

        wide = [fake_quantize(x.float(), name).double() for x in (a, b)]
        exact = wide[0] @ wide[1].t()
        errors = (relative(x, exact) for x in (twice(), ours(), exact.bfloat16()))
        numbers = " | ".join(f"{100 * error:.4f} %" for error in errors)
        print(f"| {name} | {numbers} | {timed(twice):.1f} | {timed(ours):.1f} |")


if __name__ == "__main__":
    main()
