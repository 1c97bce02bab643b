"""A dump for the tests of drawing: two types, two iterations, with attention's probabilities."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from megatron.tensor_record import index_name
from tests.analysis.fake_dump import records, write_dump, write_tensor

RUNS = {"bf16": "20250908_095200_abc123", "mxfp8": "20250908_100000_def456"}
FORMATS = ["mxfp8", "mxfp4", "nvfp4", "hifp8"]
HEADS, TOKENS = 2, 64


def write_two_types(folder: Path) -> list[Path]:
    """Returns the files in the order of writing."""
    paths = []
    for quant_type, run_id in RUNS.items():
        paths += write_dump(
            folder / quant_type, quant_type=quant_type, run_id=run_id, layers=2, iterations=2
        )
        paths.append(write_probabilities(folder / quant_type, quant_type, run_id))
    return paths


def write_probabilities(folder: Path, quant_type: str, run_id: str) -> Path:
    """Causal attention probabilities of one layer, which stand in no index."""
    query = next(
        record
        for record, _, _ in records(run_id=run_id, quant_type=quant_type, iterations=2)
        if record.tensor_name == "query" and record.iteration == 2
    )
    shape = [1, HEADS, TOKENS, TOKENS]
    record = dataclasses.replace(
        query,
        tensor_name="attention_probs",
        shape=shape,
        global_shape=shape,
        dims="b n s t",
        counter=1000,
        format=None,
    )
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    probs = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(torch.bfloat16)
    assert not (folder / index_name(run_id, 1)).exists()
    return write_tensor(folder, record, probs)
