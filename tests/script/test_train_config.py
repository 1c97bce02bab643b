"""`train_config.py` and `flash_attention_config.py`: what they print, and what they refuse before
anything starts.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest

import flash_attention_config
import train_config
from configs import resolve
from configs.layout import tensor_sizes
from configs.models import MODELS
from tests.script.published import flags_of
from tests.script.test_drivers import value
from tests.subprocesses import REPO, environment, run

CELL = ("--model", "llama31-8b", "--dataset", "wikipedia", "--quantization", "bf16")
DEEPSEEK = ("--model", "deepseek2_lite", "--dataset", "dolma", "--quantization", "mxfp8")
TINY = ("--preset", "tiny")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "DRY_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LAB_PYTHON", sys.executable)
    monkeypatch.chdir(REPO)


@pytest.fixture
def dry(capsys):
    """The words of a dry run, and what was said."""

    def call(*words, program=train_config):
        ours, flags = train_config.split_flags(words)
        status = program.main([*ours, "--dry-run", "--", *flags])
        out, err = capsys.readouterr()
        assert status == 0, err
        return shlex.split(out), err

    return call


@pytest.fixture
def refused(capsys):
    """The message of a command line that is refused."""

    def call(*words, program=train_config, status=2):
        assert program.main([*words]) == status
        out, err = capsys.readouterr()
        assert out == ""
        [line] = [each for each in err.splitlines() if each.startswith("[ERROR] ")]
        return line.removeprefix("[ERROR] ")

    return call


def test_list_names_everything(capsys):
    assert train_config.main(["--list"]) == 0
    text = capsys.readouterr().out
    for word in ("llama31-8b", "dolma", "FA_linear_hifp8", "fast", "tiny", "15,706,484,224"):
        assert word in text


def test_a_dry_run_shows_the_published_model_and_what_is_missing(dry):
    words, said = dry(*CELL)
    assert value(words, "--num-layers") == "32"
    assert value(words, "--tokenizer-model") == "model/llama3.1-8b"
    assert value(words, "--tokenizer-type") == "HuggingFaceTokenizer"
    assert value(words, "--data-path").startswith("dataset/wikipedia_processed/")
    assert value(words, "--save") == "checkpoints/llama31-8b_wikipedia_bf16"
    if not Path("dataset/wikipedia_processed").exists():
        assert "Not there yet: " in said


def test_models_with_one_tokenizer_share_the_data(dry):
    prefixes = {}
    for model in MODELS:
        words, _ = dry("--model", model, "--dataset", "dolma", "--quantization", "bf16")
        prefixes[model] = value(words, "--data-path")
    assert prefixes["llama31-8b"] == prefixes["llama32-1b"] != prefixes["deepseek2_lite"]


def test_tiny_takes_the_default_corpus_and_says_so(dry):
    if Path("dataset/wikipedia_processed").exists():
        pytest.skip("there is a Wikipedia")
    words, said = dry(*CELL, *TINY)
    assert value(words, "--data-path") == "dataset/default/corpus_text_document"
    assert "the default corpus is taken" in said
    assert "--save" not in words


def test_a_full_model_does_not_train_on_the_default_corpus(refused):
    if Path("dataset/wikipedia_processed").exists():
        pytest.skip("there is a Wikipedia")
    message = refused(*CELL, "--preset", "full", status=1)
    assert message.startswith("no tokenizer at model/llama3.1-8b; name a SentencePiece .model file")
    assert "with --preset tiny" in message


def test_missing_data_say_what_makes_them(refused, files):
    cell = ("--model", "deepseek2_lite", *CELL[2:])
    message = refused(*cell, "--preset", "full", *files[:2], status=1)
    assert (
        f"make them with 'bash script/data/prepare_wikipedia.sh --tokenizer-model {files[1]} "
        "--output-prefix dataset/wikipedia_processed_deepseek2/wikipedia_processed_deepseek2'"
    ) in message


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("tokenizer.json", b"{}", "HuggingFaceTokenizer"),
        ("tokenizer.model", b"\n\x0e\n\x05<unk>", "SentencePieceTokenizer"),
        ("tokenizer.model", b"IQ== 0\nIg== 1\n", "TikTokenizer"),
        ("o200k.tiktoken", b"IQ== 0\r\n", "TikTokenizer"),
    ],
)
def test_tokenizers_are_told_apart_by_what_is_in_them(tmp_path, name, content, kind):
    (tmp_path / name).write_bytes(content)
    assert resolve.tokenizer_type(str(tmp_path)) == kind
    assert resolve.tokenizer_type(str(tmp_path / name)) == kind


def test_what_follows_two_dashes_is_last(dry, files):
    words, _ = dry(*CELL, *files, "--", "--seed", "7", "--lr", "1")
    assert words[-4:] == ["--seed", "7", "--lr", "1"]


def test_the_sizes_can_be_said(dry, files):
    sizes = {
        "--train-iters": "3",
        "--micro-batch-size": "2",
        "--global-batch-size": "8",
        "--seq-length": "1024",
        "--lr": "0.001",
    }
    words, _ = dry(*CELL, *files, *(word for pair in sizes.items() for word in pair))
    assert {flag: value(words, flag) for flag in sizes} == sizes
    assert value(words, "--min-lr") == "0.0001"
    words, _ = dry(*CELL, *files, "--dtype", "fp32")
    assert "--bf16" not in words


def test_training_configurations(dry):
    for name, iterations, batch in (
        ("default", 10000, 128),
        ("fast", 100, 16),
        ("long", 100000, 512),
    ):
        words, _ = dry(*CELL, "--training-config", name)
        assert value(words, "--train-iters") == str(iterations)
        assert value(words, "--global-batch-size") == str(batch)
    assert value(dry(*CELL, "--training-config", "fast")[0], "--seq-length") == "2048"
    words, _ = dry(*CELL, "--training-config", "collect", "--nproc-per-node", "16")
    assert value(words, "--global-batch-size") == "32", "8 micro-batches of each of 4 copies"


def test_no_fewer_iterations_than_are_collected(dry):
    assert value(dry(*CELL, *TINY, "--", "--control-iter", "70")[0], "--train-iters") == "70"
    assert value(dry(*CELL, *TINY, "--", "--control-iter=70")[0], "--train-iters") == "70"
    assert value(dry(*CELL, *TINY, "--", "--control-iter", "3")[0], "--train-iters") == "50"


def test_settings_leave_the_formats_to_the_environment(dry):
    words, _ = dry(*CELL[:-1], "settings", "--", "--custom-quant-type", "nvfp4:2d")
    assert words[-2:] == ["--custom-quant-type", "nvfp4:2d"]
    assert words.count("--custom-quant-type") == 1


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


def test_a_default_batch_grows_to_fit_the_ranks(dry):
    words, said = dry(*CELL, *TINY, "--nproc-per-node", "3")
    assert value(words, "--global-batch-size") == "6"
    assert "The global batch is 6 sequences, not 4: 3 copies" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tp", "3"), "--tp 3 does not fit 32 attention heads, 8 of keys and values; --tp 1, 2, "
         "4, 8, 16 or 32 would do"),
        (("--pp", "3"), "--pp 3 does not divide 32 layers; --pp 1, 2, 4, 8, 16 or 32 would do, or "
         "a first stage of another size: `-- --decoder-first-pipeline-num-layers 10`"),
        (("--ep", "2"), "--ep 2, but this model has no experts; leave --ep out"),
        (("--nproc-per-node", "6"), "6 process(es) cannot be cut into tp x pp x cp = 4 x 1 x 1; "
         "start a multiple of 4 (--nproc-per-node x --nnodes = 8)"),
        (("--cp", "3", "--nproc-per-node", "12"), "--seq-length 8192 cannot be cut into 24 equal "
         "parts, as --tp 4 and --cp 3 need; 8184 would do"),
        (("--global-batch-size", "7"), "--global-batch-size 7 is no multiple of --micro-batch-size "
         "1 x 2 copies of the model; 6 or 8 would do"),
        (("--nnodes", "2"), "--nnodes is 2, but nothing says which machine is the first; give its "
         "name in --master-addr"),
        (("--nnodes", "2", "--master-addr", "a", "--node-rank", "2"), "--node-rank is 2; of 2 "
         "machines the ranks are 0 to 1"),
        (("--nproc-per-node", "0"), "argument --nproc-per-node: '0' is no whole number"),
        (("--seed", "7"), "unrecognized arguments: --seed 7; see --help (flags of pretrain_gpt.py "
         "go after --)"),
        (("--model", "llama3-8b"), "unknown model 'llama3-8b', did you mean llama31-8b"),
        (("--dataset", "wiki"), "unknown dataset 'wiki', did you mean wikipedia? choose one of "
         "wikipedia, dolma"),
        (("--quantization", "fa_mxfp8"), "unknown quantization 'fa_mxfp8', did you mean FA_mxfp8"),
        (("--quantization", "zzz"), "unknown quantization 'zzz'; choose one of bf16, FA_mxfp8"),
        (("--training-config", "slow"), "unknown training configuration 'slow'; choose one of"),
        (("--preset", "tin"), "unknown preset 'tin', did you mean tiny? choose one of full, tiny"),
        (("--dtype", "int4"), "argument --dtype: invalid choice: 'int4'"),
    ],
)  # fmt: skip
def test_mistakes_are_refused_with_what_would_do(refused, words, message):
    assert refused(*CELL, *words, "--dry-run").startswith(message)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ep", "3"), "--ep 3 does not divide 64 experts; --ep 1, 2, 4, 8, 16, 32 or 64 would"),
        (("--pp", "2"), "--pp 2 does not divide 27 layers; --pp 1, 3, 9 or 27 would do"),
        (("--tp", "32"), "--tp 32 does not fit 16 attention heads; --tp 1, 2, 4, 8 or 16 would do"),
        (("--tp", "2"), "8 process(es) cannot be cut into tp x pp x ep = 2 x 1 x 8 for the "
         "experts; start a multiple of 16"),
    ],
)  # fmt: skip
def test_layouts_of_experts(refused, words, message):
    assert refused(*DEEPSEEK, *words, "--dry-run").startswith(message)


def test_a_stage_of_another_size_can_be_said(dry):
    uneven = ("--decoder-first-pipeline-num-layers", "13")
    words, _ = dry(*DEEPSEEK, "--pp", "2", "--nproc-per-node", "16", "--", *uneven)
    assert value(words, "--pipeline-model-parallel-size") == "2"


def test_what_would_do_is_what_divides():
    assert tensor_sizes(MODELS["deepseek2_lite"].full.architecture) == [1, 2, 4, 8, 16]
    assert tensor_sizes(MODELS["llama32-1b"].tiny.architecture) == [1, 2, 4, 8]


def test_what_must_be_named(refused):
    assert refused().startswith("--quantization missing; --list prints")
    assert refused("--quantization", "bf16").startswith("--model and --dataset missing")


def test_an_environment_variable_that_is_no_number(refused, monkeypatch):
    monkeypatch.setenv("NPROC", "all")
    assert refused(*CELL, "--dry-run").startswith("environment variable NPROC: 'all' is no whole")


def test_a_checkpoint_is_resumed_from(dry, files, tmp_path):
    where = ("--checkpoint-path", str(tmp_path))
    assert "--load" not in dry(*CELL, *files, *where)[0]
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    words, said = dry(*CELL, *files, *where)
    assert value(words, "--load") == value(words, "--save") == str(tmp_path)
    assert "Resuming from" in said


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qk_mxfp8", ["none", "mxfp8", "none"]),
        ("pv_mxfp4", ["none", "none", "mxfp4"]),
        ("qk_pv_hifp8", ["none", "hifp8", "hifp8"]),
        ("qk_mxfp8,pv_hifp8", ["none", "mxfp8", "hifp8"]),
        ("none", ["none", "none", "none"]),
    ],
)
def test_formats_of_attention(dry, name, expected):
    words, _ = dry(*CELL[:4], "--fa-quantization", name, program=flash_attention_config)
    assert [value(words, f"--{op}-quant") for op in ("linear", "qk", "pv")] == expected
    assert "--custom-quant-type" not in words


def test_attention_and_linear_layers_together(dry):
    both = ("--fa-quantization", "qk_mxfp8", "--linear-quantization", "mxfp4")
    words, _ = dry(*CELL[:4], *both, program=flash_attention_config)
    assert value(words, "--linear-quant") == "mxfp4"
    assert value(words, "--save").endswith("llama31-8b_wikipedia_qk_mxfp8_linear_mxfp4")


def test_attention_s_list_and_mistakes(refused, capsys):
    assert flash_attention_config.main(["--list"]) == 0
    assert "qk_pv_mxfp4      mxfp4 in Q K^T and mxfp4 in P V" in capsys.readouterr().out
    wrong = (*CELL[:4], "--fa-quantization")
    message = refused(*wrong, "qk_mxfp9", program=flash_attention_config)
    assert message.startswith("unknown attention quantization 'qk_mxfp9', did you mean qk_mxfp8")
    message = refused(*wrong, "qk_mxfp8,qk_pv_mxfp4", program=flash_attention_config)
    assert (
        message == "--fa-quantization qk_mxfp8,qk_pv_mxfp4 says the format of qk twice; say it once"
    )
    assert refused(*CELL[:4], program=flash_attention_config).startswith(
        "--fa-quantization missing"
    )


def test_the_slurm_example_starts_each_machine_with_its_number(tmp_path):
    """With stand-ins for SLURM's commands, which run the tasks one after the other."""
    fakes = {
        "scontrol": "printf 'first\\nsecond\\n'",
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    }
    for name, body in fakes.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\nset -eu\n{body}\n")
        path.chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": REPO,
        "SLURM_JOB_NODELIST": "machine[1-2]",
        "SLURM_JOB_ID": "12345",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "LAB_PYTHON": sys.executable,
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    cell = ("deepseek2_lite", "dolma", "FA_linear_mxfp8", "--ep", "8", "--dry-run")
    script = REPO / "examples/slurm/pretrain.sh"
    done = run(["bash", script, *cell], cwd=tmp_path, env=environment(**slurm))
    assert done.returncode == 0, done.stderr
    machines = [shlex.split(line) for line in done.stdout.splitlines()]
    assert [value(words, "--node-rank") for words in machines] == ["0", "1"]
    for words in machines:
        assert value(words, "--nnodes") == "2"
        assert value(words, "--master-addr") == "first"
        assert value(words, "--master-port") == "32345"
        assert value(words, "--custom-quant-type") == "FA_linear_mxfp8"
    done = run(["bash", script, "deepseek2_lite"], env=environment(**slurm))
    assert done.returncode == 2
    assert "[ERROR] MODEL, DATASET and QUANTIZATION are missing" in done.stderr
