"""Gaps in the numbers of a run's records, which show that records were lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.analysis.store import TensorStore
from megatron.analysis.verification import counter_gaps
from tests.analysis.fake_dump import write_dump
from tests.analysis.verification.verifying import errors, rewrite


def test_a_number_that_another_runs_file_has_is_a_gap_all_the_same(tmp_path):
    """Runs in one folder number their records independently."""
    write_dump(tmp_path, layers=1)
    write_dump(tmp_path / "other", layers=1, run_id="20250908_095200_ffffff")
    [index] = tmp_path.glob("index_*.jsonl")
    moved = []
    for line in reversed(list(map(json.loads, index.read_text().splitlines()))):
        if (number := line["counter"]) >= 5:
            name = line["file"].replace(f"_{number:04d}_", f"_{number + 1:04d}_")
            (tmp_path / line["file"]).rename(tmp_path / name)
            line |= {"counter": number + 1, "file": name}
        moved.append(json.dumps(line) + "\n")
    index.write_text("".join(reversed(moved)))
    # keep only the fifth record of the other run
    rewrite(tmp_path / "other", lambda line: line if line["counter"] == 5 else None, "*")
    for path in (tmp_path / "other").iterdir():
        path.rename(tmp_path / path.name)
    other = TensorStore(tmp_path).select(run_id="20250908_095200_ffffff", counter=5)
    assert len(other) == 1
    [gap], _ = errors(tmp_path)
    assert gap.endswith("1 of its records' numbers are in no index and no file: 5")
    Path(other["path"].iloc[0]).unlink()
    assert errors(tmp_path)[0] == [gap]


def test_another_runs_record_of_another_time_explains_no_gap(tmp_path):
    write_dump(tmp_path, layers=1)
    write_dump(tmp_path, layers=1, run_id="20250909_095200_ffffff", quant_type="mxfp4")
    rewrite(tmp_path, lambda line: line if line["counter"] != 5 else None)
    later = {"timestamp": "20250909_095221"}
    [index] = tmp_path.glob("index_20250909*.jsonl")
    lines = [json.loads(line) | later for line in index.read_text().splitlines()]
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    numbers, missing = errors(tmp_path)[0]
    assert "numbers are in no index and no file: 5" in numbers
    assert missing.endswith(": key")


@pytest.mark.parametrize(
    ("numbers", "gaps"),
    [
        ([1, 2, 3], []),
        ([1, 4], [(2, 3)]),
        ([3], [(1, 2)]),
        ([9, 2, 10, 2**62], [(1, 1), (3, 8), (11, 2**62 - 1)]),
    ],
)
def test_gaps(tmp_path, numbers, gaps):
    """The last gap is too long to be enumerated."""
    write_dump(tmp_path, layers=1)
    records = TensorStore(tmp_path).records.iloc[: len(numbers)].copy()
    records["counter"] = numbers
    assert counter_gaps.gaps(records) == ({0: gaps} if gaps else {})
