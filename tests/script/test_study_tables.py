"""Test the tables, the verdict and the page of script/study.py with made-up logs and errors."""

from __future__ import annotations

import importlib
import math
import re
import shlex
import sys

import numpy as np
import pandas as pd
import pytest

from configs.lookup import ConfigError
from loss_gaps import gaps, page, trainings
from loss_gaps.configurations import Configuration, configurations_of
from loss_gaps.offline import check_names, errors_of, pairs_of
from loss_gaps.run_log import COMPLETE, DIVERGED, FAILED, RunLog, ending, parse_log, read_log
from megatron.fake_quant.recipe import load_recipe
from tests.script.study_logs import LOG
from tests.subprocesses import REPO

HEAD = "pretrain_gpt.py --seed 1\n"


def log_of(status=0, head=HEAD):
    return LOG.format(head=head, end=ending(status, 12.34))


def run(loss, status=COMPLETE, **more):
    """Return a run of ten iterations whose held-out loss is `loss`."""
    losses = {iteration: 8 - 0.1 * iteration for iteration in range(1, 11)}
    norms = dict.fromkeys(losses, 1.5)
    message = "" if status == COMPLETE else "reason"
    held_out = loss if status == COMPLETE else math.nan
    return RunLog(status, losses, norms, held_out, 2.0, 1000, message)


def runs_of(**by_name):
    """Return runs with the held-out losses of seeds 1, 2 ...; a status stands for a lost run."""
    return {
        (name, seed): run(math.nan, loss) if isinstance(loss, str) else run(loss)
        for name, losses in by_name.items()
        for seed, loss in enumerate(losses, 1)
    }


def errors(**by_name):
    table = pd.DataFrame({"offline_error": by_name})
    return table.assign(
        offline_error_forward=table["offline_error"],
        offline_error_backward=-table["offline_error"],
        bits=4.25,
    )


def test_a_complete_log_has_losses_norms_and_the_held_out_loss():
    result = parse_log(log_of(), HEAD, 2)
    assert result.status == COMPLETE
    assert result.losses == {1: 7.5, 2: 7.25}
    assert result.gradient_norms == {1: 2.125, 2: 1.5}
    assert result.held_out_loss == 7.375
    assert result.parameters == 1800, "of both ranks, without a second copy of the norms"
    assert result.seconds == 12.3


def test_an_interrupted_log_or_that_of_another_run_is_not_used():
    assert parse_log(log_of().rpartition("[STUDY]")[0], HEAD, 2) is None
    assert parse_log(log_of(head="pretrain_gpt.py --seed 2\n"), HEAD, 2) is None


def test_a_diverged_run_is_a_result_and_a_failed_one_is_repeated(tmp_path):
    path = tmp_path / "run.log"
    lines = log_of().splitlines(keepends=True)
    error = "[ERROR] lm loss is nan at iteration 2; lower --lr\n"
    path.write_text("".join([*lines[:4], error, ending(1, 2.0)]))
    result = read_log(path, HEAD, 2)
    assert result.status == DIVERGED
    assert "nan at iteration 2" in result.message
    assert math.isnan(result.held_out_loss)
    path.write_text("".join([*lines[:3], "[ERROR] no memory\n", ending(1, 2.0)]))
    assert parse_log(path.read_text(), HEAD, 2).status == FAILED
    assert parse_log(path.read_text(), HEAD, 2).message == "no memory"
    assert read_log(path, HEAD, 2) is None
    assert read_log(path, HEAD, 2, failed=True).status == FAILED
    killed = parse_log("".join([*lines[:3], ending(-9, 2.0)]), HEAD, 2)
    assert (killed.status, killed.message) == (FAILED, "exit status -9")
    assert parse_log(log_of(), HEAD, 3).status == FAILED
    assert read_log(tmp_path / "absent.log", HEAD, 2) is None


def test_gaps_are_paired_by_seed():
    # The seeds differ by 1, and the differences from bf16 are 0.1, 0.2 and 0.3.
    runs = runs_of(bf16=(5.0, 6.0, 7.0), mxfp4=(5.1, 6.2, 7.3), mxfp8=(5.0, 6.001, 6.999))
    table = gaps.gap_table(runs, errors(mxfp4=0.2, mxfp8=0.03)).set_index("configuration")
    assert list(table.index) == ["mxfp8", "mxfp4"]
    row = table.loc["mxfp4"]
    assert row["gap"] == pytest.approx(0.2)
    assert row["standard_error"] == pytest.approx(0.1 / math.sqrt(3))
    assert row["high"] - row["gap"] == pytest.approx(4.303 * 0.1 / math.sqrt(3), rel=1e-3)
    assert row["gap_percent"] == pytest.approx(100 * 0.2 / 6)
    assert row["seeds"] == 3
    assert row["offline_error"] == 0.2


def test_lost_runs_are_counted_and_a_diverged_one_makes_the_gap_infinite():
    runs = runs_of(
        bf16=(5.0, 6.0, FAILED),
        mxfp4=(5.1, DIVERGED, 5.0),
        nvfp4=(5.2, FAILED, 5.0),
        mxfp8=(5.0, 6.0, 7.0),
    )
    table = gaps.gap_table(runs, errors(mxfp4=0.3, nvfp4=0.2)).set_index("configuration")
    assert table.loc["mxfp4", "gap"] == math.inf
    assert list(table.loc["mxfp4", ["seeds", "diverged", "failed"]]) == [1, 1, 0]
    assert list(table.loc["nvfp4", ["seeds", "diverged", "failed"]]) == [1, 0, 1]
    assert table.loc["nvfp4", "gap"] == pytest.approx(0.2)
    assert math.isnan(table.loc["nvfp4", "low"]), "one pair has no interval"
    assert table.loc["mxfp8", "seeds"] == 2, "bf16 has no third seed"
    one = gaps.gap_table(runs_of(bf16=(5.0,), mxfp4=(5.1,)), errors(mxfp4=0.3))
    assert gaps.verdict(one, {}, [])[1] == (
        "A gap has an interval only with two complete seeds or more."
    )
    both = runs_of(bf16=(5.0, DIVERGED, 5.0), mxfp4=(5.25, DIVERGED, 5.25))
    row = gaps.gap_table(both, errors(mxfp4=0.3)).iloc[0]
    assert row["gap"] == 0.25, "the seed with which bf16 diverged is left out"
    assert row["diverged"] == 1
    statuses = gaps.run_table(runs).set_index(["configuration", "seed"])["status"]
    assert statuses["mxfp4", 2] == DIVERGED
    assert statuses["nvfp4", 2] == FAILED
    text = " ".join(gaps.verdict(table.reset_index(), runs, []))
    assert "mxfp4 diverged" in text


def test_runs_and_curves_have_a_row_each():
    runs = runs_of(bf16=(5.0,))
    row = gaps.run_table(runs).iloc[0]
    assert (row["iterations"], row["held_out_loss"]) == (10, 5.0)
    assert (row["first_loss"], row["last_loss"]) == (7.9, 7.0)
    assert (row["mean_grad_norm"], row["largest_grad_norm"]) == (1.5, 1.5)
    curves = gaps.curve_table(runs)
    assert len(curves) == 10
    assert list(curves.iloc[-1]) == ["bf16", 1, 10, 7.0, 1.5]


def many(count=21, noise=0.0):
    """Return runs and errors of `count` configurations whose gaps grow with their errors."""
    generator = np.random.default_rng(0)
    names = [f"c{number}" for number in range(count)]
    sizes = {name: 0.01 * 1.2**at for at, name in enumerate(names)}
    losses = {
        name: [5 + error * (1 + noise * generator.normal()) for _ in range(3)]
        for name, error in sizes.items()
    }
    return runs_of(bf16=(5.0, 5.0, 5.0), **losses), errors(**sizes)


def test_the_verdict_says_whether_the_error_predicts_the_gap():
    runs, offline = many()
    table = gaps.gap_table(runs, offline)
    first, second = gaps.verdict(table, runs, [])
    assert first.startswith("In these runs, the offline error predicts the order of the gaps")
    assert "over 21 configurations is 1.00 (95 % bootstrap interval 1.00 to 1.00)." in first
    assert second.startswith("The gap of 21 of 21 configurations is above zero, from +0.0100 (c0)")
    backwards = table.assign(offline_error=list(table["offline_error"])[::-1])
    assert gaps.verdict(backwards, runs, [])[0].startswith("These runs do not show that")
    runs, offline = many(7)
    few = gaps.verdict(gaps.gap_table(runs, offline), runs, [])[0]
    assert "fewer than 20 configurations prove little" in few
    runs, offline = many(4)
    fewer = gaps.verdict(gaps.gap_table(runs, offline), runs, [])[0]
    assert fewer == (
        "Spearman's rank correlation over 4 configurations is 1.00; fewer than 6 are too few to "
        "say whether the offline error predicts the gap."
    )
    runs, offline = many(2)
    assert "too few for a rank" in gaps.verdict(gaps.gap_table(runs, offline), runs, [])[0]


#: bits per value and relative error of the formats in `offline_table`
OFFLINE = (("mxfp4", 4.25, 0.2), ("nvfp4", 4.5, 0.15), ("mxfp8", 8.25, 0.02))


def offline_table():
    """Return an offline study of two layers in which fc2 of layer 1 needs more bits."""
    rows = []
    for layer, gemm in ((0, "fprop"), (0, "dgrad"), (1, "fprop"), (1, "dgrad")):
        for name, bits, error in OFFLINE:
            hard = 4.0 if layer == 1 and name != "mxfp8" else 1.0
            rows.append(
                {
                    "iteration": 1,
                    "layer_idx": layer,
                    "module": f"decoder.layers.{layer}.mlp.linear_fc2",
                    "operation": "linear",
                    "gemm": gemm,
                    "format": name,
                    "recipe": None,
                    "accumulator": None,
                    "relative_error": error * hard,
                    "nonfinite": 0,
                    "bits": bits,
                    "values": 100,
                    "matmul_bits": bits,
                    "matmul_values": 200,
                    "reference_nonfinite": 0,
                }
            )
    return pd.DataFrame(rows)


def test_the_offline_error_is_the_root_mean_square_over_all_gemms():
    table = errors_of(offline_table())
    assert table.loc["mxfp8", "offline_error"] == pytest.approx(0.02)
    expected = math.sqrt((2 * 0.2**2 + 2 * 0.8**2) / 4)
    assert table.loc["mxfp4", "offline_error"] == pytest.approx(expected)
    assert table.loc["mxfp4", "offline_error_forward"] == pytest.approx(expected)
    assert table.loc["mxfp4", "bits"] == 4.25
    lost = offline_table()
    lost.loc[lost["format"] == "nvfp4", "nonfinite"] = [1, 0, 0, 0]
    lost = lost.drop(index=lost.index[lost["format"] == "mxfp4"][0])
    table = errors_of(lost)
    assert math.isnan(table.loc["nvfp4", "offline_error"])
    assert table.loc["nvfp4", "offline_error_backward"] > 0
    assert math.isnan(table.loc["mxfp4", "offline_error"]), "a GEMM was not studied"
    masked = offline_table()
    masked.loc[masked["gemm"].eq("dgrad") & masked["layer_idx"].eq(0), "relative_error"] = math.nan
    table = errors_of(masked)  # this result is zero in high precision
    assert table.loc["mxfp4", "offline_error"] == pytest.approx(
        math.sqrt((0.2**2 + 2 * 0.8**2) / 3)
    )


def test_types_leave_the_lm_head_in_high_precision():
    table = offline_table()
    head = table[table["layer_idx"] == 0].assign(layer_idx=-1, module="output_layer")
    recipe = pd.concat([table, head]).query("format == 'mxfp8'").assign(recipe="mine")
    whole = errors_of(pd.concat([table, head, recipe]), ["mine"])
    assert whole.loc["mxfp8", "offline_error"] == pytest.approx(0.02 * math.sqrt(4 / 6))
    assert whole.loc["mine", "offline_error"] == pytest.approx(0.02)
    assert whole.loc["mine", "bits"] == 8.25
    assert whole.loc["mxfp8", "bits"] == pytest.approx((4 * 8.25 + 2 * 16) / 6)


def test_a_proposal_is_paired_with_the_uniform_format_of_the_same_bits(tmp_path):
    part = {"dump": "operands", "whole": False}
    [pair] = pairs_of(offline_table(), [4.5], tmp_path, **part)
    assert pair.proposed.name == "proposed_4.5_bits"
    assert pair.uniform.name == "layers_nvfp4"
    assert pair.equal_bits
    both = [load_recipe(each.recipe) for each in (pair.proposed, pair.uniform)]
    assert all(recipe.rules for recipe in both)
    runs = runs_of(**{pair.uniform.name: (5.1, 5.2, 5.3), "bf16": (5.0, 5.1, 5.2)})
    assert pair.same
    assert "are the same" in gaps._compared(pair, runs), "no mixture fits 4.5 bits better"
    [mixed] = pairs_of(offline_table(), [6.25], tmp_path, **part)
    [whole] = pairs_of(offline_table(), [6.25], tmp_path, dump="operands", whole=True)
    assert whole.uniform == Configuration("nvfp4")
    assert not mixed.same
    assert (mixed.bits, mixed.uniform_bits) == (6.25, 4.5)
    runs = runs_of(**{mixed.uniform.name: (5.1, 5.2, 5.3), mixed.proposed.name: (5.0, 5.11, 5.19)})
    text = gaps._compared(mixed, runs)
    assert "layers_nvfp4 (4.5 bits), which are not equal bits: the recipe's loss is lower" in text
    runs[mixed.proposed.name, 3] = run(math.nan, DIVERGED)
    text = gaps._compared(mixed, runs)
    assert text.endswith(
        "1 of 3 runs of the recipe diverged, so the losses of the other runs are not compared."
    )
    runs = runs_of(**{mixed.uniform.name: (5.1,), mixed.proposed.name: (5.0,)})
    assert "cannot be compared" in gaps._compared(mixed, runs)
    with pytest.raises(ValueError, match=r"cheapest of the formats take 4\.25 bits"):
        pairs_of(offline_table(), [4.0], tmp_path, **part)


def test_types_with_a_prefix_become_recipes(tmp_path):
    given = tmp_path / "mine.yaml"
    given.write_text(
        "configs: {}\nmatchers:\n  a: {config: mxfp8, type: glob, pattern: '*', enabled: true}\n"
    )
    formats = ["bf16", "mxfp8_e4m3", "mxfp8", "LINEAR_nvfp4:sr"]
    plain, scoped, recipe = configurations_of(formats, [given], tmp_path / "recipes")
    assert plain == Configuration("mxfp8")
    assert plain.flags == ["--custom-quant-type", "mxfp8"]
    assert scoped.name == "linear_nvfp4:sr"
    assert scoped.recipe.name == "linear_nvfp4-sr.yaml"
    assert load_recipe(scoped.recipe).rules
    assert scoped.flags == ["--custom-quant-type", "linear_nvfp4:sr"]
    assert recipe.flags == ["--quant-recipe", str(given)]
    assert (bool(recipe.digest), scoped.digest) == (True, "")
    with pytest.raises(ValueError, match="unknown quantization type 'mxfp5'"):
        configurations_of(["mxfp5"], [], tmp_path)
    (tmp_path / "mxfp8.yaml").write_text(given.read_text())
    with pytest.raises(ValueError, match=r"mxfp8\.yaml has the name of a format"):
        configurations_of(["mxfp8"], [tmp_path / "mxfp8.yaml"], tmp_path / "recipes")


def test_names_that_the_study_itself_takes_are_refused(tmp_path):
    rule = "{config: mxfp8, type: glob, pattern: '*', enabled: true}"
    names = ("recipes/mine", "proposed_4.5_bits", "layers_mxfp4", "nvfp4-sr")
    (tmp_path / "recipes").mkdir()
    paths = [tmp_path / f"{name}.yaml" for name in names]
    for path in paths:
        path.write_text(f"configs: {{}}\nmatchers:\n  a: {rule}\n")
    inside, proposed, layers, stochastic = paths
    folder = tmp_path / "recipes"
    with pytest.raises(ValueError, match=r"would overwrite mine\.yaml; copy this recipe"):
        configurations_of(["mxfp4"], [inside], folder)
    with pytest.raises(ValueError, match="two configurations are named 'nvfp4-sr'"):
        configurations_of(["nvfp4:sr"], [stochastic], folder)
    given = configurations_of(["mxfp4"], [proposed], folder)
    check_names(given, [], whole=True)
    check_names(given, [6.25], whole=True)
    with pytest.raises(ValueError, match=r"a recipe with the same name 'proposed_4\.5_bits'"):
        check_names(given, [6.25, 4.5], whole=True)
    check_names(configurations_of(["mxfp8", "mxfp4"], [], folder), [4.25], whole=True)
    with pytest.raises(ValueError, match=r"--bits is 4, but the smallest .*, mxfp4, has 4\.25"):
        check_names(configurations_of(["mxfp8", "mxfp4"], [], folder), [6, 4], whole=True)
    given = configurations_of(["mxfp4"], [layers], folder)
    check_names(given, [4.5], whole=True)
    with pytest.raises(ValueError, match="a recipe with the same name 'layers_mxfp4'"):
        check_names(given, [4.5], whole=False)
    with pytest.raises(ValueError, match="--formats has only bf16 or types with a prefix"):
        check_names(configurations_of(["linear_mxfp4", "bf16"], [], folder), [4.5], whole=True)


def test_a_study_of_bf16_alone_is_refused_and_its_tables_are_complete(tmp_path):
    with pytest.raises(ValueError, match="nothing to compare, because every study trains bf16"):
        configurations_of(["bf16", "none"], [], tmp_path)
    table = gaps.gap_table(runs_of(bf16=(5.0, 5.1)), errors())
    assert "too few" in gaps.verdict(table, {}, [])[0]
    assert list(table.columns) == list(gaps.COLUMNS)


def test_diverged_runs_of_the_baseline_are_named():
    runs = runs_of(bf16=(5.0, DIVERGED, 5.2), mxfp4=(5.1, 5.2, 5.3))
    table = gaps.gap_table(runs, errors(mxfp4=0.3))
    text = gaps.verdict(table, runs, [])[-1]
    assert text == "1 of 3 runs of bf16 diverged; their seeds are left out of all gaps."


def test_the_time_that_remains_is_that_of_the_same_configurations():
    runs = {("bf16", 1): run(5.0), ("mxfp4", 1): run(5.1)}
    assert trainings.remaining(runs, ["bf16", "mxfp4", "new"]) == "; about 6 s remain"
    assert trainings.remaining(runs, ["bf16"] * 90) == "; about 3 min remain"
    assert trainings.remaining(runs, ["bf16"] * 90, jobs=2) == "; about 2 min remain"
    assert trainings.remaining(runs, []) == ""


def test_replaced_flags_are_taken_out_with_their_values():
    words = ["--split", "99,1,0", "--bf16", "--data-path", "x", "--lr", "1"]
    assert trainings.without(words, ("--split", "--data-path")) == ["--bf16", "--lr", "1"]


def setting(**changes):
    values = {
        "command": "python script/study.py --formats mxfp4",
        "versions": "torch 2",
        "parameters": 4000,
        "tokens": 100,
        "start_iterations": 80,
        "iterations": 20,
        "from_scratch": False,
        "held_out_tokens": 500,
        "seeds": 3,
        "baseline_loss": 5.0,
        "start_loss": 5.5,
    }
    return page.Setting(**values | changes)


def test_the_page_begins_with_the_answer_and_states_tokens_per_parameter():
    runs, offline = many(noise=0.1)
    runs["c3", 2] = run(math.nan, DIVERGED)
    table = gaps.gap_table(runs, offline)
    text = page.page(table, runs, [], setting())
    assert text.index("predicts the order") < text.index("![") < text.index("## Gaps")
    assert "trained for 80 iterations of 100 tokens (2 tokens per parameter)" in text
    assert "for 20 iterations of 100 tokens (0.5 tokens per parameter)" in text
    assert "| `c3` | 4.25 | 0.01728 | diverged | - | - | 2 |" in text
    assert "- c3, seed 2: diverged: reason" in text
    assert "| the backward pass alone | -1.00 | -1.00 to -1.00 | 21 |" not in text
    scratch = page.page(table, runs, [], setting(from_scratch=True))
    assert "trains from scratch for 20 iterations" in scratch
    assert "initial weights and order of the data" in scratch
    given = page.page(table, runs, [], setting(start_iterations=None, start_loss=math.nan))
    assert "continues from a given checkpoint" in given


@pytest.fixture
def study(monkeypatch):
    """Return script/study.py; a test of benchmarks may have imported benchmarks/study.py."""
    monkeypatch.syspath_prepend(REPO / "script")
    monkeypatch.delitem(sys.modules, "study", raising=False)
    return importlib.import_module("study")


def test_the_commands_of_the_page_are_accepted(study):
    text = (REPO / "docs" / "study.md").read_text(encoding="utf-8").replace("\\\n", " ")
    [command] = re.findall(r"^python script/study.py (.*)$", text, re.M)
    options = study.parse(shlex.split(command))
    assert (options.seeds, options.bits) == (5, [4.5])
    assert all((REPO / path).is_file() for path in options.recipes)
    explained = {"--load", "--from-scratch", "--dump", "--report-only", "--bits", "--seeds"}
    assert explained <= set(study.build_parser().all_options())
    for file in ("study.md", "study.png", "gaps.csv", "runs.csv", "curves.csv"):
        assert file in text
        assert file in study.__doc__


def test_contradictions_and_own_flags_are_refused(tmp_path, study):
    for words, message in (
        ([], "nothing to compare"),
        (["--recipes", "a.yaml", "--bits", "4"], "--bits chooses among --formats"),
        (["--formats", "mxfp4", "--from-scratch", "5", "--load", "x"], "contradict each other"),
        (["--formats", "mxfp4", "--text", "x", "--data-path", "y"], "contradict each other"),
        *(
            (["--formats", "mxfp4", *first, *second], f"{first[0]} and {second[0]} contradict")
            for first, second in (
                (("--from-scratch", "5"), ("--start-iterations", "7")),
                (("--from-scratch", "5"), ("--continue-iterations", "100")),
                (("--from-scratch", "5"), ("--continue-lr", "1e-5")),
                (("--load", str(tmp_path)), ("--start-iterations", "500")),
            )
        ),
        (
            [*("--formats", "mxfp4", "--continue-lr", "1", "--", "--min_lr", "1")],
            "--continue-lr contradicts the --min-lr given after `--`",
        ),
        (["--formats", "mxfp4", "--dump", str(tmp_path / "no")], "--dump .*no is not a folder"),
        (["--formats", "mxfp4", "--load", str(tmp_path / "no")], "--load .*no is not a folder"),
        (["--formats", "mxfp4", "--text", str(tmp_path / "no.txt")], "is not a file"),
        (["--formats", "mxfp4", "--", "--seed=3"], "--seed is given after --, but the study"),
        (["--formats", "mxfp4", "--model", "llama9"], "unknown model 'llama9'"),
    ):
        with pytest.raises(ConfigError, match=message):
            study.parse(words)
