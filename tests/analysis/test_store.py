"""Finding and reading the tensors of a dump, good ones among bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.analysis.store import UnreadableTensorError, open_dump, read_run_card, read_tensor
from tests.analysis.fake_dump import LAYER, write_dump


def fields(dump):
    skip = {"file", "bytes"}  # an index line has two fields more than the file
    return [{k: v for k, v in entry.metadata.items() if k not in skip} for entry in dump]


def test_a_dump_is_read_the_same_with_and_without_its_index(tmp_path):
    write_dump(tmp_path, layers=2)
    indexed = open_dump(tmp_path)
    assert {entry.source for entry in indexed} == {"index"}
    for index in tmp_path.glob("*.jsonl"):
        index.unlink()
    opened = open_dump(tmp_path)
    assert {entry.source for entry in opened} == {"file"}
    assert fields(indexed) == fields(opened)
    assert len(opened) == 2 * len(LAYER)
    assert [entry.metadata["counter"] for entry in opened] == list(range(1, len(opened) + 1))


def test_a_file_without_metadata_is_described_by_its_name(tmp_path):
    name = "20250908_095220_0007_linear_L1_backward_pre_linear_mxfp8_rank03_grad_output.pt"
    torch.save({"tensor": torch.ones(2, 3)}, tmp_path / name)
    torch.save(torch.ones(4), tmp_path / name.replace("rank03_", ""))
    named = open_dump(tmp_path)
    assert [entry.source for entry in named] == ["name", "name"]
    ranks = {entry.metadata["rank"]["world"]: entry.metadata for entry in named}
    assert ranks[3]["tensor_name"] == "grad_output"
    assert (ranks[3]["shape"], ranks[3]["dtype"], ranks[3]["layer_idx"]) == ([2, 3], "float32", 1)
    assert ranks[3]["iteration"] is None
    assert ranks[0]["quant_type"] == "mxfp8"
    assert named.problems == ()


def test_subfolders_are_searched_and_unfinished_files_skipped(tmp_path):
    write_dump(tmp_path / "mxfp8", layers=1)
    write_dump(tmp_path / "deep" / "er" / "bf16", quant_type="bf16", layers=1)
    (tmp_path / "mxfp8" / "half.pt.20250908.partial").write_bytes(b"PK")
    dump = open_dump(tmp_path)
    assert len(dump) == 2 * len(LAYER)
    assert dump.problems == ()


def test_the_tensor_is_memory_mapped_and_correct(tmp_path):
    path = write_dump(tmp_path, layers=1)[0]
    [entry] = [entry for entry in open_dump(tmp_path) if entry.path == path]
    loaded = entry.load()
    expected = torch.load(path, weights_only=True)["tensor"]
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded, expected)
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        assert path.name in mapped.read_text()


BAD = {
    "empty": b"",
    "text": b"this is no tensor\n",
    "zip": b"PK\x03\x04 but no archive",
}


@pytest.mark.parametrize("kind", [*BAD, "cut", "damaged"])
@pytest.mark.parametrize("index", [True, False])
def test_a_corrupt_file_is_one_problem_and_the_others_are_read(tmp_path, kind, index):
    paths = write_dump(tmp_path, layers=1, index=index)
    good = paths[3].read_bytes()
    if kind == "cut":
        paths[3].write_bytes(good[: len(good) // 2])
    elif kind == "damaged":  # the pickle inside the archive
        at = good.index(b"data.pkl") + 8
        paths[3].write_bytes(good[:at] + b"\xff" * 60 + good[at + 60 :])
    else:
        paths[3].write_bytes(BAD[kind])
    dump = open_dump(tmp_path)
    problems = list(dump.problems)
    for entry in dump:
        try:
            entry.load()
        except UnreadableTensorError as error:
            problems.append(f"{entry.path}: {error}")
    assert len(problems) == 1
    assert str(problems[0]).startswith(str(paths[3]))
    assert "\n" not in str(problems[0])


class Evil:
    """What a pickle would run."""

    def __reduce__(self):
        return Path.touch, (Path("evil"),)


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"tensor": torch.ones(1), "metadata": Evil()}, tmp_path / "a.pt")
    with pytest.raises(UnreadableTensorError, match="could run code"):
        read_tensor(tmp_path / "a.pt")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "payload",
    [
        {"tensor": [1, 2]},
        {"weights": torch.ones(1)},
        [torch.ones(1)],
        {"tensor": torch.ones(2).to_sparse()},
    ],
)
def test_a_file_without_a_plain_tensor_is_explained(tmp_path, payload):
    torch.save(payload, tmp_path / "a.pt")
    with pytest.raises(UnreadableTensorError, match="holds no"):
        read_tensor(tmp_path / "a.pt")


def test_a_strange_name_without_metadata_is_a_problem(tmp_path):
    write_dump(tmp_path, layers=1)
    torch.save({"tensor": torch.ones(1)}, tmp_path / "checkpoint.pt")
    dump = open_dump(tmp_path)
    assert len(dump) == len(LAYER)
    assert [problem.path.name for problem in dump.problems] == ["checkpoint.pt"]
    assert "{timestamp}_{counter}" in dump.problems[0].why


def test_a_tensor_that_is_not_what_the_index_says_is_a_problem(tmp_path):
    paths = write_dump(tmp_path, layers=1)
    paths[0].write_bytes(paths[1].read_bytes())
    [entry] = [entry for entry in open_dump(tmp_path) if entry.path == paths[0]]
    with pytest.raises(UnreadableTensorError, match=r"shape \[96, 64\].*says \[64, 2, 64\]"):
        entry.load()


def test_files_that_the_index_names_in_vain_are_counted(tmp_path):
    paths = write_dump(tmp_path, layers=1)
    paths[2].unlink()
    dump = open_dump(tmp_path)
    assert list(dump.missing.values()) == [1]
    assert len(dump) == len(LAYER) - 1


def test_a_spoilt_index_is_a_problem_and_its_files_are_opened(tmp_path):
    write_dump(tmp_path, layers=1)
    [index] = tmp_path.glob("*.jsonl")
    lines = index.read_text().splitlines()
    index.write_text("\n".join(["not json", *lines]) + "\n")
    dump = open_dump(tmp_path)
    assert len(dump) == len(LAYER)
    assert {entry.source for entry in dump} == {"file"}
    assert [problem.path for problem in dump.problems] == [index]


def test_an_index_cut_short_by_a_crash_still_counts(tmp_path):
    write_dump(tmp_path, layers=1)
    [index] = tmp_path.glob("*.jsonl")
    index.write_text(index.read_text()[:-40])
    dump = open_dump(tmp_path)
    assert dump.problems == ()
    assert sorted(entry.source for entry in dump) == ["file"] + ["index"] * (len(LAYER) - 1)


def test_runs_are_told_apart_and_the_latest_can_be_chosen(tmp_path):
    write_dump(tmp_path, layers=1, run_id="20250908_095200_bbb")
    write_dump(tmp_path / "again", layers=2, run_id="20250908_095201_aaa")
    dump = open_dump(tmp_path)
    assert dump.runs() == {"20250908_095200_bbb": len(LAYER), "20250908_095201_aaa": 2 * len(LAYER)}
    assert len(dump.only("latest")) == 2 * len(LAYER)
    assert len(dump.only("20250908_095200_bbb")) == len(LAYER)
    with pytest.raises(ValueError, match=r"no run 'x'.*20250908_095200_bbb"):
        dump.only("x")
    assert read_run_card(tmp_path, "20250908_095201_aaa")["seed"] == 1234
    assert read_run_card(tmp_path, "nothing") == {}


def test_missing_and_empty_folders_are_explained(tmp_path):
    with pytest.raises(ValueError, match="no folder"):
        open_dump(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no \.pt file in"):
        open_dump(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is not a folder"):
        open_dump(tmp_path / "file")


def test_unknown_fields_of_a_later_schema_do_not_stop_a_reader(tmp_path):
    write_dump(tmp_path, layers=1)
    [index] = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) | {"new_field": 1} for line in index.read_text().splitlines()]
    index.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(open_dump(tmp_path)) == len(LAYER)
