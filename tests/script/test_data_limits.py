"""Preprocessing limits the size of its inputs and refuses a damaged state of an earlier run."""

from __future__ import annotations

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import forks
from tests.script.preprocess_runs import NULL, make_inputs
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "script/data"))

import parquet


def preprocess(tmp_path, *inputs):
    words = ["--input", *inputs, "--output-prefix", tmp_path / "cut", *NULL, "--workers", "1"]
    return forks.run(REPO / "script/data/preprocess.py", *words)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"mark": 7})])
def test_a_damaged_state_is_no_state_to_go_on_from(tmp_path, content):
    (tmp_path / "cut.partial").mkdir()
    (tmp_path / "cut.partial" / "progress.json").write_text(content)
    done = preprocess(tmp_path, *make_inputs(tmp_path))
    assert done.returncode == 1
    assert "delete the folder" in done.stderr
    assert "resumes" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_document_in_parquet_has_the_limit_of_one_in_text(tmp_path, monkeypatch):
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table({"text": ["1 2", "1 " * 100]}), path)

    class Settings:
        json_keys = ("text",)

    def read():
        start = parquet.Position()
        return list(parquet.read_parquet(path, Settings, number=0, start=start, batch_bytes=1000))

    assert sum(len(batch.documents) for batch in read()) == 2
    monkeypatch.setattr(parquet, "LARGEST_CELL", 100)
    with pytest.raises(ValueError, match=r"in\.parquet, row 2: a document of more than .* MiB"):
        read()
