"""Test the table and the errors of benchmarks/loss_curves.py; a slow test trains with it."""

import math
import re
import shlex
import sys

import numpy as np
import pandas as pd
import pytest

from tests import forks
from tests.subprocesses import REPO, environment, run

sys.path.insert(0, str(REPO / "benchmarks"))

sys.path.insert(0, str(REPO / "script" / "data"))

import default_corpus
import loss_curves

sys.path.remove(str(REPO / "benchmarks"))

SCRIPT = REPO / "benchmarks" / "loss_curves.py"


def curves(**by_type):
    """Return losses of two seeds that fall by 0.01 per iteration, with an offset per type."""
    falling = 6 - 0.01 * np.arange(1, 41)
    columns = {
        (name, seed): pd.Series(falling + apart * seed)
        for name, apart in by_type.items()
        for seed in (1, 2)
    }
    frame = pd.concat(columns, axis=1, names=["type", "seed"])
    return frame.set_axis(range(1, 41), axis=0)


def test_the_table_has_means_of_windows_and_differences_by_seed():
    table = loss_curves.table(curves(bf16=0.0, mxfp4=0.1)).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert rows[0] == ["mean loss, iterations", "bf16", "mxfp4"]
    # A window has 2 iterations, a twentieth of 40: 5.985 is the mean of 5.99 and 5.98. The means of
    # mxfp4 are higher by 0.15, the mean of 0.1 and 0.2.
    assert rows[2] == ["1 to 2", "5.9850", "6.1350"]
    assert rows[-3][0] == "39 to 40"
    assert rows[-2][1:] == ["+0.0000 (+0.0000 to +0.0000)", "+0.1500 (+0.1000 to +0.2000)"]
    assert rows[-1] == ["the same, in % of bf16", "+0.00 %", f"{100 * 0.15 / 5.605:+.2f} %"]


def test_what_must_not_be_is_complained_of():
    assert loss_curves.complaints(curves(bf16=0.0, mxfp4=0.1)) == []
    same = loss_curves.complaints(curves(bf16=0.0, mxfp4=0.0))
    assert len(same) == 2
    assert all("one type was not applied" in line for line in same)
    rising = loss_curves.complaints(-curves(bf16=0.0))
    assert "the loss did not fall" in rising[0]


def test_a_recipe_is_shown_by_its_name():
    assert loss_curves.shown("recipe:examples/recipes/hif8.yaml") == "recipe_hif8"


def test_a_log_counts_only_if_it_is_complete_and_of_the_same_command(tmp_path):
    log, lines = tmp_path / "a.log", " iteration        1/       2 | lm loss: 7.5E+00 |\n"
    assert loss_curves.read_log(log, "command\n", 1) is None
    log.write_text("command\n" + lines)
    assert loss_curves.read_log(log, "command\n", 1).to_dict() == {1: 7.5}
    assert loss_curves.read_log(log, "other\n", 1) is None
    assert loss_curves.read_log(log, "command\n", 2) is None


def test_a_text_that_is_not_there_is_refused():
    done = forks.run(SCRIPT, "--text", "nowhere.txt", libraries_only=True)
    assert done.returncode == 2
    assert "--text nowhere.txt is not a file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_types_and_recipes_train_on_a_text(tmp_path):
    text = tmp_path / "text.txt"
    words = np.random.default_rng(0).choice(["one", "two", "three", "four\n\n"], 30_000)
    text.write_text(" ".join(words))
    types = ("bf16", "linear_mxfp4", "recipe:examples/recipes/mxfp4_stochastic.yaml")
    command = [sys.executable, SCRIPT, "--text", text, "--seeds", "1", "--iterations", "6"]
    command += ["--types", *types, "--output-dir", tmp_path / "out", "--", "--seq-length", "64"]
    done = run(command)
    assert done.returncode == 0, done.stderr
    made = (tmp_path / "out" / "loss_curves.md").read_text()
    assert "recipe_mxfp4_stochastic" in made
    assert "--text text.txt" in made
    assert str(tmp_path / "text.txt") not in made
    assert (tmp_path / "out" / "loss_curves.png").stat().st_size > 10_000


def test_the_wikitext_page_says_how_short_its_runs_are():
    """The numbers of tokens and parameters follow from the command that the page quotes."""
    page = (REPO / "docs/results/loss_curves_wikitext.md").read_text()
    env = environment(DRY_RUN="1", LAB_PYTHON=sys.executable)
    script = REPO / "examples/llama/train_llama32_1b_h100_fp8.sh"
    done = run(["bash", script, "none", "tb", "", "", "bf16", "--preset", "tiny"], env=env)
    words = shlex.split(done.stdout)

    def flag(name):
        return int(words[words.index(f"--{name}") + 1])

    assert "--untie-embeddings-and-output-weights" not in words
    hidden, groups = flag("hidden-size"), flag("num-query-groups")
    heads, channels = flag("num-attention-heads"), flag("kv-channels")
    attention = 2 * hidden * heads * channels + 2 * hidden * groups * channels
    layer = attention + 3 * hidden * flag("ffn-hidden-size") + 2 * hidden
    parameters = flag("num-layers") * layer + hidden * default_corpus.VOCABULARY + hidden
    iterations = int(re.search(r"--iterations (\d+)", page)[1])
    tokens = iterations * flag("global-batch-size") * flag("seq-length")
    text = " ".join(page.split())
    assert f"are {tokens:,} tokens. The model has {parameters:,} parameters" in text
    assert f"that is {tokens / parameters:.3f} tokens per parameter" in text
    needed = math.ceil(25 * parameters * iterations / tokens)
    assert f"would be {needed:,} iterations here, {needed / iterations:.0f} times as many" in text
    assert f"{tokens / parameters:.2f} tokens per parameter" in (REPO / "README.md").read_text()
