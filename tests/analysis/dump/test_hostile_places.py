"""Test hostile folders around a dump: deep ones, unlistable ones, and a foreign output folder."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from megatron.analysis.__main__ import main
from megatron.analysis.dump.tensor_files import UnreadableTensorError, read_tensor
from megatron.analysis.outputs import provenance
from megatron.analysis.outputs.render import Made
from megatron.analysis.store import TensorStore
from tests.analysis.fake_dump import LAYER, write_dump
from tests.deep_folders import deep_folders


@pytest.fixture
def bounded():
    """End a test that waits forever for a FIFO or reads a device without end."""

    def end(*_):
        raise TimeoutError("the test has hung")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_dump_beside_deep_folders_is_read(tmp_path):
    write_dump(tmp_path, layers=1)
    with deep_folders(tmp_path, 1100):
        store = TensorStore(tmp_path)
        provenance.fingerprint(tmp_path, [])
    assert len(store) == len(LAYER)
    assert not store.problems


def test_a_folder_that_cannot_be_listed_is_not_called_empty(tmp_path, monkeypatch, capsys):
    write_dump(tmp_path, layers=1)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    assert main(["verify", str(tmp_path)]) == 2
    assert f"no .pt file can be read in {tmp_path} or below; {tmp_path}: Permission denied" in (
        capsys.readouterr().err
    )


def test_a_link_to_a_dump_elsewhere_is_named_and_not_followed(tmp_path, capsys):
    for name in ("own", "other"):
        (tmp_path / name).mkdir()
        write_dump(tmp_path / name)
    folder, only_links = tmp_path / "own", tmp_path / "links"
    only_links.mkdir()
    for place in (folder, only_links):
        (place / "linked").symlink_to(tmp_path / "other")
        (place / "itself").symlink_to(place)
        (place / "nothing").symlink_to(tmp_path)
    [problem] = TensorStore(folder).problems
    why = "a link to a folder, which is not followed; give the folder's own path"
    assert str(problem) == f"{folder / 'linked'}: {why}"
    assert main(["stats", str(only_links)]) == 2
    assert why in capsys.readouterr().err


def test_a_path_that_is_no_utf8_is_not_called_corrupt(tmp_path):
    [path, *_] = write_dump(tmp_path, layers=1)
    strange = path.rename(path.with_name("a\udcff.pt"))
    with pytest.raises(UnreadableTensorError, match=r"path is not valid UTF-8.*rename it"):
        read_tensor(strange)


ENTRY = {"dump": "DUMP", "follows": "x", "missing": {}, "files": {}}
NOTES = {
    "deep nesting": '{"report": ' + "[" * 100_000,
    "huge number": '{"report": ' + "1" * 5000 + "}",
    "too few fields": json.dumps({"report": {"dump": "DUMP", "follows": "x"}}),
    "null byte": json.dumps({"report": ENTRY | {"files": {"a\0b": [1, 2]}}}),
    "stamp is a number": json.dumps({"report": ENTRY | {"files": {"report.html": 5}}}),
    "files are a list": json.dumps({"report": ENTRY | {"files": ["report.html"]}}),
    "missing is a number": json.dumps({"report": ENTRY | {"missing": 5}}),
    "lone surrogate": r'{"report": {"dump": "\ud800"}}',
}


def check_notes(output: Path, dump: Path) -> None:
    """Read the notes as the drawing code does, and assert that hostile notes are ignored."""
    assert provenance.unchanged(output, ["report"], "x") == {}
    assert provenance.set_aside(output, ["report"], dump) == []
    provenance.remember(output, dump, [Made("report", [], {})], "new")


@pytest.mark.parametrize("name", NOTES)
def test_hostile_notes_on_earlier_drawings_count_as_none(tmp_path, name):
    notes = tmp_path / provenance.NAME
    notes.write_text(NOTES[name].replace("DUMP", str(tmp_path)))
    check_notes(tmp_path, tmp_path)
    assert json.loads(notes.read_text())["report"]["follows"] == "new"


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_special_files_as_notes_count_as_none(tmp_path, kind):
    notes = tmp_path / provenance.NAME
    os.mkfifo(notes) if kind == "fifo" else notes.symlink_to("/dev/zero")
    check_notes(tmp_path, tmp_path)
    assert notes.is_file()


def test_notes_delete_nothing_through_a_link(tmp_path):
    outside, output = tmp_path / "outside", tmp_path / "draw"
    outside.mkdir()
    output.mkdir()
    (outside / "keep").write_text("keep")
    (output / "heatmaps").symlink_to(outside)
    entry = ENTRY | {"dump": str(tmp_path), "files": {"heatmaps/keep": [4, 0]}}
    (output / provenance.NAME).write_text(json.dumps({"heatmaps": entry}))
    provenance.remember(output, tmp_path, [Made("heatmaps", [], {})], "new")
    assert (outside / "keep").exists()


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_a_special_file_in_the_place_of_a_picture_is_refused_by_name(tmp_path, capsys, kind):
    write_dump(tmp_path / "dump", layers=1)
    place = tmp_path / "draw" / "tensor_stats.txt"
    place.parent.mkdir()
    {
        "fifo": os.mkfifo,
        "device": lambda path: path.symlink_to("/dev/zero"),
        "folder": Path.mkdir,
    }[kind](place)
    assert main(["quick", str(tmp_path / "dump"), "--output-dir", str(place.parent)]) == 2
    assert f"[ERROR] {place}: a " in (said := capsys.readouterr().err)
    assert "not a regular file" in said
