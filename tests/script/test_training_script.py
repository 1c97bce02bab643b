"""Test how the arguments, flags and environment of examples/llama determine the command."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests import forks
from tests.script.drivers import TRAIN, bash, dry, value
from tests.subprocesses import REPO, environment


def test_the_real_shape_of_llama_3_2_1b():
    [words] = dry(TRAIN, "--preset", "1b")
    expected = {
        "--num-layers": "16",
        "--hidden-size": "2048",
        "--ffn-hidden-size": "8192",
        "--num-attention-heads": "32",
        "--num-query-groups": "8",
        "--kv-channels": "64",
        "--norm-epsilon": "1e-5",
        "--normalization": "RMSNorm",
        "--rotary-base": "500000",
        "--rope-scaling-factor": "32",
        "--seq-length": "8192",
        "--position-embedding-type": "rope",
    }
    assert {flag: value(words, flag) for flag in expected} == expected
    for flag in (
        "--swiglu",
        "--use-rope-scaling",
        "--group-query-attention",
        "--disable-bias-linear",
        "--bf16",
    ):
        assert flag in words
    assert "--untie-embeddings-and-output-weights" not in words


def test_the_tiny_preset_has_the_same_architecture_and_is_small():
    [tiny], [real] = dry(TRAIN, "--preset", "tiny"), dry(TRAIN, "--preset", "1b")
    sizes = {
        "--num-layers": "4",
        "--hidden-size": "256",
        "--ffn-hidden-size": "1024",
        "--seq-length": "256",
        "--num-attention-heads": "8",
        "--num-query-groups": "2",
        "--kv-channels": "32",
        "--micro-batch-size": "2",
        "--global-batch-size": "4",
    }
    assert {flag: value(tiny, flag) for flag in sizes} == sizes
    architecture = {
        "--swiglu",
        "--normalization",
        "--use-rope-scaling",
        "--rope-scaling-factor",
        "--norm-epsilon",
    }
    assert architecture <= set(tiny) & set(real)


def test_pretrain_gpt_knows_every_flag_of_both_presets(corpus):
    """The printed command is parsed by the program that it starts."""
    check = (
        "import sys; from megatron.training.arguments.parse_args import parse_args; "
        "parse_args(sys.argv[1:])"
    )
    for preset in ("1b", "tiny"):
        [words] = dry(TRAIN, "none", "", *corpus, "--preset", preset, NPROC="2")
        flags = words[words.index(str(REPO / "pretrain_gpt.py")) + 1 :]
        done = forks.run("-c", check, *flags, env=environment(PYTHONPATH=REPO))
        assert "unrecognized" not in done.stderr, done.stderr
        assert done.returncode == 0, done.stderr


def test_arguments_are_positional_and_flags_win(corpus):
    tokenizer, data = corpus
    [words] = dry(
        TRAIN,
        "ck",
        "tb",
        tokenizer,
        data,
        "fp16",
        "--preset",
        "tiny",
        "--lr",
        "7e-4",
        "--seed",
        "5",
    )
    assert value(words, "--save") == "ck"
    assert value(words, "--tensorboard-dir") == "tb"
    assert value(words, "--tokenizer-model") == str(tokenizer)
    assert value(words, "--data-path") == str(data)
    assert "--fp16" in words
    assert "--bf16" not in words
    assert value(words, "--lr") == "7e-4"
    assert words[-2:] == ["--seed", "5"]


def test_all_arguments_have_defaults():
    [words] = dry(TRAIN, "--preset", "tiny")
    assert value(words, "--save") == "checkpoints/llama32_tiny_bf16"
    assert value(words, "--tensorboard-dir") == "tensorboard_logs/llama32_tiny"
    assert "--bf16" in words


def test_dtypes():
    assert "--bf16" not in dry(TRAIN, "", "", "", "", "fp32", "--preset", "tiny")[0]
    assert "--bf16" in dry(TRAIN, "", "", "", "", "fp8", "--preset", "tiny")[0]
    done = bash(TRAIN, "", "", "", "", "int8")
    assert done.returncode == 2
    assert (
        done.stderr
        == "[ERROR] DTYPE is 'int8'; give bf16, fp16, fp32 or fp8 (bf16 with simulated mxfp8)\n"
    )


def test_each_format_has_a_checkpoint_folder_of_its_own():
    [words] = dry(TRAIN, "", "", "", "", "fp8", "--preset", "tiny")
    assert value(words, "--save") == "checkpoints/llama32_tiny_mxfp8"
    flags = ("--preset", "tiny", "--custom-quant-type=nvfp4:2d")
    [words] = dry(TRAIN, *flags, CUSTOM_QUANT_TYPE="mxfp4")
    assert value(words, "--save") == "checkpoints/llama32_tiny_nvfp4-2d"
    done = bash(TRAIN, "--preset", "tiny", DRY_RUN="1", CUSTOM_QUANT_TYPE="mxfp9")
    assert done.returncode == 2
    assert "environment variable CUSTOM_QUANT_TYPE: unknown quantization type" in done.stderr


def test_one_process_is_started_directly_and_several_by_torchrun():
    [one] = dry(TRAIN, "--preset", "tiny")
    assert Path(one[1]).name == "pretrain_gpt.py"
    [two] = dry(TRAIN, "--preset", "tiny", NPROC="2")
    assert two[1:4] == ["-m", "torch.distributed.run", "--standalone"]
    assert value(two, "--nproc-per-node") == "2"
    [many] = dry(TRAIN, "--preset", "tiny", NPROC="8", NNODES="2", NODE_RANK="1", MASTER_ADDR="a.b")
    assert [value(many, f) for f in ("--nnodes", "--node-rank", "--master-addr")] == [
        "2",
        "1",
        "a.b",
    ]
    assert "--standalone" not in many


def test_a_checkpoint_is_resumed_from_if_it_is_there(tmp_path):
    [fresh] = dry(TRAIN, tmp_path, "--preset", "tiny")
    assert "--load" not in fresh
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    [again] = dry(TRAIN, tmp_path, "--preset", "tiny")
    assert value(again, "--load") == str(tmp_path)
    [nothing] = dry(TRAIN, "none", "--preset", "tiny")
    assert "--save" not in nothing


def test_no_fewer_iterations_are_trained_than_collected():
    assert value(dry(TRAIN, "--preset", "tiny", "--control-iter", "3")[0], "--train-iters") == "50"
    assert value(dry(TRAIN, "--preset", "tiny", "--control-iter", "70")[0], "--train-iters") == "70"
    assert value(dry(TRAIN, "--preset", "tiny", "--control-iter=70")[0], "--train-iters") == "70"


def test_tokenizers_are_told_apart_by_what_is_there(tmp_path, corpus):
    tokenizer, data = corpus
    kinds = {"hf": "tokenizer.json", "sp": "tokenizer.model", "none": "README"}
    for folder, file in kinds.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("")

    def kind(path):
        return value(dry(TRAIN, "", "", path, data, "--preset", "tiny")[0], "--tokenizer-type")

    assert kind(tokenizer) == kind(tmp_path / "sp") == "SentencePieceTokenizer"
    assert kind(tmp_path / "hf") == "HuggingFaceTokenizer"
    done = bash(TRAIN, "", "", tmp_path / "none", data, DRY_RUN="1")
    assert done.returncode == 1
    assert "[ERROR] no tokenizer in the folder" in done.stderr


def test_without_cuda_the_tiny_preset_is_chosen_and_said():
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    done = bash(TRAIN, DRY_RUN="1")
    assert "No CUDA device: the model is the tiny preset (--preset 1b" in done.stderr
    assert value(shlex.split(done.stdout), "--num-layers") == "4"
