"""script/data/inputs.py chooses the files of a folder that are read."""

import gzip
import sys
from pathlib import Path

import pytest

from tests.script.preprocess_runs import call, make_inputs, result, stop_after
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "script/data"))

import partial_output
import preprocess
import readers
from documents import Settings
from inputs import expand

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "60000", "--append-eod")


def call_on_folder(folder: Path, *options: str) -> int:
    """Preprocess a folder and write the output to the same folder."""
    where = ["--input", str(folder), "--output-prefix", str(folder / "out"), "--workers", "1"]
    return preprocess.main([*where, *NULL, *options])


def test_the_output_may_lie_in_the_folder_of_the_input(tmp_path, monkeypatch, capsys):
    """Interrupted runs, and those that replace output, do not read what they wrote."""
    monkeypatch.setattr(readers, "BATCH_BYTES", 700)
    monkeypatch.setattr(partial_output, "COMMIT_SECONDS", 0.0)
    make_inputs(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    assert call(tmp_path, "elsewhere/whole") == 0
    whole = result(tmp_path, "elsewhere/whole")
    for batches in (60, 20):
        with monkeypatch.context() as patch:
            stop_after(patch, batches, KeyboardInterrupt())
            assert call_on_folder(tmp_path) == 130
    assert {"progress.json", "bad_lines.txt"} <= {p.name for p in tmp_path.glob("out.partial/*")}
    assert call_on_folder(tmp_path) == 0
    assert result(tmp_path, "elsewhere/whole") == whole
    assert result(tmp_path, "out") == whole
    assert call_on_folder(tmp_path, "--overwrite") == 0
    assert result(tmp_path, "out") == whole
    assert "Skipped in" not in capsys.readouterr().err


def test_output_is_known_by_any_path(tmp_path, monkeypatch):
    (tmp_path / "data/out.partial").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "data")
    # The last two only look like output, because no other files of that output exist.
    data = ("in.txt", "some_bad_lines.txt", "some_text_document.json")
    own = ("out.partial/lock", "out.partial/bad_lines.txt", "out_bad_lines.txt")
    others = (f"earlier_text_document{end}" for end in (".bin", ".idx", ".json"))
    for name in (*data, *own, "out_a_document.json", *others, "earlier_bad_lines.txt"):
        (tmp_path / "data" / name).write_text("1")
    monkeypatch.chdir(tmp_path)
    settings = Settings(
        input=(tmp_path / "link",), output_prefix=Path("data/../data/out"), json_keys=("a",)
    )
    assert expand(settings) == tuple(tmp_path / "link" / name for name in data)


def test_names_of_any_case_are_data_and_the_rest_is_said(tmp_path, capsys):
    for name in ("A.JSONL", "b.Txt.GZ", "WIKI_00", "c.parquet"):
        content = b'{"text": "x"}'
        (tmp_path / name).write_bytes(gzip.compress(content) if name[-2:] == "GZ" else content)
    settings = Settings(input=(tmp_path,), output_prefix=tmp_path / "out")
    names = [path.name for path in expand(settings)]
    assert names == ["A.JSONL", "WIKI_00", "b.Txt.GZ", "c.parquet"]
    assert capsys.readouterr().err == ""
    for number in range(6):
        (tmp_path / f"d{number}.jsonl.xz").touch()
    (tmp_path / ".hidden.xz").touch()
    assert len(expand(settings)) == 4
    said = capsys.readouterr().err
    assert "6 files that are not named like data (d0.jsonl.xz, d1.jsonl.xz, " in said
    assert "d4.jsonl.xz, ...). If they are data, name them" in said
    (tmp_path / "only").mkdir()
    (tmp_path / "only/x.xz").touch()
    with pytest.raises(ValueError, match=r"holds no data; give one with \.jsonl"):
        expand(Settings(input=(tmp_path / "only",), output_prefix=tmp_path / "out"))
