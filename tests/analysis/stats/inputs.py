"""Tensors and sharded dumps that the tests of the statistics share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.tensor_record import TensorRecord
from tests.analysis.fake_dump import records, write_tensor


def heavy(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return values that are hard to quantize.

    They have outlier channels, tokens of many sizes, zeros of both signs, a block of zeros, and
    subnormal numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[..., ::16] *= 30
    x *= torch.randn((*shape[:-1], 1), generator=generator).mul(2).exp()
    flat = x.view(-1)
    flat[::97], flat[1::89] = 0.0, -0.0
    x.view(-1, shape[-1])[:35, :35] = 0
    flat[-3:] = torch.tensor([1e-39, -6e-8, 3e-6])
    return x.to(dtype)


def record_of(name: str, **changes: Any) -> TensorRecord:
    """Return the record of the first tensor with this name in a small dump, with changes."""
    all_records = (r for r, _, _ in records(run_id="r", quant_type="mxfp8", layers=1))
    record = next(r for r in all_records if r.tensor_name == name)
    return dataclasses.replace(record, **changes)


def write_shards(
    folder: Path,
    record: TensorRecord,
    shards: Sequence[torch.Tensor],
    *,
    group: str = "tp",
    sizes: dict[str, int] | None = None,
) -> None:
    """Write one file per shard, as the ranks of a parallel group do.

    sizes: further coordinates of all ranks
    """
    for rank, shard in enumerate(shards):
        place = {"world": rank, "world_size": len(shards), **(sizes or {})}
        place |= {group: rank, f"{group}_size": len(shards)}
        write_tensor(
            folder, dataclasses.replace(record, shape=list(shard.shape), rank=place), shard
        )
