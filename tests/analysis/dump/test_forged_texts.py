"""Test that texts and caches of a dump cannot forge output or change foreign files."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import sqlite3
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.layout_engine import ConstrainedLayoutEngine

from megatron.analysis.__main__ import main
from megatron.analysis.outputs import render
from megatron.analysis.stats.cache import NAME
from megatron.analysis.text_table import csv_cell, printable_lines, shown
from tests.analysis.fake_dump import write_dump

EVIL = "x\n0 error(s), 0 note(s)\n\x1b[2J\u202e<script>alert(1)</script>$x^{\u2028"
ASKED = {
    "verify": (),
    "stats": ("--formats", "mxfp8", "--workers", "1"),
    "quick": ("--workers", "1"),
    "report": ("--workers", "1", "--formats", "mxfp8"),
}


@pytest.fixture
def forged(tmp_path, small_pictures):
    """Create a dump with `EVIL` in every free text of its records, and in one file name."""
    dump = tmp_path / "dump"
    paths = write_dump(dump, layers=1, index=False)
    [card] = dump.glob("run_*.json")
    card.write_text(
        json.dumps(json.loads(card.read_text()) | {"status": EVIL, "error": EVIL, "device": EVIL})
    )
    lines = []
    for number, path in enumerate(paths):
        line = torch.load(path, weights_only=True)["metadata"]
        line |= {"file": path.name, "bytes": path.stat().st_size, "module": f"{EVIL}{number}"}
        lines.append(json.dumps(line | {"quant_type": EVIL, "format": EVIL}))
    lines.append(json.dumps({"event": "failed", "why": EVIL, "run_id": line["run_id"]}))
    (dump / "index_20250908_095200_abc123_rank00.jsonl").write_text("\n".join(lines) + "\n")
    (dump / (EVIL.replace("/", "") + ".pt")).write_bytes(b"garbage")
    return dump


@pytest.mark.parametrize("reader", ASKED)
def test_no_text_of_a_dump_forges_a_line_or_drives_the_terminal(forged, tmp_path, capsys, reader):
    options = [] if reader == "verify" else ["--output-dir", str(tmp_path / "draw")]
    options = ["--output", str(tmp_path / "a.csv")] if reader == "stats" else options
    assert main([reader, str(forged), *ASKED[reader], *options]) in (1, 3)
    told = "".join(capsys.readouterr())
    assert "Traceback" not in told
    for text in [told, *(p.read_text() for p in tmp_path.glob("draw/**/*.txt"))]:
        assert all(letter.isprintable() or letter == "\n" for letter in text)
        forged_lines = [line for line in text.splitlines() if line.startswith("0 error(s)")]
        assert forged_lines == []
    if reader == "stats":
        rows = list(csv.reader((tmp_path / "a.csv").open(newline="")))
        assert len({len(row) for row in rows}) == 1
    if reader == "report":
        page = (tmp_path / "draw" / "report.html").read_text()
        assert "<script>alert(1)" not in page
        assert "\u202e" not in page


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Draw a dump with odd names; return the folder, the output, and the pictures by file format.

    The figures are not laid out, which would take a third of the time and not change the texts of
    the dump.
    """
    name = "a\n\x1b[2J$x^{<b>"
    folder = tmp_path_factory.mktemp("pictures")
    dump, drawn = folder / "dump", folder / "draw"
    lines = []
    for path in write_dump(dump, layers=1, index=False):
        line = torch.load(path, weights_only=True)["metadata"]
        line |= {"file": path.name, "bytes": path.stat().st_size}
        line |= {"module": f"decoder.layers.0.{name}", "quant_type": name}
        lines.append(json.dumps(line))
    (dump / "index_20250908_095200_abc123_rank00.jsonl").write_text("\n".join(lines) + "\n")
    options = ["--workers", "1", "--formats", "mxfp8", "nvfp4", "--image", "svg"]
    rendered, output, picture = {"pdf": []}, io.StringIO(), render.picture

    def in_both_formats(figure, image):
        content = picture(figure, image)
        rendered["pdf"].append(picture(figure, "pdf"))
        return content

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "picture", in_both_formats)
        patch.setattr(ConstrainedLayoutEngine, "execute", lambda self, figure: None)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            assert main(["draw", str(dump), *options, "--output-dir", str(drawn)]) == 0
    rendered["svg"] = [path.read_bytes() for path in drawn.glob("**/*.svg")]
    return drawn, output.getvalue(), rendered


@pytest.mark.parametrize("image", ["svg", "pdf"])
def test_figures_show_the_texts_of_a_dump_as_they_are(pictures, image):
    drawn, told, rendered = pictures
    assert all(letter.isprintable() or letter == "\n" for letter in told)
    assert len(rendered[image]) > 15
    for content in rendered[image]:
        if image == "svg":
            assert ElementTree.fromstring(content).tag.endswith("svg")
        else:
            assert content.startswith(b"%PDF")
    for path in drawn.glob("**/*.txt"):
        assert all(letter.isprintable() or letter == "\n" for letter in path.read_text())


def test_texts_in_csv_are_no_formulas():
    assert [csv_cell(text) for text in ("=1+1", "@a", "a=1")] == ["'=1+1", "'@a", "a=1"]
    assert shown("a\nb") == "a\\nb"
    assert printable_lines("a\x1b\nb") == "a\\x1b\nb"


def foreign(path):
    base = sqlite3.connect(path)
    base.execute("CREATE TABLE results (name TEXT)")
    base.execute("INSERT INTO results VALUES ('precious')")
    base.commit()
    base.close()


def place(kind, dump, tmp_path):
    """Replace the cache by something hostile; return the file that must not change, if any."""
    cache, other = dump / ".statistics", tmp_path / "foreign.sqlite"
    foreign(other)
    if kind == "link to a folder":
        (tmp_path / "elsewhere").mkdir()
        cache.symlink_to(tmp_path / "elsewhere")
        return other
    if kind == "file":
        cache.write_text("a file")
        return other
    cache.mkdir()
    if kind == "link to a database":
        (cache / NAME).symlink_to(other)
    elif kind == "foreign database":
        foreign(cache / NAME)
        return cache / NAME
    elif kind == "pipe":
        os.mkfifo(cache / NAME)
    elif kind == "link of the log":
        (cache / f"{NAME}-wal").symlink_to(other)
    elif kind == "journal":
        (cache / f"{NAME}-journal").write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(600))
    return other


@pytest.mark.parametrize("reader", ["stats", "report"])
@pytest.mark.parametrize(
    "kind",
    [
        "link to a folder",
        "file",
        "link to a database",
        "foreign database",
        "pipe",
        "link of the log",
        "journal",
    ],
)
def test_what_is_not_our_cache_is_named_and_left_as_it_is(tmp_path, capsys, reader, kind):
    dump = tmp_path / "dump"
    paths = write_dump(dump, layers=1)
    kept = place(kind, dump, tmp_path)
    before = kept.read_bytes()
    options = [] if reader == "stats" else ["--output-dir", str(tmp_path / "draw")]
    assert main([reader, str(dump), *ASKED[reader], *options]) == 0
    told = "".join(capsys.readouterr())
    assert "Traceback" not in told
    named = [line for line in told.splitlines() if f"{dump / '.statistics'}" in line]
    assert len(named) == 1
    journal = "prevents the use of the cache"
    assert (journal if kind == "journal" else "cannot be used as a cache") in named[0]
    assert f"{len(paths)} tensors" in told
    assert kept.read_bytes() == before
    assert not (tmp_path / "elsewhere" / NAME).exists()
