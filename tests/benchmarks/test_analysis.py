"""Test that the benchmark of the statistics runs on an existing dump and prints its results."""

from tests import forks
from tests.analysis.fake_dump import write_dump
from tests.subprocesses import REPO, environment, run

SCRIPT = REPO / "benchmarks" / "analysis.py"


def test_it_measures_a_dump_and_tiny_tensors(tmp_path):
    write_dump(tmp_path / "dump", layers=1)
    options = ["--quick", "--dump", tmp_path / "dump", "--formats", "mxfp8", "hifp8"]
    options += ["--records", "5", "20", "--scratch", tmp_path]
    done = run([forks.interpreter("libraries"), SCRIPT, *options], env=environment())
    assert done.returncode == 0, done.stderr
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line[:2] == "| "]
    assert [row[:3] for row in rows[2:4]] == [["plain", "all", "7"], ["ours", "1", "14"]]
    assert float(rows[2][7]) == 1.0
    assert [row[0] for row in rows[-2:]] == ["5", "20"]
    assert list(tmp_path.iterdir()) == [tmp_path / "dump"]


def test_a_folder_without_tensors_ends_in_an_error(tmp_path):
    done = forks.run(SCRIPT, "--quick", "--dump", tmp_path, libraries_only=True)
    assert done.returncode == 1
    assert "no .pt file in" in done.stderr
