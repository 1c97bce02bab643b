"""Test benchmarks/explorer.py: the dump is enlarged, and the page states what was measured."""

import re
import sys

import pytest

from megatron.analysis.serve.follower import Follower
from tests.analysis.fake_dump import write_dump
from tests.analysis.report.browser import find_browser
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import explorer

sys.path.remove(str(REPO / "benchmarks"))


def test_a_dump_is_enlarged_by_layers_and_iterations(tmp_path):
    one = len(write_dump(tmp_path / "one", layers=2, iterations=1))
    count = explorer.enlarge(tmp_path / "one", tmp_path / "large", 5 * one, layers=4)
    assert 5 * one <= count < 7 * one
    follower = Follower(tmp_path / "large")
    follower.poll_all()
    catalog = follower.catalog
    assert len(catalog) == count
    assert not follower.problems
    assert set(catalog.layer.tolist()) == set(range(4))
    assert set(catalog.iteration.tolist()) == {1, 2, 3}
    assert {place for place in catalog.places if "layers" in place} == set()


def test_two_runs_cannot_be_enlarged(tmp_path):
    for name in ("a", "b"):
        write_dump(tmp_path / name, layers=1, run_id=name)
    with pytest.raises(ValueError, match="contains 2 index files; give the dump of one run"):
        explorer.enlarge(tmp_path, tmp_path / "large", 10, layers=1)


def test_the_page_states_what_was_measured(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["explorer.py", "dump", "--clicks", "2"])
    clicks = [{"name": 0.1, "facts": 0.3}, {"name": 0.2, "facts": 0.5}]
    found = explorer.Times({"address": 2.5}, clicks, 800_000_000, 900_000_000, 100_000)
    text = explorer.page(found)
    assert "`python benchmarks/explorer.py dump --clicks 2`" in text
    assert "100,000 records, 2 clicks." in text
    assert "| click: name | median 0.15 s, largest 0.20 s |" in text
    assert "| click: all in the window | median 0.40 s, largest 0.50 s |" in text
    assert "| memory | 800 MB at first, 900 MB at the end |" in text


@pytest.mark.slow
def test_a_browser_measures_the_explorer(tmp_path, monkeypatch, capsys):
    if find_browser() is None:
        pytest.skip("no Chromium on the PATH (nor in CHROMIUM)")
    write_dump(tmp_path / "dump", layers=2, iterations=2)
    arguments = ["--records", "200", "--layers", "3", "--clicks", "2"]
    monkeypatch.setattr(sys, "argv", ["explorer.py", str(tmp_path / "dump"), *arguments])
    explorer.main()
    text = capsys.readouterr().out
    for step in ("address", "layout", "numbers", "again"):
        assert re.search(rf"\| {step} \| \d+\.\d\d s \|", text)
    assert re.search(r"\| memory \| [1-9]\d+ MB at first", text)
    assert [path.name for path in tmp_path.iterdir()] == ["dump"]
