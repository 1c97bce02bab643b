"""Test benchmarks/accumulators.py: implementations agree, and the page states their times."""

import sys

import pytest
import torch

from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import accumulators

sys.path.remove(str(REPO / "benchmarks"))


@pytest.fixture(autouse=True)
def _same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_quick_run_compares_every_way(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(accumulators, "PRODUCTS", dict.fromkeys(accumulators.PRODUCTS, 1 << 10))
    page = tmp_path / "speed.md"
    names = ("hopper_fp8_promote128", "blackwell_nvfp4")
    assert (
        accumulators.main(
            ["--quick", "--threads", "1", "--output", str(page), "--accumulators", *names]
        )
        == 0
    )
    text = page.read_text()
    assert text in capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == list(names)
    assert [row[-1] for row in rows[2:]] == ["0", "0"]
    assert [row[4] == "-" for row in rows[2:]] == [False, True]  # the column numpy
    assert all(float(row[3].replace(",", "")) > 0 for row in rows[2:])


@pytest.mark.parametrize(
    ("name", "said"),
    [("hopper_fp9", "unknown accumulator 'hopper_fp9'"), ("fp32", "simulates nothing")],
)
def test_other_accumulators_are_refused(name, said, capsys):
    with pytest.raises(SystemExit):
        accumulators.main(["--accumulators", name])
    assert said in capsys.readouterr().err
