"""Test what `train_config.py` and `flash_attention_config.py` print, and what they refuse."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import flash_attention_config
import train_config
from configs import resolve, run_names
from configs.models import MODELS
from configs.quantizations import accepted
from configs.resolve import DataRequest, Files, resolve_data
from tests import forks
from tests.published import flags_of
from tests.script.drivers import value
from tests.subprocesses import REPO, environment, run

CELL = ("--model", "llama31-8b", "--dataset", "wikipedia", "--quantization", "bf16")
TINY = ("--preset", "tiny")


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
        assert "Missing: " in said


def test_models_with_one_tokenizer_share_the_data(dry):
    prefixes = {}
    for model in MODELS:
        words, _ = dry("--model", model, "--dataset", "dolma", "--quantization", "bf16")
        prefixes[model] = value(words, "--data-path")
    assert prefixes["llama31-8b"] == prefixes["llama32-1b"] != prefixes["deepseek2_lite"]


def test_the_note_on_the_default_corpus_names_what_is_missing(tmp_path, capsys):
    prefix = str(tmp_path / "wiki_text_document")
    wanted = Files(tokenizer=str(tmp_path / "tokenizer"), data=prefix)
    request = DataRequest(tokenizer=None, data=None, default=wanted, corpus=True)
    resolve_data(request, sys.executable, dry_run=True)
    none = f"No data given, and none in {prefix}: the default corpus is used.\n"
    assert capsys.readouterr().err == none
    for suffix in (".bin", ".idx"):
        Path(prefix + suffix).touch()
    resolve_data(request, sys.executable, dry_run=True)
    said = capsys.readouterr().err
    assert f"and no tokenizer at {wanted.tokenizer} for the data in {prefix} (name both" in said
    assert "none in" not in said


def test_tiny_takes_the_default_corpus_and_says_so(dry):
    if Path("dataset/wikipedia_processed").exists():
        pytest.skip("there is a Wikipedia")
    words, said = dry(*CELL, *TINY)
    assert value(words, "--data-path") == "dataset/default/corpus_text_document"
    assert "the default corpus is used" in said
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
        f"make them with `bash script/data/prepare_wikipedia.sh --tokenizer-model {files[1]} "
        "--output-prefix dataset/wikipedia_processed_deepseek2/wikipedia_processed_deepseek2`"
    ) in message


def printed_command(message):
    """Return the words of the command that a message recommends."""
    return shlex.split(re.search("`(.+?)`", message)[1])


def test_paths_with_a_blank_stay_one_word(dry, refused, tmp_path):
    folder = tmp_path / "my models"
    folder.mkdir()
    for name in ("tok.model", "my text_document.bin", "my text_document.idx"):
        (folder / name).touch()
    tokenizer, data = str(folder / "tok.model"), str(folder / "my text_document")
    words, _ = dry(*CELL, "--tokenizer-path", tokenizer, "--data-path", data)
    assert (value(words, "--tokenizer-model"), value(words, "--data-path")) == (tokenizer, data)
    for missing in ((), ("--data-path", str(folder / "none"))):
        cell = ("--model", "deepseek2_lite", *CELL[2:], "--tokenizer-path", tokenizer, *missing)
        command = printed_command(refused(*cell, "--preset", "full", status=1))
        assert value(command, "--tokenizer-model") == tokenizer
    assert value(command, "--output-prefix") == str(folder / "none")


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


def test_of_several_tokenizers_one_must_be_named(refused, dry, files, tmp_path):
    for name in ("cl100k.tiktoken", "o200k.tiktoken"):
        (tmp_path / name).write_bytes(b"IQ== 0\n")
    message = refused(*CELL, "--tokenizer-path", str(tmp_path), *files[2:], "--dry-run", status=1)
    assert message == (
        f"several tokenizers in the folder {tmp_path} (cl100k.tiktoken, o200k.tiktoken); name one "
        "of them"
    )
    one = ("--tokenizer-path", str(tmp_path / name))
    assert value(dry(*CELL, *one, *files[2:])[0], "--tokenizer-type") == "TikTokenizer"


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


def test_fewer_iterations_than_are_collected_are_not_made_more(refused, dry):
    message = refused(*CELL, *TINY, "--train-iters", "5", "--dry-run", "--", "--control-iter", "20")
    assert message == (
        "--train-iters 5 is less than --control-iter 20, the iterations to collect; give "
        "--train-iters 20, or collect fewer"
    )
    words, _ = dry(*CELL, *TINY, "--train-iters", "20", "--", "--control-iter", "20")
    assert value(words, "--train-iters") == "20"


@pytest.fixture
def forked(monkeypatch):
    """Let forks of a process that has imported torch resolve the formats."""

    def run_in_fork(command, *, env, **_):
        return forks.run(*command[1:], env=env | {"OMP_NUM_THREADS": "1"})

    monkeypatch.setattr(run_names, "subprocess", SimpleNamespace(run=run_in_fork))


@pytest.mark.usefixtures("forked")
def test_settings_leave_the_formats_to_the_environment(dry):
    words, _ = dry(*CELL[:-1], "settings", "--", "--custom-quant-type", "nvfp4:2d")
    assert words[-2:] == ["--custom-quant-type", "nvfp4:2d"]
    assert words.count("--custom-quant-type") == 1


@pytest.fixture
def formats_unsaid(monkeypatch, tmp_path):
    """Unset the variables that set formats, and return the path of an empty settings file."""
    for name in ("CUSTOM", "LINEAR", "QK", "PV"):
        monkeypatch.delenv(f"{name}_QUANT_TYPE", raising=False)
    monkeypatch.delenv("QUANT_RECIPE", raising=False)
    path = tmp_path / "settings.json"
    path.write_text("{}")
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(path))
    return path


@pytest.mark.usefixtures("forked")
def test_runs_with_other_formats_have_other_folders(dry, refused, formats_unsaid, monkeypatch):
    """A checkpoint of one format is never resumed in another, whatever source sets the formats."""

    def folder(quantization, *flags):
        words, _ = dry(*CELL[:-1], quantization, "--", *flags)
        assert value(words, "--tensorboard-dir").endswith(Path(value(words, "--save")).name)
        return value(words, "--save").removeprefix("checkpoints/llama31-8b_wikipedia_")

    assert folder("settings") == "bf16"
    assert folder("settings", "--custom-quant-type", "nvfp4:2d") == "nvfp4-2d"
    assert folder("settings", "--custom-quant-type=mxfp4") == "mxfp4"
    assert folder("mxfp8", "--pv-quant", "none") == "FA_linear_mxfp8"
    recipe = str(REPO / "examples/recipes/nvfp4_pretraining.yaml")
    assert folder("settings", "--quant-recipe", recipe) == "recipe_nvfp4_pretraining"
    formats_unsaid.write_text('{"linear": "mxfp8", "qk": "mxfp8"}')
    assert folder("settings") == "FA_linear_mxfp8"
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "hifp8")
    assert folder("settings") == "hifp8"
    message = refused(*CELL[:-1], "settings", "--dry-run", "--", "--custom-quant-type", "mxpf8")
    assert message.startswith("flag --custom-quant-type: unknown quantization type 'mxpf8'")


def test_a_python_without_torch_can_still_show_a_command(dry, monkeypatch, tmp_path):
    bare = tmp_path / "python"
    bare.write_text("#!/bin/sh\nexit 1\n")
    bare.chmod(0o755)
    monkeypatch.setenv("LAB_PYTHON", str(bare))
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "nvfp4")  # a type that only training can resolve
    words, said = dry(*CELL[:-1], "settings")
    assert value(words, "--save").endswith("_settings")
    assert "a run replaces 'settings' by the effective formats" in said


def test_data_of_no_dataset_are_in_the_name(dry, files):
    cell = ("--model", "llama31-8b", "--quantization", "bf16")
    prefix = Path(files[3]).with_name("novels_text_document")
    for suffix in (".bin", ".idx"):
        prefix.with_suffix(suffix).touch()
    words, _ = dry(*cell, *files[:2], "--data-path", str(prefix))
    assert value(words, "--save") == "checkpoints/llama31-8b_novels_bf16"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--seed", "7"),
            "unrecognized arguments: --seed 7; see --help (flags of pretrain_gpt.py go after --)",
        ),
        (("--lr", "nan"), "argument --lr: 'nan' is not a number above 0"),
        (("--model", "llama3-8b"), "unknown model 'llama3-8b', did you mean llama31-8b"),
        (
            ("--dataset", "wiki"),
            "unknown dataset 'wiki', did you mean wikipedia? choose one of wikipedia, dolma",
        ),
        (("--quantization", "fa_mxpf8"), "unknown quantization 'fa_mxpf8', did you mean FA_mxfp8"),
        (("--quantization", "zzz"), "unknown quantization 'zzz'; choose one of bf16, FA_mxfp8"),
        (("--training-config", "slow"), "unknown training configuration 'slow'; choose one of"),
        (("--preset", "tin"), "unknown preset 'tin', did you mean tiny? choose one of full, tiny"),
        (("--dtype", "int4"), "argument --dtype: invalid choice: 'int4'"),
    ],
)
def test_mistakes_are_refused_with_what_is_accepted(refused, words, message):
    assert refused(*CELL, *words, "--dry-run").startswith(message)


def test_a_run_becomes_the_command_that_a_dry_run_prints(dry, files, monkeypatch):
    options = (*CELL, *TINY, *files, "--", "--seed", "7")
    expected, _ = dry(*options)
    started = []
    monkeypatch.setattr(os, "execvpe", lambda *call: started.append(call))
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    train_config.main([*options])
    [(program, words, variables)] = started
    assert [program, *words] == [words[0], *expected]
    assert variables["PYTHONPATH"] == f"{REPO}{os.pathsep}mine"
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "8", "the user's value wins"


@pytest.mark.parametrize("no", ["0", "", "false", "No"])
def test_a_switch_that_says_no_is_no_dry_run(files, monkeypatch, plain_environment, capsys, no):
    started = []
    monkeypatch.setattr(os, "execvpe", lambda *call: started.append(call))
    monkeypatch.setenv("DRY_RUN", no)
    train_config.main([*CELL, *TINY, *files])
    assert len(started) == 1
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("DRY_RUN", "1")
    train_config.main([*CELL, *TINY, *files])
    assert len(started) == 1


def test_an_interpreter_that_is_not_there(refused, monkeypatch):
    monkeypatch.setenv("LAB_PYTHON", "/nope")
    for mode in ("--dry-run", "--preset=tiny"):
        message = refused(*CELL, mode, status=1)
        assert message.startswith(
            "LAB_PYTHON is '/nope', which is not a program; name a Python 3.10"
        )


def test_what_must_be_named(refused):
    assert refused().startswith("--quantization missing; --list prints")
    assert refused("--quantization", "bf16").startswith("--model and --dataset missing")


def test_an_environment_variable_that_is_no_number(refused, monkeypatch):
    monkeypatch.setenv("NPROC", "all")
    assert refused(*CELL, "--dry-run").startswith("environment variable NPROC: 'all' is not")


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
        message == "--fa-quantization qk_mxfp8,qk_pv_mxfp4 sets the format of qk twice; set it once"
    )
    assert refused(*CELL[:4], program=flash_attention_config).startswith(
        "--fa-quantization missing"
    )


def test_the_training_script_s_numbers_are_the_table_s(dry, files):
    """The script in `examples/llama` and the drivers take all numbers from the tables."""
    script = REPO / "examples/llama/train_llama32_1b_h100_fp8.sh"
    variables = environment(LAB_PYTHON=sys.executable, DRY_RUN="1", NPROC="2")
    cell = ("--model", "llama32-1b", "--quantization", "settings", "--training-config", "collect")
    for preset, ours in (("1b", "full"), ("tiny", "tiny")):
        words = ["bash", script, "ck", "tb", files[1], files[3], "--preset", preset]
        done = run(words, env=variables)
        assert done.returncode == 0, done.stderr
        where = ("--checkpoint-path", "ck", "--tensorboard-path", "tb", "--nproc-per-node", "2")
        expected, _ = dry(*cell, *files, *where, "--preset", ours)
        assert flags_of(shlex.split(done.stdout)) == flags_of(expected)


def test_the_commands_of_the_documentation_run():
    """Blocks marked bash are run; those marked console are not."""
    text = (REPO / "docs/experiments.md").read_text()
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
    commands = [line for block in blocks for line in block.replace("\\\n", "").splitlines()]
    assert all("--list" in line or "--dry-run" in line for line in commands)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = run(["bash", "-euc", "".join(blocks)], env=environment(PATH=path))
    assert done.returncode == 0, done.stderr
    starts = [line for line in done.stdout.splitlines() if "pretrain_gpt.py" in line]
    assert len(starts) == sum("--dry-run" in line for line in commands)


def test_the_documentation_s_table_is_the_tables():
    text = (REPO / "docs/experiments.md").read_text()
    for name, model in MODELS.items():
        [row] = [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]
        parallelism = model.full.parallelism
        assert f"| {model.full.architecture.parameters():,} | `{model.tokenizer.path}` |" in row
        assert f"| {parallelism.nproc_per_node}" in row
        for flag in ("tp", "ep"):
            assert (f"--{flag} {getattr(parallelism, flag)}`" in row) == (
                getattr(parallelism, flag) > 1
            )
    for name in accepted():
        assert f"`{name}`" in text or name in ("none", "settings"), name


@pytest.mark.parametrize(
    ("variable", "advice"),
    [("LAB_PYTHON", "unset LAB_PYTHON"), (None, "delete the folder .venv")],
)
def test_a_python_for_training_without_a_module_is_named(monkeypatch, variable, advice):
    monkeypatch.setattr(resolve, "find_spec", lambda name: None if name == "yaml" else object())
    monkeypatch.setattr(resolve, "interpreter", lambda dry_run: sys.executable)
    monkeypatch.delenv("LAB_PYTHON", raising=False)
    if variable:
        monkeypatch.setenv(variable, sys.executable)
    with pytest.raises(resolve.ConfigError) as refused:
        resolve.enter_environment()
    assert str(refused.value) == f"{sys.executable} lacks yaml; {advice} and run the command again"
