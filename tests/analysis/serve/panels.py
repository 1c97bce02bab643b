"""Contents of the explorer's panels, and tables that tests pass to the explorer."""

from __future__ import annotations

import json

import pandas as pd
import plotly.utils

from megatron.analysis.serve.application import _Views
from tests.analysis.fake_dump import RUNS


def shown_text(component) -> str:
    """Return components as JSON."""
    return json.dumps(component, cls=plotly.utils.PlotlyJSONEncoder, ensure_ascii=False)


def panel(explorer, name, search):
    return shown_text(_Views(explorer).panel({"search": search}, {"type": "panel", "name": name}))


def operands(**columns):
    """Return statistics of one operand, with one row per iteration, as a run writes them."""
    names = {"module": "decoder.layers.0.mlp.linear_fc1", "operation": "linear", "gemm": "dgrad"}
    names |= {"tensor": "grad_output", "format": "mxfp8"}
    count = len(next(iter(columns.values())))
    return pd.DataFrame(names | columns | {"iteration": range(1, count + 1)})


def row(sqnr, **changes):
    """Return a row of a study's table for a linear layer in the run without quantization."""
    return {
        "run_id": RUNS["bf16"],
        "iteration": 1,
        "layer_idx": 0,
        "micro_batch": 0,
        "module": "decoder.layers.0.self_attention.linear_qkv",
        "operation": "linear",
        "gemm": "fprop",
        "format": "mxfp4",
        "recipe": None,
        "accumulator": None,
        "sqnr_db": sqnr,
        "nonfinite": 0,
    } | changes
