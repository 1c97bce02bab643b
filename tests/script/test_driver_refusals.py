"""Test the help of the drivers and the training script, and the errors before anything starts."""

from __future__ import annotations

import pytest

from tests.script.drivers import ALL, COLLECT, DRAW, TRAIN, bash, dry, value


@ALL
def test_help_is_the_header(script):
    done = bash(script, "--help")
    assert done.returncode == 0
    first = script.read_text().splitlines()[1].removeprefix("# ")
    assert done.stdout.startswith(first)
    assert "set -euo" not in done.stdout


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        (COLLECT, ["twice"], "unknown mode 'twice'; it is single, batch or quick"),
        (DRAW, ["paint"], "unknown mode 'paint'; it is collect, visualize or both"),
        (
            COLLECT,
            ["single", "mxfp8", "--control-iter", "-1"],
            "--control-iter is '-1'; give an integer",
        ),
        (
            COLLECT,
            ["single", "--control-iter", "1.5"],
            "--control-iter is '1.5'; give an integer",
        ),
        (
            DRAW,
            ["both", "mxfp8", "--control-iter", "-1"],
            "--control-iter is '-1'; give an integer",
        ),
        (COLLECT, ["single", "--collect-micro-batches", "x"], "--collect-micro-batches is 'x'"),
        (COLLECT, ["single", "--nproc", "0"], "--nproc is '0'; give an integer of at least 1"),
        (COLLECT, ["single", "--stall-timeout", "soon"], "--stall-timeout is 'soon'"),
        (
            COLLECT,
            ["single", "--dtype", "int4"],
            "--dtype is 'int4'; it is bf16, fp16, fp32 or fp8",
        ),
        (COLLECT, ["single", "--preset", "70b"], "--preset is '70b'; it is tiny"),
        (COLLECT, ["single", "--control-iter"], "--control-iter needs a value"),
        (COLLECT, ["single", "--quant-type", "--nproc", "2"], "--quant-type needs a value"),
        (COLLECT, ["single", "--data-path", ""], "--data-path needs a value"),
        (
            COLLECT,
            ["single", "--frobnicate", "1"],
            "unknown option --frobnicate; see --help for all; flags of pretrain_gpt.py go after --",
        ),
        (COLLECT, ["single", "mxfp8", "mxfp4"], "'mxfp4' is one word too many"),
        (COLLECT, ["batch", "mxfp8"], "batch collects bf16, mxfp8, mxfp4 and hifp8"),
        (COLLECT, ["single", "--mode", "batch"], "two values for mode: 'single' and 'batch'"),
        (
            COLLECT,
            ["batch", "--", "--custom-quant-type", "mxfp4"],
            "--custom-quant-type after -- would collect into the folder of another type; give the "
            "type before --",
        ),
        (COLLECT, ["single", "--", "--quant_recipe=x"], "--quant-recipe after -- would collect"),
        (
            COLLECT,
            ["single", "mxfp8", "--", "--qk-quant=mxfp4"],
            "--qk-quant after -- would collect into the folder of another type; set the variable "
            "QK_QUANT_TYPE to the format instead, without a type",
        ),
        (
            DRAW,
            ["both", "mxfp8", "--", "--tensor-save-dir", "x"],
            "--tensor-save-dir was given after --; give --tensor-path DIR before --",
        ),
        (COLLECT, ["batch", "--", "--save", "x"], "--save after -- is one folder for all types of"),
        (COLLECT, ["batch", "--", "--save_hf=x"], "--save-hf after -- is one folder for all types"),
        (COLLECT, ["single", "--", "--control-iter", "x"], "--control-iter is 'x'; give an int"),
        (DRAW, ["visualize", "--nproc", "2"], "visualize trains nothing: '--nproc' belongs to"),
        (DRAW, ["both", "--run", "latest"], "--run belongs to visualize"),
        (TRAIN, ["a", "b", "c", "d", "bf16", "e"], "6 arguments, but at most five are allowed"),
        (TRAIN, ["--preset", "70b"], "--preset is '70b'; it is tiny"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_starts(script, arguments, message):
    done = bash(script, *arguments)
    assert done.returncode == 2
    assert f"[ERROR] {message}" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(("script", "mode"), [(COLLECT, "single"), (DRAW, "both")])
def test_an_unknown_type_is_refused_before_anything_starts(tmp_path, script, mode):
    done = bash(script, mode, "mxfp9", "--tensor-path", tmp_path / "tensors")
    assert done.returncode == 2
    assert "[ERROR] unknown quantization type 'mxfp9'" in done.stderr
    assert not (tmp_path / "tensors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data-path", "no/such"], "[ERROR] no data at no/such (no/such.bin and"),
        (["--data-path", "no/such"], "in --data-path; and no tokenizer at "),
        (
            ["--tokenizer-path", "no/tok"],
            "[ERROR] no tokenizer at no/tok; name a SentencePiece .model",
        ),
        (["--tokenizer-path", "{tok}", "--data-path", "no/such"], "[ERROR] no data at no/such"),
    ],
)
def test_a_named_path_that_is_missing_is_an_error_that_says_what_to_run(corpus, arguments, message):
    arguments = [argument.format(tok=corpus[0]) for argument in arguments]
    done = bash(COLLECT, "single", "mxfp8", *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    if "no data" in message:
        assert "script/data/preprocess.py --input TEXT --output-prefix no/such" in done.stderr


def test_a_prefix_with_the_suffix_of_a_file_is_understood(corpus):
    [words] = dry(
        COLLECT, "single", "--tokenizer-path", corpus[0], "--data-path", f"{corpus[1]}.bin"
    )
    assert value(words, "--data-path") == str(corpus[1])


@pytest.mark.parametrize("folder", ["file/below", "/proc/tensors"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(corpus, tmp_path, folder):
    (tmp_path / "file").write_text("")
    done = bash(
        COLLECT,
        "single",
        "mxfp8",
        "--tensor-path",
        tmp_path / folder,
        "--tokenizer-path",
        corpus[0],
        "--data-path",
        corpus[1],
    )
    assert done.returncode == 1
    assert "[ERROR] cannot write to " in done.stderr
    assert "name another folder with --tensor-path" in done.stderr


def test_nothing_to_visualize(tmp_path):
    done = bash(DRAW, "visualize", "mxfp8", "--tensor-dir", tmp_path)
    assert done.returncode == 1
    assert f"[ERROR] no folder {tmp_path}/mxfp8; collect first with " in done.stderr
    for name in ("bf16", "mxfp4", "x\x1b[31m"):
        (tmp_path / name).mkdir()
    done = bash(DRAW, "visualize", "mxfp8", "--tensor-dir", tmp_path)
    assert f"/mxfp8; the folders in {tmp_path} are bf16, mxfp4; collect first with " in done.stderr
