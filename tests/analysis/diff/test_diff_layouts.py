"""Test `diff` on real runs: parallel layouts, ranks, micro-batches and quantization types."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megatron.analysis.diff.sides import Side
from megatron.analysis.store import TensorStore
from tests.analysis.diff.faults import add_to_first, diff, path_of, plant
from tests.analysis.fake_dump import records, values, write_tensor
from tests.analysis.verification.verifying import change_card


@pytest.mark.parametrize("layout", ["tp2sp", "cp2", "pp2"])
def test_two_ranks_agree_with_one(dumps, capsys, layout):
    """Sums run in a different order, except under pipeline parallelism."""
    options = () if layout == "pp2" else ("--max-relative-error", "1e-5", "--no-origins")
    status, lines = diff(capsys, dumps / "one", dumps / layout, *options)
    assert status == 0, lines[:20]
    assert "only in" not in "".join(lines[1:]).replace("0 only in A, 0 only in B", "")
    if layout == "pp2":
        assert "120 pairs of tensors agree: 120 identical" in lines[0]


def test_a_fault_in_one_shard_is_named_by_its_rank(dumps, copied, capsys):
    other = copied("tp2")
    where = {"layer": 1, "module": "linear_fc1", "tensor_name": "weight"}
    plant(path_of(other, rank=1, **where), add_to_first(1))
    status, lines = diff(capsys, dumps / "tp2", other)
    assert status == 1
    assert "decoder.layers.1.mlp.linear_fc1 weight, rank 1: 1 of " in lines[0]
    status, lines = diff(
        capsys, dumps / "one", other, "--max-relative-error", "1e-5", "--no-origins"
    )
    assert status == 1
    assert "decoder.layers.1.mlp.linear_fc1 weight, shards joined: " in lines[0]


def test_the_origin_of_joined_tensors(dumps, copied, capsys):
    """A wrong output is a local error if its inputs, joined from all ranks, do not explain it."""
    other = copied("cp2")
    for rank in range(2):
        where = {"layer": 0, "module": "core_attention", "tensor_name": "output", "rank": rank}
        plant(path_of(other, micro_batch=0, **where), lambda x: x.mul_(2))
    condition = "--max-relative-error", "1e-5"
    status, lines = diff(capsys, dumps / "one", other, *condition)
    assert status == 1
    assert lines[1].startswith(
        "Largest local error: iteration 1, micro-batch 0, forward, "
        "decoder.layers.0.self_attention.core_attention output, shards joined: the operation adds 1"
    )


def test_a_fault_in_one_micro_batch_is_named(dumps, copied, capsys):
    other = copied("one")
    where = {"layer": 0, "module": "linear_fc2", "tensor_name": "grad_output", "micro_batch": 1}
    plant(path_of(other, **where), add_to_first(1))
    status, lines = diff(capsys, dumps / "one", other)
    assert status == 1
    assert lines[0].startswith(
        "First difference: iteration 1, micro-batch 1, backward, "
        "decoder.layers.0.mlp.linear_fc2 grad_output: 1 of "
    )


def write_samples(folder: Path, *, ranks: int, gradient: float, **sizes: int) -> None:
    """Write one layer of a run with two samples, on one rank or on two data-parallel ranks."""
    folder.mkdir()
    for sample in range(2):
        rank, micro_batch = (sample, 0) if ranks == 2 else (0, sample)
        generator = torch.Generator().manual_seed(sample)
        of_layer = records(run_id="r", quant_type="bf16", layers=1)
        for number, (record, shape, scale) in enumerate(of_layer):
            tensor = values(shape, scale, generator)
            if record.tensor_name == "weight":
                tensor = torch.ones_like(tensor)
                if micro_batch:
                    continue
            record = dataclasses.replace(
                record,
                micro_batch=micro_batch,
                sample_idx=2 * sample,
                counter=number + 1 + 100 * micro_batch,
                rank={"world": rank, "world_size": ranks, "dp": rank, "dp_size": ranks} | sizes,
            )
            factor = gradient if record.operation == "backward" else 1.0
            write_tensor(folder, record, factor * tensor)
    card = {"arguments": {"global_batch_size": 4, "micro_batch_size": 2}}
    (folder / "run_r.json").write_text(json.dumps(card))


def test_samples_are_paired_over_other_numbers_of_data_parallel_ranks(tmp_path, capsys):
    """A run with half the micro-batches per rank has gradients that are twice as large."""
    write_samples(tmp_path / "one", ranks=1, gradient=1.0)
    write_samples(tmp_path / "two", ranks=2, gradient=2.0)
    status, lines = diff(capsys, tmp_path / "one", tmp_path / "two")
    assert status == 0, lines[:20]
    assert "28 pairs of tensors agree: 14 identical in every bit, 14 equal" in lines[0]
    assert any("the gradients of B are multiplied by 0.5" in line for line in lines)
    change_card(tmp_path / "two", arguments={})
    assert diff(capsys, tmp_path / "one", tmp_path / "two")[0] == 1


LOSS_SCALES = [
    # (global batch size, data-parallel ranks, context-parallel ranks), `calculate_per_token_loss`
    ((8, 1, 1), False),
    ((8, 2, 1), False),
    ((8, 1, 2), False),
    ((4, 1, 1), False),
    ((8, 2, 2), True),
]


def gradient_of_a_token(sizes: tuple[int, int, int], per_token: bool, tokens: int = 8) -> float:
    """Return d loss / d (loss of one token) in `forward_step_calc_loss` of megatron-core."""
    from megatron.core.pipeline_parallel.schedules import _upstream
    from megatron.core.transformer.transformer_config import TransformerConfig

    batch, data, context = sizes
    losses = torch.ones(tokens // context, requires_grad=True)
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=per_token
    )
    loss, _ = _upstream.forward_step_calc_loss(
        None,
        losses,
        lambda x: (x.sum(), torch.tensor(x.numel()), {}),
        config,
        None,
        False,
        batch // (2 * data),
        [],
        cp_group_size=context,
        is_last_stage=True,
    )
    return float(torch.autograd.grad(loss, losses)[0][0])


@pytest.mark.parametrize(("sizes", "per_token"), LOSS_SCALES)
def test_the_gradients_of_b_are_scaled_as_megatron_core_scales_the_loss(
    tmp_path, capsys, sizes, per_token
):
    """Gradients agree even if two runs divide the loss of a micro-batch by different numbers."""
    card = {"calculate_per_token_loss": per_token, "micro_batch_size": 2}
    for name, (batch, data, context) in (("one", (8, 1, 1)), ("other", sizes)):
        factor = gradient_of_a_token((batch, data, context), per_token)
        groups = {"dp_size": data, "cp": 0, "cp_size": context}
        write_samples(tmp_path / name, ranks=1, gradient=factor, **groups)
        change_card(tmp_path / name, arguments=card | {"global_batch_size": batch})
    status, lines = diff(capsys, tmp_path / "one", tmp_path / "other")
    assert status == 0, lines[:20]


def test_the_order_of_execution_does_not_depend_on_the_layout(dumps):
    orders = []
    for layout in ("one", "tp2", "pp2"):
        side = Side(TensorStore(dumps / layout))
        keys = sorted(side.tensors, key=side.order)
        orders.append([(key.batch, key.operation, key.layer_idx, key.module) for key in keys])
    weights = [[step for step in order if step[0] is not None] for order in orders]
    steps = [list(dict.fromkeys(order)) for order in weights]
    assert steps[0] == steps[1] == steps[2]


def test_what_a_type_adds_is_local(dumps, capsys):
    """The tensors that enter the first layer are equal in both runs, apart from their dtype."""
    status, lines = diff(capsys, dumps / "one", dumps / "mxfp8", "--format", "jsonl")
    assert status == 1
    pairs = [json.loads(line) for line in lines[1:]]
    first = next(pair for pair in pairs if pair.get("origin"))
    assert first["tensor_name"] == "output"
    assert first["module"] == "decoder.layers.0.self_attention.linear_qkv"
    assert first["local"] > 5 * first["inherited"]
    unknown = {pair["origin_unknown"] for pair in pairs if pair.get("origin_unknown")}
    assert unknown == set()
