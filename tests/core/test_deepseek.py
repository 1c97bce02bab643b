"""Test MLA and experts, as in DeepSeek-V2: exact without a format, and quantized and collected."""

import json
from pathlib import Path

import pytest
import torch

from megatron.core._overlay import installed_release
from megatron.tensor_record import read_index
from tests import forks
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).with_name("deepseek_worker.py")
SEQUENCE = ("--tp", "2", "--sequence-parallel")
EXPERTS = ("--ep", "2")
FUSED = ("--dense", "--q-lora-rank", "24", "--fused")
since_0_19 = pytest.mark.skipif(
    installed_release() < "0.19", reason="FusedMLASelfAttention is not sharded before 0.19"
)


def reports(folder: Path, env: dict[str, str], ranks: int, *options: str) -> list[dict]:
    folder.mkdir(parents=True)
    env = env | {"REPORT_DIR": str(folder)}
    result = forks.run(WORKER, *options, ranks=ranks, cwd=folder, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def collecting(dump: Path, **variables: str) -> dict[str, str]:
    saving = {"TENSOR_SAVE_ENABLED": "true", "TENSOR_SAVE_DIR": dump}
    return environment(PYTHONPATH=REPO, **saving, **variables)


def records(dump: Path) -> list[dict]:
    """Return the index lines of all ranks, each with its tensor."""
    found = [r for path in sorted(dump.glob("index_*.jsonl")) for r in read_index(path)]
    for record in found:
        record["tensor"] = torch.load(dump / record["file"], weights_only=True)["tensor"]
    return found


def pick(found: list[dict], **wanted) -> list[dict]:
    return [r for r in found if all(r[key] == value for key, value in wanted.items())]


CASES = [
    pytest.param(1, ("--dtype", "bf16", "--attention-dropout", "0.1"), id="bf16-dropout"),
    pytest.param(2, ("--tp", "2", "--dense"), id="mla-tp2"),
    pytest.param(2, (*SEQUENCE, "--q-lora-rank", "24"), id="tp2-sequence-compressed-queries"),
    pytest.param(2, (*FUSED, "--tp", "2"), id="tp2-fused", marks=since_0_19),
    pytest.param(2, (*FUSED, *SEQUENCE), id="tp2-sequence-fused", marks=since_0_19),
    pytest.param(2, ("--pp", "2", "--micro-batches", "3"), id="pp2"),
    pytest.param(2, EXPERTS, id="ep2"),
    pytest.param(2, (), id="dp2"),
    pytest.param(1, ("--recompute", "full"), id="recompute", marks=pytest.mark.slow),
    pytest.param(1, ("--recompute", "mla_up_proj"), id="recompute-mla", marks=pytest.mark.slow),
    pytest.param(1, ("--recompute", "moe"), id="recompute-experts", marks=pytest.mark.slow),
    pytest.param(
        2, (*EXPERTS, "--dispatcher", "allgather"), id="ep2-allgather", marks=pytest.mark.slow
    ),
    pytest.param(
        2, (*SEQUENCE, *EXPERTS, "--etp", "1"), id="tp2-whole-experts", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("ranks", "options"), CASES)
def test_loss_gradients_and_random_state_equal_the_mended_wheel(tmp_path, ranks, options):
    """Off means off. Unpatched megatron-core cannot run this model, so the worker patches it."""
    plain = reports(tmp_path / "plain", environment(), ranks, *options, "--plain")
    off = reports(tmp_path / "off", environment(PYTHONPATH=REPO), ranks, *options)
    on = reports(tmp_path / "on", collecting(tmp_path / "dump"), ranks, *options)
    for a, b, c in zip(plain, off, on, strict=True):
        for file in ("layers", "attention"):
            assert not Path(a[file]).is_relative_to(REPO / "megatron")
            assert Path(b[file]).is_relative_to(REPO / "megatron")
        assert a["grads"]
        for key in ("losses", "grads", "rng", "tracker"):
            assert a[key] == b[key], f"{key} differ although there is no format or collection"
            assert b[key] == c[key], f"{key} differ when tensors are collected"
    assert list((tmp_path / "dump").glob("*.pt")), "the collecting run collected nothing"


@pytest.fixture(scope="module")
def spread(tmp_path_factory) -> list[dict]:
    """Return what two expert-parallel ranks collect in MXFP8."""
    folder = tmp_path_factory.mktemp("spread")
    reports(folder / "run", collecting(folder / "dump", CUSTOM_QUANT_TYPE="mxfp8"), 2, *EXPERTS)
    return records(folder / "dump")


def test_an_expert_has_its_global_number_on_every_rank(spread):
    for rank, numbers in ((0, {"0", "1"}), (1, {"2", "3"})):
        names = {r["module"] for r in spread if r["rank"]["world"] == rank}
        experts = {name for name in names if ".local_experts." in name}
        assert {name.split(".local_experts.")[1].split(".")[0] for name in experts} == numbers
        assert "decoder.layers.0.mlp.linear_fc1" in names, "the first layer is dense"
        assert "decoder.layers.2.mlp.shared_experts.linear_fc2" in names


def test_an_expert_records_the_tokens_that_it_got(spread):
    for layer in (1, 2):
        tokens = 0
        for expert in range(4):
            name = f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1"
            (given,) = pick(spread, module=name, tensor_name="input")
            (gradient,) = pick(spread, module=name, tensor_name="grad_input")
            assert given["dims"] == "t h"
            assert given["shape"] == gradient["shape"]
            tokens += given["shape"][0]
        assert tokens == 2 * 2 * 32 * 2, "ranks, sequences, tokens, and experts of each token"


def test_heads_of_values_are_smaller_than_those_of_keys(spread):
    for name, size in (("query", 24), ("key", 24), ("value", 12), ("grad_value", 12)):
        found = pick(spread, layer_type="attention", tensor_name=name)
        assert len(found) == 2 * 3, "ranks and layers"
        for record in found:
            assert record["shape"] == [32, 2, 4, size]
            assert torch.count_nonzero(record["tensor"])
    for record in pick(spread, layer_type="attention", tensor_name="output"):
        assert record["shape"] == [32, 2, 4 * 12]


@pytest.mark.parametrize("quant_type", ["none", "mxfp8"])
def test_experts_without_tokens(tmp_path, quant_type):
    """Some of 32 experts get none of 64 tokens, and their tensors are recorded empty."""
    options = ("--experts", "32", "--topk", "1")
    env = collecting(tmp_path / "dump", CUSTOM_QUANT_TYPE=quant_type)
    (report,) = reports(tmp_path / "run", env, 1, *options)
    if quant_type == "none":
        (plain,) = reports(tmp_path / "plain", environment(), 1, *options, "--plain")
        assert report["grads"] == plain["grads"]
    found = records(tmp_path / "dump")
    empty = [r for r in found if r["tensor_name"] == "input" and r["shape"][0] == 0]
    assert empty
    for record in empty:
        (gradient,) = pick(found, module=record["module"], tensor_name="grad_weight")
        assert not gradient["tensor"].any()


SNIPPET = f"""
import sys
sys.path.insert(0, {str(WORKER.parent)!r})
import deepseek_worker
options = deepseek_worker.parse([])
deepseek_worker.start(options)
model = deepseek_worker.build(options).module
"""


def test_every_linear_layer_is_quantized_but_the_router_and_the_lm_head():
    code = SNIPPET + (
        "from megatron.core.low_precision import matmul_audit, program_end\n"
        "program_end.leave_exit_to_launcher()  # no model runs\n"
        "found = matmul_audit.matmuls([model], 32, 1)\n"
        "high = {each.module.rpartition('.')[2] for each in found if not each.quantized}\n"
        "assert high == {'router', 'output_layer'}, high\n"
        "names = {each.module for each in found if each.quantized == 3}\n"
        "layer = 'decoder.layers.1.'\n"
        "linear = {name.removeprefix(layer) for name in names if name.startswith(layer)}\n"
        "print(*sorted(linear), sep='\\n')\n"
    )
    env = environment(PYTHONPATH=REPO, CUSTOM_QUANT_TYPE="mxfp8")
    result = forks.run("-c", code, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    experts = [
        f"mlp.experts.local_experts.{number}.linear_{fc}"
        for number in range(4)
        for fc in ("fc1", "fc2")
    ]
    shared = ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    attention = ("core_attention", "linear_kv_down_proj", "linear_kv_up_proj", "linear_proj")
    attention = [f"self_attention.{name}" for name in (*attention, "linear_q_proj")]
    assert result.stdout.split() == [*experts, *shared, *attention]


def test_the_audit_names_modules_without_the_prefixes_of_wrappers():
    code = SNIPPET.replace(".module\n", "\n") + (
        "from megatron.core.low_precision import matmul_audit\n"
        "assert hasattr(model, 'module'), 'the model is wrapped'\n"
        "print(*(each.module for each in matmul_audit.matmuls([model], 32, 1)), sep='\\n')\n"
    )
    result = forks.run("-c", code, env=environment(PYTHONPATH=REPO))
    assert result.returncode == 0, result.stderr[-3000:]
    names = result.stdout.split()
    assert "decoder.layers.1.mlp.router" in names
    assert not [name for name in names if name.startswith("module.")]
