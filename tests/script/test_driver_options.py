"""Test the commands that the two drivers would run for their options."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron.collection.loss_spikes import Jumps
from megatron.collection.ring_buffer import EVENTS
from tests.script.drivers import COLLECT, DRAW, bash, dry, value
from tests.subprocesses import REPO


def test_places_and_options_say_the_same():
    places = dry(COLLECT, "single", "hifp8", "--control-iter", "3", "--collect-micro-batches", "2")
    options = dry(
        COLLECT,
        "--mode",
        "single",
        "--quant-type=hifp8",
        "--control-iter=3",
        "--collect-micro-batches=2",
    )

    def without_stamp(commands):
        return [[word for word in words if "tensorboard_logs/" not in word] for words in commands]

    assert without_stamp(places) == without_stamp(options)
    [words] = places
    assert value(words, "--custom-quant-type") == "hifp8"
    assert value(words, "--tensor-save-dir") == "enhanced_tensor_logs/hifp8"
    assert value(words, "--control-iter") == "3"
    assert value(words, "--collect-micro-batches") == "2"
    assert "--save-tensors" in words
    assert "--collect-layers" not in words


def test_the_manual_of_a_ring_names_the_defaults_that_hold():
    manual = " ".join(bash(COLLECT, "--help").stdout.split())
    for option, default in (
        ("--collect-ring-events", EVENTS),
        ("--collect-loss-jump", Jumps().loss),
        ("--collect-grad-norm-jump", Jumps().grad_norm),
    ):
        described = manual.partition(f"{option} ")[2].partition(" --collect-")[0]
        assert f"(default: {default:g})" in described


SELECTION = {
    "--collect-start": "3",
    "--collect-every": "2",
    "--collect-layers": "0,2-3",
    "--collect-modules": "linear_fc*,core_attention",
    "--collect-tensors": "all,attention_probs",
    "--collect-operations": "forward",
    "--collect-ranks": "first",
    "--collect-slice": "s=0:16,h=0:32:2",
    "--collect-max-gib": "0.5",
    "--collect-max-files": "100",
    "--collect-keep-free-gib": "2",
}


def test_the_selection_and_the_limits_reach_training_under_the_same_names():
    options = [word for pair in SELECTION.items() for word in pair]
    for driver in ([COLLECT, "single"], [DRAW, "collect"]):
        [words] = dry(*driver, "mxfp8", *options, "--collect-plan", "--quant-audit")
        assert {flag: value(words, flag) for flag in SELECTION} == SELECTION
        assert value(words, "--control-iter") == "1"
        assert {"--collect-plan", "--quant-audit"} <= set(words)


@pytest.mark.parametrize(
    "given",
    [
        ["--collect-iterations", "1-3,10-"],
        ["--", "--collect-iterations", "1-3,10-"],
        ["--", "--collect_iterations=1-3,10-"],
        ["--", "--collect-ring", "2"],
        ["--", "--collect-flag-file=x"],
    ],
    ids=" ".join,
)
def test_windows_and_events_say_themselves_how_many_iterations_there_are(given):
    [words] = dry(COLLECT, "single", "mxfp8", *given)
    assert words[-1] == given[-1].replace("collect_", "collect-") or given[0] != "--"
    assert "--control-iter" not in words


def test_a_number_of_iterations_after_two_dashes_is_expected_by_the_driver():
    given = ["--control_iter=4", "--control-iter", "3"]
    [words] = dry(COLLECT, "single", "mxfp8", "--control-iter", "2", "--", *given)
    assert value(words[:-3], "--control-iter") == "3"


@pytest.mark.parametrize("flag", ["--collect-start", "--collect-every", "--collect-max-files"])
def test_a_count_of_nothing_is_refused(flag):
    done = bash(COLLECT, "single", "mxfp8", flag, "0", DRY_RUN="1")
    assert done.returncode == 2
    assert done.stderr.startswith(f"[ERROR] {flag} is '0'; give an integer of at least 1")


@pytest.mark.parametrize("mode", ["visualize", "both"])
@pytest.mark.parametrize("words", [["--collect-plan"], ["--", "--quant-audit"]], ids=" ".join)
def test_what_stops_before_training_is_not_drawn(mode, words):
    done = bash(DRAW, mode, "mxfp8", *words, DRY_RUN="1")
    assert done.returncode == 2
    assert "[ERROR] --collect-plan and --quant-audit collect nothing that could be" in done.stderr


def test_batch_is_four_types_and_quick_two_layers():
    batch = dry(COLLECT, "batch", "--preset", "tiny")
    assert [value(words, "--custom-quant-type") for words in batch] == [
        "bf16",
        "mxfp8",
        "mxfp4",
        "hifp8",
    ]
    [quick] = dry(COLLECT, "quick", "hifp8")
    assert value(quick, "--collect-layers") == "first,last"
    [named] = dry(COLLECT, "quick", "--collect-layers", "0,2-3")
    assert value(named, "--collect-layers") == "0,2-3"


def test_the_environment_gives_defaults_and_an_option_wins():
    [words] = dry(COLLECT, "single", CUSTOM_QUANT_TYPE="mxfp4", TENSOR_SAVE_DIR="/x")
    assert value(words, "--tensor-save-dir") == "/x/mxfp4"
    [words] = dry(
        COLLECT,
        "single",
        "bf16",
        "--tensor-path",
        "/y",
        CUSTOM_QUANT_TYPE="mxfp4",
        TENSOR_SAVE_DIR="/x",
    )
    assert value(words, "--tensor-save-dir") == "/y/bf16"


def test_a_spelled_out_format_is_a_folder_without_colons():
    [words] = dry(COLLECT, "single", "FA_mx:e3m4:b16:rceil")
    assert value(words, "--custom-quant-type") == "FA_mx:e3m4:b16:rceil"
    assert value(words, "--tensor-save-dir") == "enhanced_tensor_logs/FA_mx-e3m4-b16-rceil"


def test_what_follows_two_dashes_goes_to_training_last():
    [words] = dry(
        COLLECT, "single", "mxfp8", "--dtype", "fp32", "--", "--lr", "1e-3", "--seed", "7"
    )
    assert words[-4:] == ["--lr", "1e-3", "--seed", "7"]
    assert "--bf16" not in words


def test_processes_and_checkpoint_reach_the_training_script():
    [words] = dry(COLLECT, "single", "mxfp8", "--nproc", "2", "--checkpoint-path", "ck")
    assert value(words, "--nproc-per-node") == "2"
    assert value(words, "--save") == "ck/mxfp8"
    [words] = dry(COLLECT, "single", "mxfp8")
    assert "--save" not in words


def test_draw_modes():
    [draw] = dry(DRAW)
    assert value(draw, "--tensor_dir") == "enhanced_tensor_logs"
    assert value(draw, "--output_dir") == "draw"
    assert "--run" not in draw
    [draw] = dry(
        DRAW, "visualize", "mxfp8", "--tensor-dir", "a", "--output-dir", "b", "--run", "latest"
    )
    assert [value(draw, f) for f in ("--tensor_dir", "--output_dir", "--run")] == [
        "a/mxfp8",
        "b",
        "latest",
    ]
    train, draw = dry(
        DRAW, "both", "mxfp8", "--control-iter", "3", "--tensor-dir", "a", "--", "--seed", "7"
    )
    assert value(train, "--tensor-save-dir") == value(draw, "--tensor_dir") == "a/mxfp8"
    assert value(train, "--control-iter") == "3"
    assert value(train, "--seed") == "7"
    assert value(draw, "--run") == "latest"
    [train] = dry(DRAW, "--mode", "collect", "--quant-type", "bf16", "--tensor-path", "a")
    assert value(train, "--tensor-save-dir") == "a/bf16"


def test_default_paths_are_in_the_tree_and_named_ones_where_the_user_is(tmp_path):
    done = bash(COLLECT, "single", "mxfp8", "--tensor-path", "here", cwd=tmp_path, DRY_RUN="1")
    words = shlex.split(done.stdout)
    assert value(words, "--tensor-save-dir") == "here/mxfp8"
    assert value(words, "--tensorboard-dir").startswith(f"{REPO}/tensorboard_logs/")


def test_a_dry_run_makes_no_folder(tmp_path):
    commands = dry(COLLECT, "batch", "--tensor-path", tmp_path / "tensors")
    assert len(commands) == 4
    for words in commands:
        assert not Path(value(words, "--tensor-save-dir")).exists()
        assert not (REPO / value(words, "--tensorboard-dir")).exists()


def test_a_switch_that_says_no_is_no_dry_run(corpus, tmp_path):
    """A wrong folder is detected by a check that a dry run skips."""
    (tmp_path / "file").write_text("")
    files = ("--tokenizer-path", corpus[0], "--data-path", corpus[1])
    for no in ("0", "false"):
        done = bash(COLLECT, "single", "--tensor-path", tmp_path / "file/x", *files, DRY_RUN=no)
        assert done.returncode == 1
        assert "[ERROR] cannot write to " in done.stderr


def test_an_interpreter_that_is_not_there():
    done = bash(COLLECT, "single", DRY_RUN="1", LAB_PYTHON="/nope")
    assert done.returncode == 1
    assert done.stderr.startswith("[ERROR] there is no '/nope'; name a Python 3.10 or newer in LAB")
