"""Test script/study.py from the bf16 model to the page, with an interruption."""

from __future__ import annotations

import re
import signal
import time

import pandas as pd
import pytest

from tests import forks
from tests.subprocesses import REPO
from tests.training.corpus import make_corpus

SCRIPT = REPO / "script" / "study.py"
#: flags of a model of one layer
MODEL = (
    *("--num-layers", "1", "--hidden-size", "64", "--ffn-hidden-size", "64"),
    *("--num-attention-heads", "2", "--num-query-groups", "1", "--vocab-size", "127"),
    *("--tokenizer-type", "NullTokenizer"),
)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Return the words of a study of two configurations and a proposal."""
    folder = tmp_path_factory.mktemp("study")
    tokenizer = folder / "tokenizer.model"
    tokenizer.touch()
    sizes = ("--seq-length", "64", "--micro-batch-size", "2", "--global-batch-size", "2")
    long = ("--start-iterations", "4", "--continue-iterations", "3", "--eval-iters", "2")
    files = ("--data-path", make_corpus(folder), "--tokenizer-path", tokenizer)
    what = ("--formats", "mxfp8", "mxfp4", "--bits", "6.25", "--seeds", "2")
    return [SCRIPT, *what, *long, *sizes, *files, "--output-dir", folder / "out"]


def test_it_goes_on_after_an_interruption_and_answers(words):
    out = words[-1]
    program = forks.start(*words, "--", *MODEL)
    first = out / "runs" / "bf16_seed1.log"
    until = time.monotonic() + 120
    while not first.is_file() or "[STUDY]" not in first.read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    program.send_signal(signal.SIGINT)
    output, errors = program.communicate()
    assert program.returncode == 130, output + errors
    assert "Traceback" not in errors
    done = forks.run(*words, "--", *MODEL)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^[1-4] of 8 runs were trained earlier", done.stderr, re.M)
    assert "start" not in done.stderr, "neither the model nor the operands are made again"
    assert re.search(r"\[7/8\] \S+ seed 2: held-out loss \d\.\d{4} \(.* s\); about", done.stderr)
    assert "rank correlation over 3 configurations is " in done.stdout.splitlines()[0]
    runs = pd.read_csv(out / "runs.csv")
    names = {"bf16", "mxfp8", "mxfp4", "proposed_6.25_bits"}
    assert set(runs["configuration"]) == names
    assert set(runs["status"]) == {"complete"}
    assert runs.groupby("seed")["held_out_loss"].nunique().min() == 4, "formats differ"
    gaps = pd.read_csv(out / "gaps.csv").set_index("configuration")
    assert gaps.loc["mxfp8", "offline_error"] < gaps.loc["mxfp4", "offline_error"]
    assert gaps["low"].notna().all()
    assert len(pd.read_csv(out / "curves.csv")) == 8 * 3
    page = (out / "study.md").read_text()
    assert page.startswith("# Does the offline error predict the loss gap?")
    assert "tokens per parameter" in page
    assert (out / "study.png").stat().st_size > 10_000
