"""Test grouped experts against separate experts, and one format against torch in float64."""

import json
from pathlib import Path

import pytest
import torch

from megatron.analysis.store import TensorStore
from megatron.analysis.verification.verify import Verification
from tests import forks
from tests.core.gpt_runs import loaded, one, pick
from tests.subprocesses import REPO, environment

experts = pytest.importorskip("megatron.core.transformer.moe.experts")
pytestmark = pytest.mark.skipif(
    not hasattr(experts, "GroupedMLP"), reason="this megatron-core has no grouped experts"
)
WORKER = Path(__file__).with_name("grouped_worker.py")
KEYS = ("module", "tensor_name", "micro_batch", "rank")
SAME = ("layer_idx", "format", "dims", "shape", "global_shape", "dtype", "phase", "operation")


def reports(folder: Path, *words: str, ranks: int = 1) -> list[dict]:
    result = forks.run(WORKER, folder, *words, ranks=ranks, env=environment(PYTHONPATH=REPO))
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def by_key(folder: Path) -> dict[str, dict]:
    return {json.dumps([r[key] for key in KEYS]): r for r in loaded(folder)}


def assert_equal_records(a: Path, b: Path) -> dict[str, dict]:
    first, second = by_key(a), by_key(b)
    assert first.keys() == second.keys()
    for key, record in first.items():
        assert [record[name] for name in SAME] == [second[key][name] for name in SAME], key
        assert torch.equal(record["tensor"], second[key]["tensor"]), key
    return first


@pytest.fixture(scope="module")
def mxfp8(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mxfp8")
    (report,) = reports(folder, "linear_mxfp8")
    return folder, report


def test_grouped_experts_compute_and_record_what_sequential_ones_do(mxfp8):
    folder, report = mxfp8
    assert report["sequential"] == report["grouped"] == report["grouped off"]
    records = assert_equal_records(folder / "sequential", folder / "grouped")
    assert len(records) == 4 * 2 * (2 * 5 + 1), "weights are saved once"
    names = {record["module"] for record in records.values()}
    experts = "layers.0.mlp.experts.local_experts"
    assert names == {f"{experts}.{n}.linear_fc{m}" for n in range(4) for m in (1, 2)}
    empty = pick(records.values(), module=f"{experts}.2.linear_fc1", tensor_name="input")
    assert [r["shape"] for r in empty] == [[0, 64], [0, 64]]


def test_the_audit_and_verify_know_the_experts(mxfp8):
    folder, _ = mxfp8
    (card,) = (folder / "grouped").glob("run_*.json")
    content = json.loads(card.read_text())
    assert content["not_called"] == []
    assert content["outside_of_the_audit"].keys() <= {"layers.0.mlp.router (TopKRouter)"}
    (audit,) = content["quantization"]
    assert sum(".local_experts." in line for line in audit["matmuls"]) == 8
    assert "mxfp8" in audit["matmuls"][0]
    verdict = Verification(TensorStore(folder / "grouped")).run()
    assert verdict.errors == []
    assert verdict.checked["results of linear layers, bit for bit"] > 0


def mx(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Quantize to MXFP8 (E4M3, 32 values, floor) in float64."""
    x = x.double().movedim(axis, -1)
    blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - 8)
    scale[largest == 0] = 1
    values = (blocks / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale
    return values.flatten(-2)[..., : x.shape[-1]].movedim(-1, axis)


def test_mxfp8_is_recomputed_in_float64(mxfp8):
    records = loaded(mxfp8[0] / "grouped")
    for layer in ("linear_fc1", "linear_fc2"):
        where = {"module": f"layers.0.mlp.experts.local_experts.1.{layer}"}
        weight = one(records, tensor_name="weight", **where)
        for batch in (0, 1):
            x, output, grad, of_input, of_weight = (
                one(records, tensor_name=name, micro_batch=batch, **where)
                for name in ("input", "output", "grad_output", "grad_input", "grad_weight")
            )
            assert len(x) > 2
            for result, expected in (
                (output, mx(x, 1) @ mx(weight, 1).t()),
                (of_input, mx(grad, 1) @ mx(weight, 0)),
                (of_weight, mx(grad, 0).t() @ mx(x, 0)),
            ):
                bound = 2**-7 * expected.abs() + 1e-5 * expected.abs().max()
                assert ((result.double() - expected).abs() <= bound).all()


def test_collecting_changes_nothing_with_the_kernel_and_without(tmp_path):
    (report,) = reports(tmp_path, "none")
    assert report["grouped"] == report["grouped off"] == report["sequential"]
    assert report["kernel"] == report["kernel off"] == report["grouped"]
    assert report["calls of kernel off"] == [4, 4, 4, 4]
    assert report["calls of kernel"] == [3, 3, 3, 3], "the expert without tokens is left out"
    records = assert_equal_records(tmp_path / "sequential", tmp_path / "grouped")
    assert {r["format"] for r in records.values()} == {None}
    assert_equal_records(tmp_path / "grouped", tmp_path / "kernel")


@pytest.mark.parametrize("kind", ["ep", "etp"])
def test_experts_on_two_ranks(tmp_path, kind):
    for report in reports(tmp_path, "linear_nvfp4:global", kind, ranks=2):
        assert report["sequential"] == report["grouped"] == report["grouped off"]
    records = assert_equal_records(tmp_path / "sequential", tmp_path / "grouped")
    numbers = {(r["rank"]["world"], r["module"].split(".")[5]) for r in records.values()}
    if kind == "ep":
        assert numbers == {(0, "0"), (0, "1"), (1, "2"), (1, "3")}
    else:
        weights = pick(records.values(), tensor_name="weight")
        assert {r["dims"] for r in weights} == {"o[etp] h", "o h[etp]"}
