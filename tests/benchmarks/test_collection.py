"""Test that the benchmark of the collection runs and reports every kind of collection."""

from tests import forks
from tests.subprocesses import REPO, environment, run


def test_it_times_every_collection_and_the_writer():
    python = forks.interpreter("libraries")
    command = [python, REPO / "benchmarks" / "collection.py", "--quick", "--no-peers"]
    done = run([*command, "--threads", "1"], env=environment())
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    names = ["plain", "idle", "sparse, 1 in 3", "everything"]
    assert [row[0].strip("| ") for row in rows[2:]] == names
    assert all(float(row[1]) > 0 for row in rows[2:])
    assert [int(row[6]) > 0 for row in rows[2:]] == [False, False, True, True]
    assert "- The writer alone, with " in done.stdout
