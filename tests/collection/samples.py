"""Helpers that the tests of the collection share: tensors, records and indexes."""

from pathlib import Path
from typing import Any

import torch

from megatron.collection import session, session_end
from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.run_card import rank_coordinates
from megatron.collection.training_clock import clock
from megatron.tensor_record import TensorRecord, read_events, read_index

LAYER = ModuleIdentity("decoder.layers.0.mlp.linear_fc1", 0)
TENSOR = torch.arange(256.0)
SIZE = TENSOR.nbytes


def record(counter: int) -> TensorRecord:
    """Return the record of `TENSOR`."""
    return TensorRecord(
        **{
            "run_id": "run",
            "iteration": 1,
            "micro_batch": 0,
            "sample_idx": None,
            "counter": counter,
            "timestamp": "20260101_000000",
            "layer_type": "linear",
            "layer_idx": 0,
            "module": "m",
            "operation": "forward",
            "phase": "pre",
            "component": "linear",
            "tensor_name": "input",
            "quant_type": "bf16",
            "format": None,
            "shape": [256],
            "dtype": "float32",
            "dims": "h",
            "global_shape": [256],
            "rank": rank_coordinates(),
            "recomputed": False,
            "wall_time": 0.0,
        }
    )


def nothing() -> bool:
    """Evict nothing, like a writer without a ring."""
    return False


def save(tensor=None, identity=LAYER, name="input") -> None:
    """Save one tensor of a linear layer, if it is collected now."""
    if (capture := session.capture(identity, "linear")) is not None:
        clock.micro_batch.collected.clear()  # each call stands for another layer
        capture.save(name, torch.ones(2, 3, 4) if tensor is None else tensor, dims="s b h")


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all indexes of a folder, in order of runs and counters."""
    session_end.flush()
    lines = [line for path in sorted(folder.glob("index_*.jsonl")) for line in read_index(path)]
    return sorted(lines, key=lambda line: (line["run_id"], line["counter"]))


def events(folder: Path) -> list[dict[str, Any]]:
    """Return the events of all indexes of a folder."""
    return [event for path in folder.glob("index_*.jsonl") for event in read_events(path)]
