"""A run resumes only from a checkpoint that fits it, and reports every difference."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests import forks
from tests.training.corpus import make_corpus
from tests.training.runs import MOCK_DATA, Training, refused, succeeded


@pytest.fixture(scope="module")
def second(checkpoints):
    """Return the options that resume from iteration 2."""
    return ("--load", checkpoints, "--ckpt-step", "2")


def test_another_run_is_refused_unless_it_is_meant(run_quickly, second, corpus, tmp_path):
    other = make_corpus(tmp_path, seed=1)
    for flags, message in (
        (("--custom-quant-type", "mxfp8"), "format is bf16 there and mxfp8 here"),
        (("--seed", "5"), "seed is 1234 there and 5 here"),
        (("--seq-length", "32"), "sequence length is 64 there and 32 here"),
        (("--split", "70,20,10"), "split is 80,10,10 there and 70,20,10 here"),
        (("--bf16",), "type is fp32 there and bf16 here"),
        (("--data-path", other), "data is counting ("),
    ):
        assert message in refused(run_quickly(*second, *flags))

    flags = ("--custom-quant-type", "mxfp8", "--seed", "5")
    line = refused(run_quickly(*second, *flags))
    assert "format is bf16 there and mxfp8 here" in line
    assert "seed is 1234 there and 5 here" in line
    assert "or --allow-changed-run to resume anyway" in line
    allowed = succeeded(run_quickly(*second, *flags, "--allow-changed-run"))
    assert list(allowed.lines) == [3, 4]
    assert "> --allow-changed-run: format is bf16 there and mxfp8 here" in allowed.output
    assert list(succeeded(run_quickly(*second, *flags, "--finetune")).lines) == [1, 2, 3, 4]


def test_changes_that_are_permitted_are_named(run_quickly, second):
    """Settings that change only the remaining iterations need no permission, but are in the log."""
    prefix = "> changed since the checkpoint: "
    assert prefix not in succeeded(run_quickly(*second)).output
    flags = ("--clip-grad", "0.5", "--hidden-dropout", "0.1", "--eod-mask-loss")
    resumed = succeeded(run_quickly(*second, *flags))
    assert list(resumed.lines) == [3, 4]
    [line] = [line for line in resumed.output.splitlines() if line.startswith(prefix)]
    assert line.removeprefix(prefix).split("; ") == [
        "--hidden-dropout is 0.0 there and 0.1 here",
        "--clip-grad is 1.0 there and 0.5 here",
        "--eod-mask-loss is False there and True here",
    ]


def test_what_a_checkpoint_says_is_escaped_in_the_log(run_quickly, checkpoints, tmp_path):
    ck = tmp_path / "ck"
    shutil.copytree(checkpoints, ck)
    [file] = ck.glob("iter_*2/common.pt")
    common = torch.load(file, weights_only=True)
    common["run"]["split"] = common["args"]["clip_grad"] = "\x1b[31mred\nline"
    torch.save(common, file)
    flags = ("--load", ck, "--ckpt-step", "2", "--allow-changed-run")
    resumed = succeeded(run_quickly(*flags))
    assert "split is \\x1b[31mred\\nline there" in resumed.output
    assert "--clip-grad is \\x1b[31mred\\nline there" in resumed.output
    assert "\x1b" not in resumed.output


def test_the_same_data_elsewhere_is_the_same_data(run_quickly, second, corpus, tmp_path):
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", tmp_path / f"{corpus.name}{suffix}")
    assert list(succeeded(run_quickly(*second, "--data-path", tmp_path / corpus.name)).lines) == [
        3,
        4,
    ]


def test_a_recipe_is_known_by_what_it_says(run_quickly, corpus, tmp_path):
    text = """
configs:
  low: {linear: mxfp8}
matchers:
  all: {config: low, type: glob, pattern: "*.mlp.*", enabled: true}
"""
    recipe, ck = tmp_path / "low.yaml", tmp_path / "ck"
    recipe.write_text(text)
    succeeded(run_quickly("--quant-recipe", recipe, "--save", ck, "--exit-interval", "2"))
    flags = ("--quant-recipe", recipe, "--load", ck)
    recipe.write_text("# a comment\n" + text)
    assert list(succeeded(run_quickly(*flags)).lines) == [3, 4]
    recipe.write_text(text.replace("mxfp8", "mxfp4"))
    assert "format is recipe_low (" in refused(run_quickly(*flags))


def test_the_type_of_the_weights_may_change_without_the_optimizer(run_quickly, second):
    changed = (*second, "--bf16", "--allow-changed-run")
    assert "give the same dtype or --no-load-optim" in refused(run_quickly(*changed))
    rest = succeeded(run_quickly(*changed, "--no-load-optim"))
    rates = {number: float(line["lr"]) for number, line in rest.lines.items()}
    assert rates == {3: 7.5e-4, 4: 0}, "the schedule does not start anew"


def test_a_finished_run_says_that_nothing_is_left(run_quickly, checkpoints, tmp_path):
    """The checkpoint is still saved if --save is not the folder that it was loaded from."""
    other = tmp_path / "other"
    for save in (checkpoints, other):
        done = succeeded(run_quickly("--load", checkpoints, "--save", save))
        assert not done.lines
        message = "the checkpoint is of iteration 4, and --train-iters is 4"
        assert f"> nothing left to train: {message}" in done.output
        assert ("saving checkpoint" in done.output) == (save == other)
    assert list(succeeded(run_quickly("--load", other, "--ckpt-step", "4", "--finetune")).lines)


def test_a_finished_run_is_evaluated_again_and_extended(run_quickly, tmp_path):
    """The final evaluation consumes no samples, and a smaller batch leaves enough of them."""
    evaluated = ("--eval-iters", "1", "--eval-interval", "2", "--load", tmp_path)
    first = succeeded(run_quickly(*evaluated, "--save", tmp_path))
    again = succeeded(run_quickly(*evaluated))
    expected = validations(first)[2:]
    assert [where for where, _ in expected] == ["4 on validation set", "4 on test set"]
    assert validations(again) == expected
    changed = ("--train-iters", "6", "--global-batch-size", "2", "--override-opt_param-scheduler")
    longer = succeeded(run_quickly(*evaluated, *changed, "--allow-changed-run"))
    assert list(longer.lines) == [5, 6]
    places = [where for where, _ in validations(longer)]
    assert places == ["6", "6 on validation set", "6 on test set"]


def validations(training: Training) -> list[tuple[str, str]]:
    """Return the iteration (and the data set, at the end) and the loss of each evaluation."""
    pattern = r"^ validation loss at iteration (.+?) \| lm loss value: (\S+)"
    return re.findall(pattern, training.output, re.M)


def test_a_new_run_does_not_overwrite_the_checkpoints_it_starts_from(
    run_quickly, checkpoints, second
):
    line = refused(run_quickly(*second, "--finetune", "--save", checkpoints))
    assert "holds a checkpoint of iteration 4, and --finetune starts at iteration 0" in line
    assert "give another --save" in line


def test_what_the_weights_compute_is_theirs(run_quickly, corpus, tmp_path):
    """Settings that differ from the defaults are compared, and are written by --save-hf."""
    ck, out = tmp_path / "ck", tmp_path / "out"
    special = ("--rotary-base", "500000", "--norm-epsilon", "1e-6", "--use-rope-scaling")
    longer = ("--max-position-embeddings", "128")
    succeeded(run_quickly(*special, *longer, "--save", ck, "--exit-interval", "2"))
    line = refused(run_quickly("--load", ck))
    for words in (
        "rotary_base is 500000.0 there and 10000 here",
        "layernorm_epsilon is 1e-06 there and 1e-05 here",
        "use_rope_scaling is True there and False here",
        "or --finetune to start a new run from its weights",
    ):
        assert words in line
    assert list(succeeded(run_quickly("--load", ck, "--finetune")).lines) == [1, 2, 3, 4]

    convert = ("--load", ck, "--train-iters", "0", "--save-hf", out)
    for flags in (longer, ("--finetune", *longer)):
        line = refused(run_quickly(*convert, *flags))
        assert "rotary_base is 500000.0 there and 10000 here" in line
        assert "--finetune" not in line
    line = refused(run_quickly(*convert, *special))
    assert "max_position_embeddings is 128 there and 64 here" in line
    assert not out.exists()
    succeeded(run_quickly(*convert, *special, *longer))
    config = json.loads((out / "config.json").read_text())
    assert (config["rope_theta"], config["rms_norm_eps"]) == (500000.0, 1e-6)
    assert config["max_position_embeddings"] == 128
    assert config["eos_token_id"] is None, "the NullTokenizer has no such token"


def test_another_numbering_of_the_ranks_starts_the_random_states_anew(run_quickly, second):
    said = "> the checkpoint has another parallel layout: random states are initialized anew"
    assert said in succeeded(run_quickly(*second, "--use-tp-pp-dp-mapping")).output
    assert said not in succeeded(run_quickly(*second)).output


def test_an_address_without_a_port(run_quickly, second):
    """A leftover MASTER_ADDR is ignored by one rank; several ranks need a port as well."""
    assert list(succeeded(run_quickly(*second, MASTER_ADDR="127.0.0.1")).lines) == [3, 4]
    line = refused(run_quickly(*second, MASTER_ADDR="127.0.0.1", WORLD_SIZE="1"))
    assert "MASTER_PORT is not" in line


CONSTANT = ("--lr-decay-style", "constant")
OVERRIDE = "--override-opt_param-scheduler"
KEEP = "--use-checkpoint-opt_param-scheduler"


def test_the_learning_rate_of_the_command_line_or_of_the_checkpoint(run_quickly, second):
    """The checkpoint's learning rate is 3e-3 and decays linearly to 0 in iteration 4."""
    other = (*second, "--lr", "1e-3")
    assert "checkpointvalue 0.003 for learning rate" in refused(run_quickly(*other))
    kept = succeeded(run_quickly(*other, KEEP))
    assert {i: float(line["lr"]) for i, line in kept.lines.items()} == {3: 7.5e-4, 4: 0}
    ours = succeeded(run_quickly(*other, "--min-lr", "2e-4", OVERRIDE))
    assert {i: float(line["lr"]) for i, line in ours.lines.items()} == {3: 4e-4, 4: 2e-4}
    assert "has finished its decay" not in ours.output
    ended = succeeded(run_quickly(*other, "--lr-decay-iters", "1", OVERRIDE))
    assert {i: float(line["lr"]) for i, line in ended.lines.items()} == {3: 0, 4: 0}
    assert re.search(
        r"^> the learning rate has finished its decay: the schedule ends at sample \d+, the run "
        r"resumes at sample \d+ and trains at 0\.0 \(--min-lr\)",
        ended.output,
        re.M,
    )
    constant = succeeded(run_quickly(*other, *CONSTANT, OVERRIDE))
    assert {i: float(line["lr"]) for i, line in constant.lines.items()} == {3: 1e-3, 4: 1e-3}


@pytest.mark.parametrize("layout", [(), ("--use-distributed-optimizer",)], ids=["whole", "shared"])
def test_the_optimizer_s_numbers_are_refused_or_taken(run_quickly, checkpoints, tmp_path, layout):
    """These settings change the first step after resuming, and so the loss of the second one."""
    ck = checkpoints
    if layout:
        ck = tmp_path / "ck"
        succeeded(run_quickly(*layout, "--save", ck, "--exit-interval", "2"))
    load = (*layout, "--load", ck, "--ckpt-step", "2")
    same = succeeded(run_quickly(*load))
    changes = (("--adam-beta2", "0.9"), ("--adam-eps", "1e-2"), ("--weight-decay", "0.9"))
    for flags in changes[:1] if layout else changes:
        message = refused(run_quickly(*load, *flags))
        assert "--use-checkpoint-opt_param-scheduler to take " in message
        assert succeeded(run_quickly(*load, *flags, KEEP)).losses == same.losses
        taken = succeeded(run_quickly(*load, *flags, OVERRIDE)).losses
        assert taken[3] == same.losses[3]
        assert taken[4] != same.losses[4]


def test_sgd_and_a_learning_rate_of_the_embedding_go_on(run_quickly, tmp_path):
    """megatron-core allocates no state for SGD, and does not mark the parameters of --decoupled-lr.

    Without the mark, these parameters get the learning rate of the others from a checkpoint.
    """
    flags = ("--optimizer", "sgd", "--decoupled-lr", "1e-1")
    whole = succeeded(run_quickly(*flags, "--save", tmp_path, "--save-interval", "2"))
    rest = succeeded(run_quickly(*flags, "--load", tmp_path, "--ckpt-step", "2"))
    assert rest.lines == {number: whole.lines[number] for number in (3, 4)}


@pytest.mark.parametrize("layout", [(), ("--use-distributed-optimizer",)], ids=["whole", "shared"])
def test_a_checkpoint_before_the_first_step_of_the_optimizer(run_quickly, tmp_path, layout):
    """The first gradients overflow with the default loss scale of fp16."""
    flags = ("--fp16", *layout, "--save", tmp_path, "--load", tmp_path)
    half = succeeded(run_quickly(*flags, "--exit-interval", "2"))
    rest = succeeded(run_quickly(*flags))
    for number, run in enumerate((half, half, rest, rest), 1):
        line = rf"iteration +{number}/ .* number of skipped iterations: +1 \|"
        assert re.search(line, run.output), run.output[-500:]


def test_saving_starts_no_process_that_stays(tmp_path):
    """megatron-core would start a process for the queue of its asynchronous saves."""
    worker = Path(__file__).with_name("children_worker.py")
    done = forks.run(worker, *MOCK_DATA, "--train-iters", "1", "--save", tmp_path)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1", done.stderr
    assert "children: []" in done.stdout
