"""Test the collection of Transformer Engine's modules with a stand-in, which runs on a CPU."""

import json
from pathlib import Path

import pytest

from megatron.analysis.store import TensorStore
from megatron.analysis.study.operands import NORM_INSIDE
from megatron.analysis.verification.verify import Verification
from megatron.tensor_record import ON_REQUEST, TENSOR_NAMES
from tests import forks
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).with_name("te_worker.py")
STAND_INS = Path(__file__).with_name("stand_ins")
GPT = {
    "linear_qkv": "LayerNormLinear",
    "core_attention": "DotProductAttention",
    "linear_proj": "Linear",
}
experts = pytest.importorskip("megatron.core.transformer.moe.experts")
pytestmark = pytest.mark.skipif(
    not hasattr(experts, "GroupedMLP"), reason="the stand-in is for megatron-core 0.16"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("te")
    env = environment(PYTHONPATH=f"{REPO}:{STAND_INS}", TORCHDYNAMO_DISABLE="1")
    done = forks.run(WORKER, folder, env=env, libraries_only=True)
    assert (folder / "report.json").exists(), done.stderr[-3000:]
    return folder, json.loads((folder / "report.json").read_text())


def by_module(store: TensorStore) -> dict[str, tuple[str | None, set[str]]]:
    return {
        module: (rows["implementation"].iloc[0], set(rows["tensor_name"]))
        for module, rows in store.records.groupby("module")
    }


def names(layer_type: str) -> set[str]:
    return set(TENSOR_NAMES[layer_type]) - set(ON_REQUEST)


def test_every_module_is_collected_and_no_result_changes(run):
    folder, report = run
    assert report["gpt"]["on"] == report["gpt"]["off"]
    assert report["own"]["on"] == report["own"]["off"]
    modules = by_module(TensorStore(folder / "gpt"))
    expected = {
        f"decoder.layers.{layer}.self_attention.{name}": kind
        for layer in (0, 1)
        for name, kind in GPT.items()
    }
    expected |= {
        "decoder.layers.0.mlp.linear_fc1": "LayerNormLinear",
        "decoder.layers.0.mlp.linear_fc2": "Linear",
    }
    for expert in (0, 1):
        for linear in ("linear_fc1", "linear_fc2"):
            name = f"decoder.layers.1.mlp.experts.local_experts.{expert}.{linear}"
            expected[name] = "GroupedLinear"
    kinds = {name: f"transformer_engine.{kind}" for name, kind in expected.items()}
    assert {name: kind for name, (kind, _) in modules.items() if kind is not None} == kinds
    for name in expected:
        layer_type = "attention" if name.endswith("core_attention") else "linear"
        assert modules[name][1] == names(layer_type)


def test_verify_accepts_the_records_and_says_what_it_cannot_check(run):
    for model in ("gpt", "own"):
        verdict = Verification(TensorStore(run[0] / model)).run()
        assert verdict.errors == []
        (reason,) = verdict.unchecked
        assert reason.startswith("computed by Transformer Engine: the formats")


def test_modules_of_transformer_engine_itself(run):
    store = TensorStore(run[0] / "own")
    modules = by_module(store)
    assert modules == {
        "into": (NORM_INSIDE, names("linear")),
        "attention": ("transformer_engine.DotProductAttention", names("attention")),
        "out": ("transformer_engine.Linear", names("linear")),
    }
    query = store.select(module="attention", tensor_name="query").iloc[0]
    assert (query["dims"], query["shape"]) == ("b s a[tp] d", [2, 8, 4, 8])
    card = store.run_card(query["run_id"])
    assert card["not_reached"] == ["mlp (LayerNormMLP)"]
    lines = card["quantization"][0]["matmuls"]
    assert len(lines) == 4
    assert all("computed by Transformer Engine" in line for line in lines)


def test_a_format_is_refused_with_the_flag_to_use(run):
    _, report = run
    for key, module in (
        ("format", "core_attention, a TEDotProductAttention of Transformer Engine"),
        ("attention format", "core_attention, a TEDotProductAttention of Transformer Engine"),
        ("own format", "into, a LayerNormLinear of Transformer Engine"),
    ):
        assert module in report[key]
        assert "kernels of its own; give --transformer-impl local" in report[key]
    assert "cannot be collected: it adds up its weight gradients" in report["fused"]
    assert "--no-gradient-accumulation-fusion" in report["fused"]


def test_shards_are_named_as_transformer_engine_splits_them(run):
    sharded = run[1]["sharded"]
    assert sharded["column True"]["input"] == "s[tp] b h"
    assert sharded["column True"]["output"] == "s b o[tp]"
    assert sharded["row True"]["output"] == "s[tp] b o"
    assert sharded["row False"]["output"] == "s b o", "the sum over the ranks"
    assert sharded["duplicated"]["grad_weight"] == "o h | partial[tp]"
