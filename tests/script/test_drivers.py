"""The drivers and the training script: what they would run, what they refuse, and the whole thing
once.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron.tensor_record import ON_REQUEST, TENSOR_NAMES, TensorRecord
from tests.subprocesses import REPO, environment, run

COLLECT = REPO / "run_tensor_collection.sh"
DRAW = REPO / "run_tensor_draw.sh"
TRAIN = REPO / "examples" / "llama" / "train_llama32_1b_h100_fp8.sh"
ALL = pytest.mark.parametrize("script", [COLLECT, DRAW, TRAIN], ids=lambda path: path.name)


def bash(script, *arguments, cwd=REPO, **variables):
    """Run a driver with this Python."""
    done = run(
        ["bash", script, *arguments],
        cwd=cwd,
        env=environment(**{"LAB_PYTHON": sys.executable} | variables),
    )
    assert "Traceback" not in done.stderr
    assert "unbound variable" not in done.stderr
    return done


def dry(script, *arguments, **variables):
    """The commands that a driver would run, as words."""
    done = bash(script, *arguments, DRY_RUN="1", **variables)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def value(words, flag):
    """What follows a flag, the last time that it is given: that one wins."""
    assert flag in words, f"{flag} is not in {words}"
    return words[len(words) - 1 - words[::-1].index(flag) + 1]


@pytest.fixture
def corpus(tmp_path):
    """A tokenizer and data that are there, though not real: for what only looks."""
    (tmp_path / "tok.model").write_bytes(b"")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text_document{suffix}").write_bytes(b"")
    return tmp_path / "tok.model", tmp_path / "text_document"


# The training script


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
    """What is printed is parsed by the program that it is for."""
    check = "import sys; from megatron.training.arguments import parse_args as p; p(sys.argv[1:])"
    for preset in ("1b", "tiny"):
        [words] = dry(TRAIN, "none", "", *corpus, "--preset", preset, NPROC="2")
        flags = words[words.index(str(REPO / "pretrain_gpt.py")) + 1 :]
        done = run([sys.executable, "-c", check, *flags], env=environment(PYTHONPATH=REPO))
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
    assert value(words, "--save") == "checkpoints/llama32_tiny"
    assert value(words, "--tensorboard-dir") == "tensorboard_logs/llama32_tiny"
    assert "--bf16" in words


def test_dtypes():
    assert "--bf16" not in dry(TRAIN, "", "", "", "", "fp32", "--preset", "tiny")[0]
    assert "--bf16" in dry(TRAIN, "", "", "", "", "fp8", "--preset", "tiny")[0]
    done = bash(TRAIN, "", "", "", "", "int8")
    assert done.returncode == 2
    assert (
        done.stderr
        == "[ERROR] DTYPE is 'int8'; it is bf16, fp16, fp32 or fp8 (bf16 with simulated mxfp8)\n"
    )


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


# The drivers' options


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
        [words] = dry(*driver, "mxfp8", *options, "--collect-plan")
        assert {flag: value(words, flag) for flag in SELECTION} == SELECTION
        assert value(words, "--control-iter") == "1"
        assert "--collect-plan" in words


def test_windows_say_themselves_how_many_iterations_there_are():
    [words] = dry(COLLECT, "single", "mxfp8", "--collect-iterations", "1-3,10-")
    assert value(words, "--collect-iterations") == "1-3,10-"
    assert "--control-iter" not in words


@pytest.mark.parametrize("flag", ["--collect-start", "--collect-every", "--collect-max-files"])
def test_a_count_of_nothing_is_refused(flag):
    done = bash(COLLECT, "single", "mxfp8", flag, "0", DRY_RUN="1")
    assert done.returncode == 2
    assert done.stderr.startswith(f"[ERROR] {flag} is '0'; give a whole number of at least 1")


@pytest.mark.parametrize("mode", ["visualize", "both"])
def test_a_plan_is_not_drawn(mode):
    done = bash(DRAW, mode, "mxfp8", "--collect-plan", DRY_RUN="1")
    assert done.returncode == 2
    assert "[ERROR] --collect-plan collects nothing that could be drawn" in done.stderr


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
    [named] = dry(COLLECT, "quick", "--collect-layers", "0,2-4")
    assert value(named, "--collect-layers") == "0,2-4"


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
    """The wrong folder is found by what a dry run leaves out."""
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
            "--control-iter is '-1'; give a whole number",
        ),
        (
            COLLECT,
            ["single", "--control-iter", "1.5"],
            "--control-iter is '1.5'; give a whole number",
        ),
        (
            DRAW,
            ["both", "mxfp8", "--control-iter", "-1"],
            "--control-iter is '-1'; give a whole number",
        ),
        (COLLECT, ["single", "--collect-micro-batches", "x"], "--collect-micro-batches is 'x'"),
        (COLLECT, ["single", "--nproc", "0"], "--nproc is '0'; give a whole number of at least 1"),
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
            "unknown option --frobnicate; the options are --mode ",
        ),
        (COLLECT, ["single", "mxfp8", "mxfp4"], "'mxfp4' is one word too many"),
        (COLLECT, ["batch", "mxfp8"], "batch collects bf16, mxfp8, mxfp4 and hifp8"),
        (COLLECT, ["single", "--mode", "batch"], "two values for mode: 'single' and 'batch'"),
        (DRAW, ["visualize", "--nproc", "2"], "visualize trains nothing: '--nproc' belongs to"),
        (DRAW, ["both", "--run", "latest"], "--run belongs to visualize"),
        (TRAIN, ["a", "b", "c", "d", "bf16", "e"], "6 arguments, but there are five"),
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
        (["--data-path", "no/such"], "[ERROR] no tokenizer at "),  # beside the default tokenizer
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


# The whole thing


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """`run_tensor_draw.sh both mxfp8` on the default corpus."""
    folder = tmp_path_factory.mktemp("both")
    done = bash(
        DRAW,
        "both",
        "mxfp8",
        "--preset",
        "tiny",
        "--tensor-dir",
        folder / "logs",
        "--output-dir",
        folder / "draw",
    )
    return done, folder


def test_both_collects_every_tensor_name_and_draws(both):
    done, folder = both
    assert done.returncode == 0, done.stderr
    files = list((folder / "logs" / "mxfp8").glob("*.pt"))
    found = set()
    for path in files:
        payload = torch.load(path, weights_only=True)
        record = TensorRecord.from_metadata(payload["metadata"])
        assert record.filename == path.name
        assert list(payload["tensor"].shape) == record.shape
        found.add((record.layer_type, record.tensor_name))
    expected = {(kind, name) for kind, names in TENSOR_NAMES.items() for name in names}
    assert found == {(kind, name) for kind, name in expected if name not in ON_REQUEST}
    assert (folder / "draw" / "quick_analysis.png").stat().st_size > 10_000
    assert (folder / "draw" / "report.html").stat().st_size > 1_000_000
    text = (folder / "draw" / "tensor_stats.txt").read_text()
    assert f"{len(files)} tensors, " in text
    assert "could not be read" not in text


def test_both_reports_where_to_look(both):
    done, _ = both
    for word in ("phase", "component", "operation", "layer", "folder", "log ", "next"):
        assert f"\n  {word}" in done.stdout
    [log] = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("  log ")]
    assert "lm loss" in (REPO / log).read_text()


def test_an_interrupt_ends_training_too(tmp_path):
    """A signal to the outermost script only, as from a job scheduler."""
    words = [
        "bash",
        DRAW,
        "both",
        "mxfp8",
        "--preset",
        "tiny",
        "--control-iter",
        "0",
        "--tensor-dir",
        tmp_path,
    ]
    driver = subprocess.Popen(
        [str(word) for word in words],
        cwd=REPO,
        env=environment(LAB_PYTHON=sys.executable),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 120
    while not list(tmp_path.glob("mxfp8/*.pt")):
        assert driver.poll() is None, driver.communicate()
        assert time.monotonic() < end, "no tensor in two minutes"
        time.sleep(0.1)
    driver.send_signal(signal.SIGINT)
    out, err = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert "[ERROR] interrupted (SIGTERM): training was stopped" in err
    assert "mxfp8: " in out
    assert list(tmp_path.glob("mxfp8/*.pt"))
    assert not processes_with(str(tmp_path))


def processes_with(word):
    """Command lines of all living processes that contain a word."""
    if not Path("/proc/self").exists():
        return subprocess.run(
            ["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True
        ).stdout.count(word)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if word in line:
                found.append(line)
    return found
