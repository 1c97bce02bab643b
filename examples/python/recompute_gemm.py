#!/usr/bin/env python3
"""Recompute the output of a linear layer from the operands saved in a tensor dump.

    python=$(bash script/setup_env.sh)
    "$python" examples/python/recompute_gemm.py enhanced_tensor_logs/mxfp8
    "$python" examples/python/recompute_gemm.py enhanced_tensor_logs/mxfp8 linear_fc1

The output y = x W^T is computed twice from the saved operands. Operands quantized as in the run
reproduce the saved output (bit for bit on the same machine); unquantized operands show the error of
the format. The example uses the first layer, by default its module linear_qkv, and joins the shards
of several ranks. `python -m megatron.analysis verify` does this for every matmul of a dump.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # to import from this repository

from megatron.analysis.store import TensorStore
from megatron.analysis.verification.recorded_formats import uses
from megatron.console import run_main
from megatron.fake_quant.matmul.mean_split import SplitMatrix, with_means

NAMES = ("input", "weight", "output")


def sqnr(x: Tensor, other: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio, in dB, of `other` as an approximation of `x`.

    The result is inf if the two are equal.
    """
    signal, noise = x.double(), other.double() - x.double()
    return 10 * torch.log10(signal.square().sum() / noise.square().sum()).item()


def main(folder: str, module: str = "linear_qkv") -> int:
    try:
        store = TensorStore(folder).only("latest")
        records = store.select(layer=0, module=module, operation="forward")
        if records.empty:
            raise ValueError(f"no {module} of layer 0 in {folder}; name another module")
        where = {"layer": 0, "module": module, "iteration": int(records["iteration"].min())}
        where |= {"micro_batch": 0, "operation": "forward"}
        x, w, y = (store.load_global(tensor_name=name, dp=0, **where) for name in NAMES)
    except ValueError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 1

    # An operand's record lists its formats in the forward and backward passes; `uses` returns the
    # format of the forward pass first.
    formats = dict(zip(records["tensor_name"], records["format"], strict=True))
    forward = {name: uses(formats[name])[0] for name in ("input", "weight")}
    quantized = [
        forward[name].quantized(tensor, axis=-1) for name, tensor in (("input", x), ("weight", w))
    ]
    print(f"{module} of layer 0")
    print(f"  x {list(x.shape)} in {formats['input']}, W {list(w.shape)} in {formats['weight']}")
    plain = SplitMatrix(x), SplitMatrix(w)
    for title, (a, b) in {"quantized": quantized, "as they are": plain}.items():
        recomputed = with_means(a.values @ b.values.t(), a, b.t(), alpha=1)
        same = (recomputed == y).double().mean().item()
        print(f"  operands {title:12} {same:7.2%} of y as saved, SQNR {sqnr(y, recomputed):.2f} dB")
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        sys.exit()
    if not 2 <= len(sys.argv) <= 3:
        print(__doc__, file=sys.stderr)
        print("[ERROR] give the folder of a dump, and optionally a module", file=sys.stderr)
        sys.exit(2)
    run_main(lambda: main(*sys.argv[1:]))
