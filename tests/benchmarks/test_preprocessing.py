"""Test the documents and the table of benchmarks/preprocessing.py, and a whole comparison."""

import subprocess
import sys

import pytest

from tests.subprocesses import REPO, run

sys.path.insert(0, str(REPO / "benchmarks"))

import preprocessing

sys.path.remove(str(REPO / "benchmarks"))


def test_documents_end_with_an_empty_line_and_keep_the_text():
    text = "\n\n".join(f"paragraph {i} " + "x" * 500 for i in range(40))
    parts = list(preprocessing.documents(iter([text]), 1.0))
    assert "".join(parts) == text + "\n\n"
    assert all(3000 <= len(part) < 3600 for part in parts[:-1])
    fewer = list(preprocessing.documents(iter([text]), 0.01))
    assert fewer == parts[: len(fewer)]
    assert sum(map(len, fewer[:-1])) < 10_000 <= sum(map(len, fewer))


def test_the_ratio_is_taken_round_by_round():
    ours, load, theirs = preprocessing.NAMES
    turn = preprocessing.Turn
    rounds = [
        {ours: turn(a, a), load: turn(a, 2 * a), theirs: turn(b, 3 * b)}
        for a, b in ((1, 2), (2, 2), (4, 12))
    ]
    lines = preprocessing.table(rounds, 100, 3_000_000, 500_000).splitlines()
    assert lines[2] == f"| {ours} | 2.00 | 2.00 | 50 | 1.5 | 0.25 |"
    assert lines[4] == f"| {theirs} | 2.00 | 6.00 | 50 | 1.5 | 0.25 |"
    assert "on the disk: 3 (2.5 to 3.5); divided by those of `map` alone" in lines[-1]
    assert "starts from Arrow: 2 (1.5 to 2.5). The same two ratios" in lines[-1]
    assert "for documents per CPU second: 8 (6.5 to 9.5) and 6" in lines[-1]


def test_two_rounds_have_no_quartiles(capsys):
    with pytest.raises(SystemExit):
        preprocessing.parse(["--rounds", "2"])
    assert "--rounds is 2, but quartiles need at least 3 rounds" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs(tmp_path):
    command = [sys.executable, REPO / "benchmarks/preprocessing.py", "--megabytes", "0.5"]
    done: subprocess.CompletedProcess[str] = run(
        [*command, "--rounds", "3", "--output-dir", tmp_path]
    )
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "preprocessing.md").read_text()
    assert "The token ids of all documents are the same." in written
    assert written in done.stdout
