"""Test that alternative names are accepted.

They are options of Megatron-LM and of older scripts, types in upper or lower case, and other paths
of the visualization scripts.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.script.drivers import COLLECT, DRAW, TRAIN, bash, dry, value
from tests.subprocesses import REPO, environment, run


def test_names_of_megatron_lm_and_underscores_are_understood():
    [words] = dry(
        COLLECT,
        "single",
        "--quant_type",
        "hifp8",
        "--tensor_save_dir",
        "a",
        "--save-tensors",
        "--train-iters",
        "7",
        "--lr=1e-4",
        "--micro_batch_size",
        "1",
        "--seq-length",
        "128",
        "--",
        "--rotary_base=5000",
    )
    wanted = {
        "--custom-quant-type": "hifp8",
        "--tensor-save-dir": "a/hifp8",
        "--train-iters": "7",
        "--lr": "0.0001",
        "--min-lr": "1e-5",
        "--micro-batch-size": "1",
        "--seq-length": "128",
    }
    assert {flag: value(words, flag) for flag in wanted} == wanted
    assert words[-1] == "--rotary-base=5000"


@pytest.mark.parametrize(
    ("script", "words", "message"),
    [
        (COLLECT, ["--trian-iters", "3"], "unknown option --trian-iters, did you mean --train-"),
        (DRAW, ["--output-dri=x"], "unknown option --output-dri, did you mean --output-dir?"),
        (COLLECT, ["--tensor-dir", "a", "--tensor-path", "b"], "two values for tensor-path: 'a'"),
        (COLLECT, ["--verbose=1"], "--verbose=1: --verbose takes no value; leave it out"),
        (COLLECT, ["single", ""], "an empty word ('') among the arguments; leave it out"),
        (DRAW, ["visualize", "--save-tensors"], "visualize trains nothing: '--save-tensors'"),
        (DRAW, ["visualize", "batch"], "visualize trains nothing: 'batch' belongs to collect or"),
        (DRAW, ["batch"], "unknown mode 'batch'; it is collect, visualize or both, as in"),
        (DRAW, ["both", "batch", "mxfp8"], "batch collects bf16, mxfp8, mxfp4 and hifp8; for"),
    ],
)
def test_an_option_that_is_none_is_answered_with_the_nearest(script, words, message):
    done = bash(script, *words)
    assert done.returncode == 2
    [error] = done.stderr.splitlines()
    assert error.startswith(f"[ERROR] {message}")


def test_a_type_is_read_in_any_case_and_its_folder_has_the_usual_spelling():
    for given, spelled in (("MXFP8", "mxfp8"), ("fa_LINEAR_HiF8", "FA_linear_hifp8")):
        train, draw = dry(DRAW, "both", given, "--tensor-dir", "a")
        assert value(train, "--custom-quant-type") == spelled
        assert value(train, "--tensor-save-dir") == value(draw, "--tensor_dir") == f"a/{spelled}"


def test_an_existing_folder_is_drawn_whatever_case_its_type_has(tmp_path):
    (tmp_path / "FA_mxfp8").mkdir()
    [draw] = dry(DRAW, "visualize", "fa_MXFP8", "--tensor-dir", tmp_path)
    assert value(draw, "--tensor_dir") == str(tmp_path / "FA_mxfp8")


def test_both_batch_collects_every_type_and_draws_all_of_them():
    *trainings, draw = dry(DRAW, "both", "batch", "--tensor-dir", "a")
    types = [value(words, "--custom-quant-type") for words in trainings]
    assert types == ["bf16", "mxfp8", "mxfp4", "hifp8"]
    assert value(draw, "--tensor_dir") == "a"
    assert "--run" not in draw
    train, draw = dry(DRAW, "both", "quick", "hifp8", "--tensor-dir", "a")
    assert value(train, "--collect-layers") == "first,last"
    assert value(draw, "--tensor_dir") == "a/hifp8"


def test_formats_of_the_settings_file_reach_a_collection_without_a_type(tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"linear": "mxfp8", "qk": "mxfp8"}))
    train, draw = dry(DRAW, "both", "--tensor-dir", "a", QUANT_SETTINGS_FILE=path)
    assert "--custom-quant-type" not in train
    assert value(train, "--tensor-save-dir") == value(draw, "--tensor_dir") == "a/FA_linear_mxfp8"
    done = bash(COLLECT, "single", DRY_RUN="1", QUANT_SETTINGS_FILE=path)
    assert "No type given: FA_linear_mxfp8 is set (linear: mxfp8 (settings file sett" in done.stderr
    [words] = dry(COLLECT, "single", "mxfp4", QUANT_SETTINGS_FILE=path)
    assert value(words, "--custom-quant-type") == "mxfp4"
    [words] = dry(COLLECT, "batch", QUANT_SETTINGS_FILE=path)[:1]
    assert value(words, "--custom-quant-type") == "bf16"


def test_a_recipe_of_the_environment_is_drawn_from_its_folder():
    recipe = REPO / "examples" / "recipes" / "hif8.yaml"
    train, draw = dry(DRAW, "both", "--tensor-dir", "a", QUANT_RECIPE=recipe)
    assert value(train, "--quant-recipe") == str(recipe)
    assert value(train, "--tensor-save-dir") == value(draw, "--tensor_dir") == "a/recipe_hif8"


@pytest.mark.parametrize("script", [[COLLECT, "single"], [DRAW, "both", "mxfp8"], [TRAIN]])
def test_a_dry_run_needs_neither_data_nor_tokenizer(tmp_path, script):
    words = ["--preset", "1b", "--dry-run"]
    if script[0] == TRAIN:
        script, words = [TRAIN, "none", "tb", "no/tok", "no/data"], words
    else:
        words += ["--tokenizer-path", "no/tok", "--data-path", "no/data"]
    done = bash(*script, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Missing: the tokenizer no/tok" in done.stderr
    assert "the data no/data.bin and .idx" in done.stderr
    assert "pretrain_gpt.py" in done.stdout.splitlines()[0]
    assert not list(tmp_path.iterdir())


def test_a_dry_run_names_each_missing_file_once(tmp_path):
    words = ["single", "--dry-run", "--tokenizer-path", "no/tok", "--data-path", "no/data"]
    done = bash(COLLECT, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Missing: ") == 1


def test_the_published_model_does_not_fall_back_to_the_default_corpus():
    if Path(REPO / "dataset/wikipedia_processed").exists():
        pytest.skip("there are Wikipedia data here")
    done = bash(COLLECT, "single", "--preset", "1b")
    assert done.returncode == 1
    assert "[ERROR] no tokenizer at model/llama3.2-1b; " in done.stderr
    assert "default corpus is used" not in done.stderr


@pytest.mark.parametrize("folder", ["script", "script/visualization"])
def test_the_visualization_scripts_are_in_both_places_and_look_in_the_same_folder(tmp_path, folder):
    for name in ("quick_visualize.py", "visualize_tensors.py", "tensor_visualizer.py"):
        done = run(
            [sys.executable, REPO / folder / name],
            cwd=tmp_path,
            env=environment(TENSOR_SAVE_DIR=tmp_path / "named"),
        )
        assert f"[ERROR] no folder {tmp_path}/named; " in done.stderr
    script = REPO / folder / "one_click_visualize.sh"
    done = run(["bash", script], cwd=tmp_path, env=environment(DRY_RUN="1"))
    words = shlex.split(done.stdout)
    assert words[-3:] == [f"{REPO}/enhanced_tensor_logs", "--output-dir", f"{REPO}/draw"]
    done = run(["bash", script, "a", "b"], cwd=tmp_path, env=environment(DRY_RUN="1"))
    assert shlex.split(done.stdout)[-3:] == ["a", "--output-dir", "b"]
    assert os.access(script, os.X_OK)
