"""Test that the benchmark of training steps runs and detects a type that is not applied."""

import subprocess
import sys

import pytest

from tests import forks
from tests.subprocesses import REPO, environment, run

sys.path.insert(0, str(REPO / "benchmarks"))

import training

sys.path.remove(str(REPO / "benchmarks"))

SCRIPT = REPO / "benchmarks" / "training.py"
#: Worker that only prints results. `trouble` is the code of its second step in the type `name`.
WORKER = """
import os, sys
name = os.environ.get("CUSTOM_QUANT_TYPE", "wheel")
first = {{"wheel": "7.5", "bf16": "7.5", "none": "7.5"}}.get(name, "7.25")
print("ready", 100, {gpu!r}, flush=True)
print("a line of a library", flush=True)
for number, _ in enumerate(sys.stdin):
    if number == 1 and name == {name!r}:
        {trouble}
    seconds = (3 if name == "mxfp8" else 2) * (number + 1)
    print(seconds, 140, first if number == 0 else len(name) + number, flush=True)
"""
OUT_OF_MEMORY = 'raise MemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")'
GPU = "NVIDIA H100 80GB HBM3"


def benchmark(*options: str):
    """Run the benchmark; its workers are forks that import megatron-core themselves."""
    python = forks.interpreter("libraries")
    return run([python, SCRIPT, "--quick", "--threads", "1", *options], env=environment())


def table(text: str) -> list[list[str]]:
    """Return the cells of each row of the table in a page, without its head."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [rows[0][0], rows[1][0]] == ["type", "---"]
    return rows[2:]


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """Return a function that lets the benchmark in this process run simulated workers."""

    def set_up(*, gpu: str = "", trouble: str = OUT_OF_MEMORY, name: str = "mxfp4") -> None:
        script = tmp_path / "simulated.py"
        script.write_text(WORKER.format(gpu=gpu, trouble=trouble, name=name))
        monkeypatch.setattr(training, "WORKER", script)

    set_up()
    return set_up


def test_it_times_the_wheel_and_a_type_beside_bf16():
    done = benchmark("--types", "wheel", "bf16", "mxfp8")
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert [row[0] for row in rows] == ["wheel", "bf16", "mxfp8"]
    assert float(rows[1][2]) == 1.0
    assert all(float(row[1]) > 0 for row in rows)
    assert "1 layers of width 128, sequences of 64, 2 micro-batches of 2 per step" in done.stdout
    assert "The types took turns" in done.stdout


def test_it_times_one_type_after_the_other():
    sizes = ("--sequences", "1", "--micro-batches", "1", "--recompute-attention")
    done = benchmark("--one-at-a-time", *sizes, "--types", "wheel", "bf16", "mxfp8")
    assert done.returncode == 0, done.stderr
    rows = table(done.stdout)
    assert [row[0] for row in rows] == ["wheel", "bf16", "mxfp8"]
    assert float(rows[1][2]) == 1.0
    assert "1 micro-batch of 1 per step, bf16, attention recomputed" in done.stdout
    assert "The types ran one after the other." in done.stdout


@pytest.mark.parametrize("mode", [(), ("--one-at-a-time",)])
def test_a_type_that_changes_nothing_is_an_error(mode):
    done = benchmark("--types", "bf16", "none", *mode)
    assert done.returncode == 1
    message = "[ERROR] the losses of none equal those of bf16, so none was not applied"
    assert message in done.stderr


def test_a_worker_that_waits_builds_its_model_after_the_first_line():
    command = [sys.executable, str(SCRIPT.with_name("training_worker.py")), "--layers", "1"]
    command += ["--hidden-size", "64", "--seq-length", "16", "--dtype", "fp32", "--wait"]
    captured = {"capture_output": True, "text": True, "timeout": 300}
    for lines, steps in (("\n", 0), ("\n\n", 1)):
        done = subprocess.run(
            command, input=lines, env=environment(OMP_NUM_THREADS="1"), **captured
        )
        assert done.returncode == 0, done.stderr
        printed = done.stdout.splitlines()
        assert sum(line.startswith("ready") for line in printed) == 1
        assert sum(line[:1].isdigit() for line in printed) == steps


def test_a_type_that_does_not_exist_ends_in_one_line():
    done = benchmark("--types", "mxfp5")
    assert done.returncode == 1
    assert "[ERROR] mxfp5 ended: " in done.stderr
    assert "unknown quantization type 'mxfp5'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "4"], "[ERROR] --layers cannot be combined with --model llama32-1b, "),
        (["--hidden-size", "64", "--layers", "4"], "remove them or use --model small"),
        (["--quick"], "remove --quick or use --model small"),
    ],
)
def test_options_that_contradict_the_model_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        training.parse(["--model", "llama32-1b", *options])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes_belong_to_the_small_model():
    small = training.parse(["--layers", "2"])
    assert (small.model, small.hidden_size, small.layers) == ("small", 1024, 2)
    large = training.parse(["--model", "llama32-1b"])
    assert (large.hidden_size, large.layers) == (None, None)


def test_a_type_that_runs_out_of_memory_leaves_the_other_results(simulated, tmp_path, capsys):
    simulated(gpu=GPU)
    output = tmp_path / "page.md"
    options = ["--model", "llama32-1b", "--one-at-a-time", "--rounds", "3", "--output", str(output)]
    assert training.main([*options, "--types", "wheel", "mxfp4", "bf16", "mxfp8"]) == 0
    text = output.read_text()
    assert table(text) == [
        ["wheel", "8", "1", "0.75 to 1.25", "140", "1", "40", "1"],
        ["mxfp4 (out of memory)", *["-"] * 7],
        ["bf16", "8", "1", "0.75 to 1.25", "140", "1", "40", "1"],
        ["mxfp8", "12", "1.5", "1.125 to 1.875", "140", "1", "40", "1"],
    ]
    assert text.count(GPU) == 1
    assert "\nLlama 3.2 1B, sequences of 256, 2 micro-batches of 2 per step, bf16; " in text
    assert "mxfp4: out of memory" in capsys.readouterr().err


def test_ratios_are_missing_if_bf16_runs_out_of_memory(simulated, capsys):
    simulated(trouble='raise MemoryError("Triton Error [CUDA]: out of memory")', name="bf16")
    assert training.main(["--quick", "--one-at-a-time", "--types", "bf16", "mxfp8"]) == 0
    assert table(capsys.readouterr().out) == [
        ["bf16 (out of memory)", *["-"] * 7],
        ["mxfp8", "12", "-", "-", "140", "-", "40", "-"],
    ]


@pytest.mark.parametrize(
    ("mode", "trouble", "message"),
    [
        ((), OUT_OF_MEMORY, "(--one-at-a-time measures one model at a time)"),
        (("--one-at-a-time",), "raise ValueError('no such kernel')", "no such kernel"),
    ],
)
def test_other_failures_end_the_benchmark(mode, trouble, message, simulated):
    simulated(trouble=trouble)
    with pytest.raises(SystemExit, match="mxfp4 ended: ") as ended:
        training.main(["--quick", *mode, "--types", "bf16", "mxfp4", "mxfp8"])
    assert message in str(ended.value)


@pytest.mark.parametrize("mode", [(), ("--one-at-a-time",)])
def test_on_a_gpu_only_first_losses_are_compared(mode, simulated, capsys):
    options = ["--quick", *mode, "--types", "wheel", "bf16"]
    assert training.main(options) == 1, "the later losses differ"
    assert "the losses of bf16 and of plain megatron-core differ" in capsys.readouterr().err
    simulated(gpu=GPU)
    assert training.main(options) == 0
    assert training.main([*options, "none"]) == 1
    message = "the first losses of none equal those of bf16, so none was not applied in the forward"
    assert message in capsys.readouterr().err


def test_llama32_1b_has_the_published_number_of_parameters():
    """Build the model with tensors that have a shape and no memory."""
    code = f"""
import os, sys
os.environ["TORCHDYNAMO_DISABLE"] = "1"
sys.path[:0] = [{str(REPO)!r}, {str(REPO / "benchmarks")!r}]
sys.argv = ["", "--model", "llama32-1b", "--seq-length", "2048", "--dtype", "bf16",
            "--recompute-attention"]
import training_worker
options = training_worker.parse()
training_worker.load_cpu_backend()
from functools import partial
import torch
from megatron.core import transformer
from torch._subclasses.fake_tensor import FakeTensorMode
# Both would read the contents of tensors, or replace tensors that others refer to.
transformer.TransformerConfig = partial(transformer.TransformerConfig, perform_initialization=False)
torch.nn.Module.to = lambda self, *args: self
with FakeTensorMode(allow_non_fake_inputs=True):
    model = training_worker.build(options)
print(sum(parameter.numel() for parameter in model.parameters()))
print(model.rotary_base, model.config.recompute_granularity, model.config.recompute_modules)
print(int(next(training_worker.batches(options)).max()) > training_worker.VOCAB)
"""
    done = forks.run("-c", code, libraries_only=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-3:] == [
        "1235814400",
        "500000 selective ['core_attn']",
        "True",
    ]
