"""Test that the benchmark of the statistics measures operands in every second step."""

import sys

from tests.subprocesses import REPO, environment, run

SCRIPT = REPO / "benchmarks" / "statistics_cost.py"
SIZE = ("--hidden-size", "64", "--layers", "1", "--seq-length", "32")


def test_the_worker_times_pairs_of_steps_and_counts_the_operands():
    words = ["--types", "mxfp8", "--rounds", "1", "--threads", "1", "--in-this-process"]
    done = run([sys.executable, SCRIPT, *words, *SIZE], env=environment(CUSTOM_QUANT_TYPE="mxfp8"))
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    pairs = [list(map(float, words[1:])) for words in lines if words[:1] == ["pair"]]
    assert len(pairs) == 3, "the first two pairs are the warm-up"
    assert all(seconds > 0 for pair in pairs for seconds in pair)
    # Each of the four linear layers, QK and PV have six operands; the LM head has three.
    assert ["operands", str(4 * 6 + 2 * 6 + 3)] in lines
