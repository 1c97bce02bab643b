"""Test that the benchmark of training steps runs and detects a type that is not applied."""

from tests import forks
from tests.subprocesses import REPO, environment, run

SCRIPT = REPO / "benchmarks" / "training.py"


def benchmark(*options: str):
    """Run the benchmark; its workers are forks that import megatron-core themselves."""
    python = forks.interpreter("libraries")
    return run([python, SCRIPT, "--quick", "--threads", "1", *options], env=environment())


def test_it_times_the_wheel_and_a_type_beside_bf16():
    done = benchmark("--types", "wheel", "bf16", "mxfp8")
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row[0].strip("| ") for row in rows] == ["type", "---", "wheel", "bf16", "mxfp8"]
    assert float(rows[3][2]) == 1.0
    assert all(float(row[1]) > 0 for row in rows[2:])


def test_a_type_that_changes_nothing_is_an_error():
    done = benchmark("--types", "bf16", "none")
    assert done.returncode == 1
    message = "[ERROR] the losses of none equal those of bf16, so none was not applied"
    assert message in done.stderr


def test_a_type_that_does_not_exist_ends_in_one_line():
    done = benchmark("--types", "mxfp5")
    assert done.returncode == 1
    assert "[ERROR] mxfp5 ended: " in done.stderr
    assert "unknown quantization type 'mxfp5'" in done.stderr
    assert "Traceback" not in done.stderr
