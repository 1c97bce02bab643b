"""script/data/preprocess.py publishes no stale output and replaces no output of another run."""

import json
import sys
from pathlib import Path

import pytest

from tests.script.preprocess_runs import call, make_inputs, result
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "script/data"))

import partial_output
import preprocess


def test_a_file_added_to_a_run_that_only_has_to_publish(tmp_path, monkeypatch, capsys):
    make_inputs(tmp_path, files=2)

    commit = partial_output.PartialOutput.commit

    def then_interrupted(self):
        commit(self)
        if self.complete:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(partial_output.PartialOutput, "commit", then_interrupted)
        assert call(tmp_path, "cut") == 130
    assert json.loads((tmp_path / "cut.partial/progress.json").read_text())["complete"]
    added = tmp_path / "part9.jsonl"
    added.write_text('{"text": "1 2 3"}')
    capsys.readouterr()
    assert call(tmp_path, "cut") == 1
    error = capsys.readouterr().err
    assert f"holds an interrupted run, but it was complete without {added}; give --over" in error
    assert not list(tmp_path.glob("cut_*"))
    assert call(tmp_path, "cut", "--overwrite") == 0
    assert call(tmp_path, "whole") == 0
    assert result(tmp_path, "cut") == result(tmp_path, "whole")


def test_of_two_starts_the_later_replaces_nothing(tmp_path, monkeypatch, capsys):
    """The first run publishes after the second run's check and before the second run locks."""
    make_inputs(tmp_path)
    check, first = preprocess.check, []

    def slow_check(settings):
        check(settings)
        if not first:
            first.append(settings)
            assert call(tmp_path, "o") == 0
            (tmp_path / "o_text_document.bin").write_bytes(b"the first one's")

    monkeypatch.setattr(preprocess, "check", slow_check)
    assert call(tmp_path, "o") == 1
    assert "o_text_document.idx exists; give --overwrite" in capsys.readouterr().err
    assert (tmp_path / "o_text_document.bin").read_bytes() == b"the first one's"
    assert not (tmp_path / "o.partial").exists()


def test_output_that_appears_while_a_run_writes_is_not_replaced(tmp_path, monkeypatch, capsys):
    make_inputs(tmp_path)
    appeared = tmp_path / "o_text_document.bin"
    with monkeypatch.context() as patch:
        begin = partial_output.PartialOutput.begin_file

        def and_appear(self, number):
            appeared.write_bytes(b"another's")
            begin(self, number)

        patch.setattr(partial_output.PartialOutput, "begin_file", and_appear)
        assert call(tmp_path, "o") == 1
    error = capsys.readouterr().err
    assert f"{appeared} exists; give --overwrite" in error
    assert "Progress is kept" in error
    assert appeared.read_bytes() == b"another's"
    assert call(tmp_path, "o") == 1, "nor by the same command"
    assert call(tmp_path, "o", "--overwrite") == 0
    assert call(tmp_path, "whole") == 0
    assert result(tmp_path, "o") == result(tmp_path, "whole")


def test_a_lock_on_a_folder_that_was_published_does_not_count(tmp_path, monkeypatch, capsys):
    """The lock was opened before the other run removed the folder, and acquired afterwards."""
    import fcntl

    make_inputs(tmp_path)
    flock = fcntl.flock

    def late(file, how):
        Path(file.name).unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    assert call(tmp_path, "o") == 1
    assert "another process is writing" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".idx", ".bin", ".json"])
def test_any_of_the_files_is_in_the_way(tmp_path, suffix, capsys):
    make_inputs(tmp_path)
    (tmp_path / f"o_text_document{suffix}").touch()
    assert call(tmp_path, "o") == 1
    assert f"o_text_document{suffix} exists; give --overwrite" in capsys.readouterr().err
    assert not (tmp_path / "o.partial").exists()
