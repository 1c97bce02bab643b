"""Test the page of benchmarks/accumulator_study.py with made-up errors and losses."""

import sys

import pandas as pd

from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import accumulator_study

sys.path.remove(str(REPO / "benchmarks"))

SUMS = ("fda:l32:f13:m13:rz", "fda:l32:f13:m13:rz:p128")


def test_the_page_has_errors_and_intervals_over_paired_seeds():
    rows = pd.DataFrame(
        {
            "operation": "linear",
            "gemm": "wgrad",
            "accumulator": SUMS,
            "terms": 4096,
            "relative_error": [2e-3, 1e-4],
            "gain": [-4e-4, -5e-5],
            "format_error": 3e-2,
        }
    )
    losses = {
        name: {seed: pd.Series([5.0 + seed + apart * seed] * 60) for seed in (1, 2)}
        for name, apart in (("fp32", 0.0), ("hopper_fp8", 0.1))
    }
    options = accumulator_study.parse(["--iterations", "60"])
    text = accumulator_study.page(rows, losses, "python benchmarks/accumulator_study.py", options)
    assert "trained in bf16 for 150 iterations of 4096 tokens" in text
    assert f"| `{SUMS[0]}` | 2.0e-03 (-4e-04) |" in text
    assert "| error of fp8_e4m3 | 3.0e-02 |" in text
    # The differences 0.1 and 0.2 have the mean 0.15 and the standard error 0.05.
    assert "| `hopper_fp8` | 6.650 | +0.150 | -0.485 to +0.785 | +0.100, +0.200 |" in text


def test_only_a_complete_log_of_the_same_command_is_used(tmp_path):
    log = tmp_path / "run.log"
    log.write_text(
        "command\n iteration 1/ 2 | lm loss: 6.5E+00 |\n iteration 2/ 2 | lm loss: 6E+00 |\n"
    )
    assert list(accumulator_study.losses_of(log, "command\n", 2)) == [6.5, 6.0]
    assert accumulator_study.losses_of(log, "command\n", 3) is None
    assert accumulator_study.losses_of(log, "other\n", 2) is None
