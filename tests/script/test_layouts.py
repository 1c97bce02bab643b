"""Test the options for processes, machines and parallelism: what is passed on or refused."""

from __future__ import annotations

import os
import re
import shlex
import sys

import pytest

from configs import launch
from configs.models import MODELS
from configs.parallelism import tensor_sizes
from tests.published import flags_of
from tests.script.drivers import value
from tests.subprocesses import REPO, environment, run

CELL = ("--model", "llama31-8b", "--dataset", "wikipedia", "--quantization", "bf16")
DEEPSEEK = ("--model", "deepseek2_lite", "--dataset", "dolma", "--quantization", "mxfp8")
TINY = ("--preset", "tiny")


def test_cluster_options_pass_through(dry, monkeypatch):
    cluster = ("--nnodes", "2", "--nproc-per-node", "8", "--node-rank", "1")
    words, _ = dry(*CELL, *cluster, "--master-addr", "a.b", "--tp", "2", "--pp", "2", "--cp", "2")
    assert words[1:3] == ["-m", "torch.distributed.run"]
    assert value(words, "--node-rank") == "1"
    assert value(words, "--master-port") == "6000"
    assert "--standalone" not in words
    for flag in ("tensor-model", "pipeline-model", "context"):
        assert value(flags_of(words), f"--{flag}-parallel-size") == "2"
    assert "--sequence-parallel" in words
    words, _ = dry(*DEEPSEEK, "--nproc-per-node", "4", "--ep", "4")
    assert value(words, "--expert-model-parallel-size") == "4"
    for name, text in zip(("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR"), "8201", strict=True):
        monkeypatch.setenv(name, text)
    words, _ = dry(*CELL)
    assert [value(words, flag) for flag in ("--nproc-per-node", "--nnodes")] == ["8", "2"]
    assert [value(words, flag) for flag in ("--node-rank", "--master-addr")] == ["0", "1"]


def test_one_machine_may_have_a_number_all_the_same(dry, monkeypatch):
    """The options and variables for several machines are ignored on a single machine."""
    words, _ = dry(*CELL, *TINY, "--nnodes", "1", "--node-rank", "0", "--master-addr", "a")
    assert "--node-rank" not in words
    monkeypatch.setenv("NODE_RANK", "3")
    monkeypatch.setenv("MASTER_ADDR", "a")
    assert "--node-rank" not in dry(*CELL, *TINY)[0]


def test_a_default_batch_grows_to_fit_the_ranks(dry):
    words, said = dry(*CELL, *TINY, "--nproc-per-node", "3")
    assert value(words, "--global-batch-size") == "6"
    assert "The global batch is 6 sequences, not 4: 3 copies" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--tp", "3"),
            "--tp 3 does not fit 32 attention heads, 8 of keys and values; --tp 1, 2, "
            "4, 8, 16 or 32 would fit",
        ),
        (
            ("--pp", "3"),
            "--pp 3 does not divide 32 layers; --pp 1, 2, 4, 8, 16 or 32 would fit, or "
            "a first stage of another size: `-- --decoder-first-pipeline-num-layers 10`",
        ),
        (("--ep", "2"), "--ep 2, but this model has no experts; leave --ep out"),
        (
            ("--nproc-per-node", "6"),
            "6 process(es) cannot be cut into tp x pp x cp = 4 x 1 x 1; "
            "start a multiple of 4 (--nproc-per-node x --nnodes = 8)",
        ),
        (
            ("--cp", "3", "--nproc-per-node", "12"),
            "--seq-length 8192 cannot be cut into 24 equal "
            "parts, as --tp 4 and --cp 3 need; 8184 would fit",
        ),
        (
            ("--global-batch-size", "7"),
            "--global-batch-size 7 is not a multiple of --micro-batch-size "
            "1 x 2 copies of the model; 6 or 8 would fit",
        ),
        (
            ("--nnodes", "2"),
            "--nnodes is 2, but the first machine is not given; give its name in --master-addr",
        ),
        (
            ("--nnodes", "2", "--master-addr", "a", "--node-rank", "2"),
            "--node-rank is 2, but 2 machines have the ranks 0 to 1",
        ),
        (
            ("--node-rank", "1", "--master-addr", "a"),
            "--node-rank 1 belongs to a run on several "
            "machines, but their number is not given; give the number of machines in "
            "--nnodes (or NNODES)",
        ),
        (("--node-rank", "0"), "--node-rank 0 belongs to a run on several machines, but their"),
        (("--master-addr", "a"), "--master-addr a belongs to a run on several machines, but their"),
        (
            ("--nnodes", "1", "--node-rank", "1"),
            "--node-rank 1 belongs to a run on several machines, but --nnodes is 1",
        ),
        (("--nproc-per-node", "0"), "argument --nproc-per-node: '0' is not an integer"),
    ],
)
def test_mistakes_are_refused_with_what_would_do(refused, words, message):
    assert refused(*CELL, *words, "--dry-run").startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ep", "3"), "--ep 3 does not divide 64 experts; --ep 1, 2, 4, 8, 16, 32 or 64 would"),
        (("--pp", "2"), "--pp 2 does not divide 27 layers; --pp 1, 3, 9 or 27 would fit"),
        (
            ("--tp", "32"),
            "--tp 32 does not fit 16 attention heads; --tp 1, 2, 4, 8 or 16 would fit",
        ),
        (
            ("--tp", "2"),
            "8 process(es) cannot be cut into tp x pp x ep = 2 x 1 x 8 for the "
            "experts; start a multiple of 16",
        ),
    ],
)
def test_layouts_of_experts(refused, words, message):
    assert refused(*DEEPSEEK, *words, "--dry-run").startswith(message)


def test_a_wrong_layout_is_refused_before_a_corpus_is_made(refused, monkeypatch):
    made = []
    monkeypatch.setattr(launch, "resolve_data", lambda *a, **k: made.append(a))
    for wrong in (("--tp", "3"), ("--nnodes", "2"), ("--global-batch-size", "7")):
        refused(*CELL, *TINY, *wrong)
    assert made == []


def test_more_processes_than_gpus_are_refused(refused, files, monkeypatch):
    monkeypatch.setattr(launch, "cuda_devices", lambda python, dry_run: 2)
    message = refused(*CELL, "--preset", "full", *files)
    assert message.startswith("8 processes, but this machine has 2 GPU(s); give --nproc-per-node 2")


def test_a_stage_of_another_size_can_be_said(dry):
    uneven = ("--decoder-first-pipeline-num-layers", "13")
    words, _ = dry(*DEEPSEEK, "--pp", "2", "--nproc-per-node", "16", "--", *uneven)
    assert value(words, "--pipeline-model-parallel-size") == "2"


def test_what_would_do_is_what_divides():
    assert tensor_sizes(MODELS["deepseek2_lite"].full.architecture) == [1, 2, 4, 8, 16]
    assert tensor_sizes(MODELS["llama32-1b"].tiny.architecture) == [1, 2, 4, 8]


@pytest.fixture
def slurm(tmp_path):
    """Return the variables of a job, with stand-ins that run the tasks one after the other."""
    fakes = {
        "scontrol": "printf 'first\\nsecond\\n'",
        "srun": 'echo "cores: ${SRUN_CPUS_PER_TASK-unset}" >&2; '
        "if [[ $1 == --kill* ]]; then shift; fi; "
        'for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    }
    for name, body in fakes.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\nset -eu\n{body}\n")
        path.chmod(0o755)
    return {
        "SLURM_SUBMIT_DIR": REPO,
        "SLURM_JOB_NODELIST": "machine[1-2]",
        "SLURM_JOB_ID": "12345",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
        "LAB_PYTHON": sys.executable,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }


def test_the_slurm_example_starts_each_machine_with_its_number(tmp_path, slurm):
    cell = ("deepseek2_lite", "dolma", "FA_linear_mxfp8", "--ep", "8", "--dry-run")
    script = REPO / "examples/slurm/pretrain.sh"
    done = run(["bash", script, *cell], cwd=tmp_path, env=environment(**slurm))
    assert done.returncode == 0, done.stderr
    assert "cores: 64\n" in done.stderr
    machines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [value(words, "--node-rank") for words in machines] == ["0", "1"]
    for words in machines:
        assert value(words, "--nnodes") == "2"
        assert value(words, "--master-addr") == "first"
        assert value(words, "--master-port") == "32345"
        assert value(words, "--custom-quant-type") == "FA_linear_mxfp8"
    slurm["SLURM_CPUS_PER_TASK"] = ""
    done = run(["bash", script, *cell], cwd=tmp_path, env=environment(**slurm))
    assert "cores: unset\n" in done.stderr
    done = run(["bash", script, "deepseek2_lite"], env=environment(**slurm))
    assert done.returncode == 2
    assert "[ERROR] MODEL, DATASET and QUANTIZATION are missing" in done.stderr


@pytest.mark.parametrize("status", [0, 3])
def test_the_slurm_example_moves_the_tensors_of_each_machine(tmp_path, slurm, status):
    """The stand-in for srun gives both machines the same disk, so the first one moves all."""
    training = tmp_path / "examples" / "slurm" / "pretrain.sh"
    training.parent.mkdir(parents=True)
    training.write_text(f'echo "$@"; mkdir "$LOCAL"; touch "$LOCAL/index.jsonl"; exit {status}\n')
    local, shared = tmp_path / "disk" / "dump-12345", tmp_path / "shared"
    local.parent.mkdir()
    slurm |= {"LOCAL_SCRATCH": local.parent, "SLURM_SUBMIT_DIR": tmp_path}
    script, env = REPO / "examples/slurm/collect.sh", environment(**slurm)
    for flags in ((), ("--", "--control-iter", "2")):
        cell = ("llama31-8b", "dolma", "mxfp8", "--tp", "4", *flags)
        done = run(["bash", script, shared, *cell], cwd=tmp_path, env=env)
        assert done.returncode == status, done.stderr
        save = ("--save-tensors", "--tensor-save-dir", str(local))
        assert done.stdout.split() == [*cell, *(() if flags else ("--",)), *save]
        assert [path.name for path in shared.iterdir()] == ["node0"]
        assert (shared / "node0" / "index.jsonl").exists()
        assert not local.exists()


def test_the_slurm_example_s_log_is_not_for_git():
    text = (REPO / "examples/slurm/pretrain.sh").read_text()
    [name] = re.findall(r"^#SBATCH --output=(.+)$", text, re.M)
    log = name.replace("%x", "job").replace("%j", "1")
    assert run(["git", "check-ignore", "--quiet", "--no-index", log]).returncode == 0
