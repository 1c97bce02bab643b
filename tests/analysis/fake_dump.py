"""Small dumps that look like real ones: every tensor name, plausible values, index and card."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.tensor_record import COMPONENTS, TensorRecord, index_name, run_card_name

#: Runs, formats to draw, and size of the attention probabilities in the dump of `write_two_types`.
RUNS = {"bf16": "20250908_095200_abc123", "mxfp8": "20250908_100000_def456"}
FORMATS = ["mxfp8", "mxfp4", "nvfp4", "hifp8"]
HEADS, TOKENS = 2, 64

#: Tensors of one layer and micro-batch: layer type, module, tensor name, operation, phase, shape,
#: scale, dims.
QKV, CORE = "self_attention.linear_qkv", "self_attention.core_attention"
LAYER = [
    ("linear", QKV, "input", "forward", "pre", (64, 2, 64), 1.0, "s b h"),
    ("linear", QKV, "weight", "forward", "pre", (96, 64), 0.02, "n k"),
    ("linear", QKV, "output", "forward", "post", (64, 2, 96), 0.2, "s b h"),
    ("attention", CORE, "query", "forward", "pre", (64, 2, 2, 32), 0.3, "s b n d"),
    ("attention", CORE, "key", "forward", "pre", (64, 2, 1, 32), 0.3, "s b g d"),
    ("attention", CORE, "value", "forward", "pre", (64, 2, 1, 32), 0.2, "s b g d"),
    ("attention", CORE, "output", "forward", "post", (64, 2, 64), 0.1, "s b h"),
    ("attention", CORE, "grad_output", "backward", "pre", (64, 2, 64), 2e-4, "s b h"),
    ("attention", CORE, "grad_query", "backward", "post", (64, 2, 2, 32), 1e-5, "s b n d"),
    ("attention", CORE, "grad_key", "backward", "post", (64, 2, 1, 32), 1e-5, "s b g d"),
    ("attention", CORE, "grad_value", "backward", "post", (64, 2, 1, 32), 3e-4, "s b g d"),
    ("linear", QKV, "grad_output", "backward", "pre", (64, 2, 96), 1e-4, "s b h"),
    ("linear", QKV, "grad_input", "backward", "post", (64, 2, 64), 2e-5, "s b h"),
    ("linear", QKV, "grad_weight", "backward", "post", (96, 64), 1e-3, "n k"),
]


def values(shape: tuple[int, ...], scale: float, generator: torch.Generator) -> Tensor:
    """Return heavy-tailed bfloat16 values; one channel in sixteen is an outlier channel."""
    x = torch.randn(shape, generator=generator) * scale
    x[..., ::16] *= 6
    return x.to(torch.bfloat16)


def records(
    *, run_id: str, quant_type: str, layers: int = 2, iterations: int = 1, world_size: int = 1
) -> Iterator[tuple[TensorRecord, tuple[int, ...], float]]:
    """Yield the record, shape and scale of every tensor of a run."""
    for rank in range(world_size):
        counter = 0
        for iteration in range(1, iterations + 1):
            for layer in range(layers):
                for layer_type, module, name, operation, phase, shape, scale, dims in LAYER:
                    counter += 1
                    yield (
                        TensorRecord(
                            run_id=run_id,
                            iteration=iteration,
                            micro_batch=0,
                            sample_idx=0,
                            counter=counter,
                            timestamp="20250908_095220",
                            layer_type=layer_type,
                            layer_idx=layer,
                            module=f"decoder.layers.{layer}.{module}",
                            operation=operation,
                            phase=phase,
                            component=COMPONENTS[layer_type],
                            tensor_name=name,
                            quant_type=quant_type,
                            format=None if phase == "post" else quant_type.rpartition("_")[2],
                            shape=list(shape),
                            dtype="bfloat16",
                            dims=dims,
                            global_shape=list(shape),
                            rank={
                                "world": rank,
                                "world_size": world_size,
                                "tp": rank,
                                "tp_size": world_size,
                            },
                            recomputed=False,
                            wall_time=1757325140.0 + counter,
                        ),
                        shape,
                        scale * (1 + layer / 4),
                    )


def write_tensor(folder: Path, record: TensorRecord, tensor: Tensor) -> Path:
    """Write one file in the form that a collection writes."""
    path = folder / record.filename
    partial = folder / f"{record.filename}.partial"
    torch.save({"tensor": tensor, "metadata": record.to_metadata()}, partial)
    partial.rename(path)
    return path


def write_dump(
    folder: Path,
    *,
    quant_type: str = "mxfp8",
    run_id: str = "20250908_095200_abc123",
    index: bool = True,
    **size: int,
) -> list[Path]:
    """Write a run into `folder` and return its files in the order of writing."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(math.prod(map(ord, quant_type)) % 2**31)
    paths = []
    for record, shape, scale in records(run_id=run_id, quant_type=quant_type, **size):
        path = write_tensor(folder, record, values(shape, scale, generator))
        paths.append(path)
        if index:
            line: dict[str, Any] = record.to_metadata() | {
                "file": path.name,
                "bytes": path.stat().st_size,
            }
            with (folder / index_name(run_id, record.rank["world"])).open("a") as lines:
                lines.write(json.dumps(line) + "\n")
    card = {"run_id": run_id, "quant_type": quant_type, "seed": 1234, "topology": {"world_size": 1}}
    (folder / run_card_name(run_id)).write_text(json.dumps(card))
    return paths


def write_events(folder: Path, run_id: str, *events: dict[str, Any]) -> None:
    """Append events to the index of a run's first rank."""
    own = {"run_id": run_id, "rank": {"world": 0, "world_size": 1}, "wall_time": 1757325200.0}
    with (folder / index_name(run_id, 0)).open("a") as lines:
        lines.writelines(json.dumps(event | own) + "\n" for event in events)


def write_two_types(folder: Path) -> list[Path]:
    """Write two runs of different types and return the files in the order of writing."""
    paths = []
    for quant_type, run_id in RUNS.items():
        paths += write_dump(
            folder / quant_type, quant_type=quant_type, run_id=run_id, layers=2, iterations=2
        )
        paths.append(write_probabilities(folder / quant_type, quant_type, run_id))
    return paths


def write_probabilities(folder: Path, quant_type: str, run_id: str) -> Path:
    """Write causal attention probabilities of one layer, which no index lists."""
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
