"""Test what real runs of a small GPT collect: every tensor, of the right micro-batch and shard."""

import json
from collections import Counter

import pytest
import torch

from megatron.analysis.store import TensorStore
from megatron.core._overlay import installed_release
from megatron.fake_quant import get_format
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import GemmFormats
from megatron.tensor_record import (
    ON_REQUEST,
    TENSOR_NAMES,
    TensorRecord,
    parse_filename,
    read_index,
)
from tests import forks
from tests.core.gpt_runs import (
    PER_LAYER,
    WEIGHTS,
    WORKER,
    collect,
    expected,
    one,
    pick,
)
from tests.subprocesses import REPO, environment

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


def by_module(records):
    """Group the tensors of linear layers by module, iteration, rank and micro-batch."""
    groups: dict[tuple, dict] = {}
    weights: dict[tuple, torch.Tensor] = {}
    for r in pick(records, layer_type="linear", recomputed=False):
        of_iteration = (r["module"], r["iteration"], r["rank"]["world"])
        if r["tensor_name"] == "weight":
            assert of_iteration not in weights, "stored once"
            weights[of_iteration] = r["tensor"]
        else:
            key = (*of_iteration, r["micro_batch"])
            groups.setdefault(key, {})[r["tensor_name"]] = r["tensor"]
    return {key: group | {"weight": weights[key[:3]]} for key, group in groups.items()}


def assert_each_gemm_is_reproduced(records, formats: GemmFormats) -> None:
    """Output and gradients follow bit for bit from the saved operands.

    This is also the proof of identity: a gradient filed under a wrong micro-batch would not fit.
    """
    groups = by_module(records)
    assert groups
    for key, tensors in groups.items():
        x = tensors["input"].flatten(0, 1).requires_grad_()
        w = tensors["weight"].requires_grad_()
        y = quantized_matmul(x, w, formats)
        dx, dw = torch.autograd.grad(y, (x, w), tensors["grad_output"].flatten(0, 1))
        assert torch.equal(y, tensors["output"].flatten(0, 1)), key
        assert torch.equal(dx, tensors["grad_input"].flatten(0, 1)), key
        assert torch.equal(dw, tensors["grad_weight"]), key


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    dump = tmp_path_factory.mktemp("single") / "dump"
    options = ("--micro-batches", "2", "--iterations", "2", "--dtype", "bf16")
    return dump, collect(dump, *options, CUSTOM_QUANT_TYPE="mxfp8")


def test_every_tensor_of_every_layer_and_micro_batch_is_there(single):
    _, records = single
    assert len(records) == expected(layers=2, micro_batches=2, iterations=2)
    for layer_type, names in TENSOR_NAMES.items():
        found = {r["tensor_name"] for r in pick(records, layer_type=layer_type)}
        assert found == set(names) - set(ON_REQUEST)
    counts = Counter((r["iteration"], r["micro_batch"], r["layer_idx"]) for r in records)
    of = {0: PER_LAYER, 1: PER_LAYER - WEIGHTS}  # the weights are saved with the first micro-batch
    assert counts == {(i, m, n): of[m] for i in (1, 2) for m in (0, 1) for n in (0, 1)}
    modules = {r["module"].rpartition(".")[2] for r in pick(records, layer_type="linear")}
    assert modules == set(LINEARS), "the LM head is not collected"


def test_file_names_say_what_the_metadata_says(single):
    dump, records = single
    assert len(list(dump.glob("*.pt"))) == len(records) == len({r["file"] for r in records})
    for r in records:
        parsed = parse_filename(r["file"])
        for key in parsed.keys() - {"rank"}:
            assert parsed[key] == r[key]
        assert TensorRecord.from_metadata(r).filename == r["file"]
    assert sorted(r["counter"] for r in records) == list(range(1, len(records) + 1))


def test_operations_and_phases(single):
    _, records = single
    for r in records:
        gradient = r["tensor_name"].startswith("grad_")
        assert r["operation"] == ("backward" if gradient else "forward")
        enters = r["tensor_name"] in ("input", "weight", "query", "key", "value", "grad_output")
        assert r["phase"] == ("pre" if enters else "post")
        assert r["format"] == ("mxfp8" if enters else None)
        assert r["component"] == ("FA" if r["layer_type"] == "attention" else "linear")
        assert r["tensor"].dtype == torch.bfloat16
        assert r["shape"] == list(r["tensor"].shape)


def test_only_a_tensors_own_elements_are_stored(single):
    _, records = single
    for r in records:
        own = r["tensor"].numel() * r["tensor"].element_size()
        assert r["tensor"].untyped_storage().nbytes() == own
        assert r["bytes"] < own + 8192, "metadata and zip headers only"


def test_linear_outputs_and_gradients_follow_from_the_saved_operands(single):
    assert_each_gemm_is_reproduced(single[1], GemmFormats.uniform(get_format("mxfp8")))


def test_attention_follows_from_the_saved_operands(single):
    """Forward and backward follow from the definition of the matmuls and autograd's softmax.

    Two heads share each key.
    """
    _, records = single
    where = {"layer_type": "attention", "iteration": 2, "micro_batch": 1, "layer_idx": 1}
    q, k, v = (
        one(records, tensor_name=name, **where).requires_grad_()
        for name in ("query", "key", "value")
    )
    out, dout, dq, dk, dv = (
        one(records, tensor_name=name, **where)
        for name in ("output", "grad_output", "grad_query", "grad_key", "grad_value")
    )
    assert q.shape == (32, 2, 4, 16)
    assert k.shape == v.shape == (32, 2, 2, 16)
    formats = GemmFormats.uniform(get_format("mxfp8"))
    heads = lambda x: x.permute(1, 2, 0, 3)  # noqa: E731  [s, b, a, d] -> [b, a, s, d]
    keys, values = (x.repeat_interleave(2, dim=2) for x in (k, v))
    scores = quantized_matmul(heads(q), heads(keys), formats, alpha=0.25)
    mask = torch.ones(32, 32).triu(1).bool()
    probs = scores.float().masked_fill(mask, -1e4).softmax(-1).bfloat16()
    context = quantized_matmul(probs, heads(values).mT, formats).permute(2, 0, 1, 3).flatten(2)
    # the model multiplies by the scale inside of the matmul, in fp32: one bf16 rounding
    torch.testing.assert_close(context, out, rtol=2e-2, atol=2e-2)
    for ours, saved in zip(
        torch.autograd.grad(context, (q, k, v), dout), (dq, dk, dv), strict=True
    ):
        error = (ours - saved).float().norm() / saved.float().norm()
        assert error < 0.05


def test_the_run_card_tells_the_run(single):
    dump, records = single
    (path,) = dump.glob("run_*.json")
    card = json.loads(path.read_text())
    assert path.name == f"run_{card['run_id']}.json"
    assert {r["run_id"] for r in records} == {card["run_id"]}
    assert card["quant_type"] == "mxfp8"
    assert card["formats"][0] == "linear: mxfp8 (environment variable CUSTOM_QUANT_TYPE)"
    assert card["versions"]["megatron-core"] == installed_release()


def test_pipeline_keeps_micro_batches_and_global_layer_numbers(tmp_path):
    """Under 1F1B with more micro-batches than stages, a backward pass follows a later forward."""
    options = ("--pp", "2", "--micro-batches", "4", "--layers", "4")
    records = collect(tmp_path / "dump", *options, ranks=2)
    assert len(records) == expected(layers=4, micro_batches=4)
    for rank in (0, 1):
        mine = [r for r in records if r["rank"]["world"] == rank]
        assert {r["layer_idx"] for r in mine} == {2 * rank, 2 * rank + 1}
        assert {r["module"].split(".")[2] for r in mine} == {str(2 * rank), str(2 * rank + 1)}
        assert {(r["rank"]["pp"], r["rank"]["pp_size"]) for r in mine} == {(rank, 2)}
        assert all(f"_rank0{rank}_" in r["file"] for r in mine)
    assert_each_gemm_is_reproduced(records, GemmFormats())


def test_interleaved_pipeline(tmp_path):
    options = ("--pp", "2", "--vpp", "2", "--micro-batches", "4", "--layers", "4")
    records = collect(tmp_path / "dump", *options, ranks=2)
    assert len(records) == expected(layers=4, micro_batches=4)
    layers = {
        rank: {r["layer_idx"] for r in records if r["rank"]["world"] == rank} for rank in (0, 1)
    }
    assert layers == {0: {0, 2}, 1: {1, 3}}
    assert_each_gemm_is_reproduced(records, GemmFormats())


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_shards_carry_their_coordinates(tmp_path, sequence_parallel):
    """The shards of TP=2, joined by `dims`, equal the tensors of one rank."""
    extra = ("--sequence-parallel",) if sequence_parallel else ()
    records = collect(
        tmp_path / "dump",
        "--tp",
        "2",
        *extra,
        "--micro-batches",
        "1",
        ranks=2,
        CUSTOM_QUANT_TYPE="mxfp8",
    )
    assert len(records) == 2 * PER_LAYER * 2
    assert_each_gemm_is_reproduced(records, GemmFormats.uniform(get_format("mxfp8")))
    for layer_idx, module, name in {
        (r["layer_idx"], r["module"], r["tensor_name"]) for r in records
    }:
        shards = pick(records, layer_idx=layer_idx, module=module, tensor_name=name)
        shards.sort(key=lambda r: r["rank"]["tp"])
        assert [r["rank"]["tp"] for r in shards] == [0, 1]
        letters, _, partial = shards[0]["dims"].partition(" | ")
        split = [i for i, letter in enumerate(letters.split()) if letter.endswith("[tp]")]
        if split:
            whole = torch.cat([r["tensor"] for r in shards], dim=split[0])
            assert not torch.equal(shards[0]["tensor"], shards[1]["tensor"])
        elif partial:
            whole = shards[0]["tensor"] + shards[1]["tensor"]
        else:
            whole = shards[0]["tensor"]
            assert torch.equal(whole, shards[1]["tensor"]), f"{module} {name} are not replicas"
        assert list(whole.shape) == shards[0]["global_shape"] == shards[1]["global_shape"]


def test_more_ranks_than_query_groups_hold_copies_of_keys_and_parts_of_their_gradients(tmp_path):
    """The joined gradients equal those that autograd computes for the joined tensors."""
    options = ("--tp", "4", "--layers", "1", "--micro-batches", "1")
    records = collect(tmp_path / "dump", *options, ranks=4)
    keys = pick(records, tensor_name="key")
    assert [r["dims"] for r in keys] == ["s b g[tp:2] d"] * 4
    assert [r["global_shape"] for r in keys] == [[32, 2, 2, 16]] * 4
    store = TensorStore(tmp_path / "dump")
    q, k, v, out, dout, dq, dk, dv = (
        store.load_global(layer_type="attention", tensor_name=name)
        for name in (
            *("query", "key", "value", "output"),
            *("grad_output", "grad_query", "grad_key", "grad_value"),
        )
    )
    assert (q.shape, k.shape, dv.shape) == ((32, 2, 4, 16), (32, 2, 2, 16), (32, 2, 2, 16))
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    heads = [x.permute(1, 2, 0, 3) for x in (q, *(y.repeat_interleave(2, 2) for y in (k, v)))]
    context = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
    context = context.permute(2, 0, 1, 3).flatten(2)
    torch.testing.assert_close(context, out)
    expected = torch.autograd.grad(context, (q, k, v), dout)
    for ours, saved in zip(expected, (dq, dk, dv), strict=True):
        torch.testing.assert_close(saved, ours)


def test_recomputed_forwards_are_marked_and_equal_the_first(tmp_path):
    records = collect(tmp_path / "dump", "--recompute", "--micro-batches", "2", "--dtype", "bf16")
    again = pick(records, recomputed=True, operation="forward")
    assert {(r["layer_idx"], r["micro_batch"]) for r in again} == {
        (i, m) for i in (0, 1) for m in (0, 1)
    }
    assert not pick(again, tensor_name="weight"), "weights are already stored"
    for r in again:
        same = {key: r[key] for key in ("module", "micro_batch", "tensor_name", "operation")}
        assert torch.equal(r["tensor"], one(records, recomputed=False, **same))
    backward = pick(records, operation="backward")
    assert len(backward) == 2 * 2 * (4 * 3 + 4), "each gradient once, from the recomputed graph"


def test_by_default_one_micro_batch_of_one_iteration(tmp_path):
    """The environment alone starts the collection if the trainer never calls `configure`."""
    dump = tmp_path / "dump"
    env = environment(PYTHONPATH=REPO, TENSOR_SAVE_ENABLED="true", TENSOR_SAVE_DIR=dump)
    options = ("--micro-batches", "3", "--iterations", "3")
    result = forks.run(WORKER, *options, ranks=1, cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    records = [r for path in dump.glob("index_*.jsonl") for r in read_index(path)]
    assert len(records) == 2 * PER_LAYER
    assert {(r["iteration"], r["micro_batch"]) for r in records} == {(1, 0)}
