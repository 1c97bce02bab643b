"""script/data/readers.py reads the same documents from every format and from any position."""

import bz2
import gzip
import json
import random
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron import optional_packages
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "script/data"))

import parquet
import readers
from batch import Batch, Position
from documents import Settings
from readers import guess_format, read_file

random.seed(0)
WORDS = ["naïve", "漢字", "word", "= =", "12", "\u2028", "x" * 50]
DOCUMENTS = [" ".join(random.choices(WORDS, k=1 + i % 40)) for i in range(400)]


def zstd_frames(content: bytes) -> bytes:
    """Compress to two frames with an empty frame between them, as parallel compressors do."""
    half = len(content) // 2
    return b"".join(zstandard.compress(part) for part in (content[:half], b"", content[half:]))


def gzip_members(content: bytes) -> bytes:
    return gzip.compress(content[:999]) + gzip.compress(content[999:])


COMPRESS = {"": bytes, ".gz": gzip_members, ".bz2": bz2.compress, ".zst": zstd_frames}


def write(folder: Path, kind: str, compression: str = "") -> Path:
    """Write DOCUMENTS to a file of `kind`."""
    if kind == "parquet":
        path = folder / "in.parquet"
        table = pa.table({"id": range(len(DOCUMENTS)), "text": DOCUMENTS})
        pq.write_table(table, path, row_group_size=150, data_page_size=1000)
        return path
    if kind == "jsonl":
        content = "\n\n".join(json.dumps({"text": text}) for text in DOCUMENTS)
    elif kind == "wikitext":
        content = "".join(f" \n = Title {i} = \n \n = = Part = = \n {d}\n" for i, d in ENUMERATED)
    else:
        content = "\r\n \r\n".join(DOCUMENTS)
    path = folder / f"in.{kind}{compression}"
    path.write_bytes(COMPRESS[compression](content.encode()))
    return path


ENUMERATED = list(enumerate(DOCUMENTS))


def settings(path: Path, **options: object) -> Settings:
    return Settings(input=(path,), output_prefix=path.with_name("out"), **options)


def content(batch: Batch) -> list[str]:
    """Return the texts of a batch."""
    if batch.format == "jsonl":
        return [json.loads(line)["text"] for _, line in batch]
    if batch.format == "parquet":
        return [cells[0].decode() for _, cells in batch]
    return [document.decode() for _, document in batch]


KINDS = [("jsonl", end) for end in COMPRESS] + [("txt", ".gz"), ("txt", ""), ("parquet", "")]
KINDS += [("wikitext", ""), ("wikitext", ".zst")]


@pytest.mark.parametrize(("kind", "compression"), KINDS)
def test_reading_goes_on_behind_every_batch(tmp_path, monkeypatch, kind, compression):
    monkeypatch.setattr(readers, "BATCH_BYTES", 3000)
    monkeypatch.setattr(parquet, "ROWS", 7)
    path = write(tmp_path, kind, compression)
    options = settings(path, input_format="wikitext" if kind == "wikitext" else None)
    batches = list(read_file(path, options))
    assert len(batches) > 5
    wanted = DOCUMENTS
    if kind == "wikitext":
        wanted = [f" = Title {i} = \n \n = = Part = = \n {d}" for i, d in ENUMERATED]
    assert [text for batch in batches for text in content(batch)] == wanted
    assert [batch.last for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert sum(batch.bytes_read for batch in batches) == path.stat().st_size
    for number, batch in enumerate(batches):
        rest = list(read_file(path, options, start=batch.end))
        found = [text for later in rest for text in content(later)]
        assert found == [text for later in batches[number + 1 :] for text in content(later)]
        lines = [line for later in rest for line, _ in later]
        assert lines == [line for later in batches[number + 1 :] for line, _ in later]


def test_lines_are_those_of_the_file(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\n{"a": 1}\r\n\n  \n{"b": "\xe2\x80\xa8"}')
    (batch,) = read_file(path, settings(path))
    assert list(batch) == [(2, b'{"a": 1}'), (5, b'{"b": "\xe2\x80\xa8"}')]


def test_another_separator(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\r\n\r\nstill one\r\n---\r\ntwo")
    (batch,) = read_file(path, settings(path, document_separator="---"))
    assert list(batch) == [(1, b"one\r\n\r\nstill one"), (5, b"two")]
    assert batch.bytes_read == path.stat().st_size


def test_what_is_no_title_of_an_article(tmp_path):
    lines = [
        " = Title = ",
        "",
        " = = Part = = ",
        "",
        "x",
        " = not behind an empty line = ",
        "",
        "=",
    ]
    path = tmp_path / "in.txt"
    path.write_text("\n".join([*lines, "", "= Second =", "", "text"]))
    (batch,) = read_file(path, settings(path, wikipedia=True))
    assert [(line, text.splitlines()[0]) for line, text in batch] == [
        (1, b" = Title = "),
        (10, b"= Second ="),
    ]


@pytest.mark.parametrize(
    ("name", "start", "kind"),
    [
        ("a.jsonl", b"", "jsonl"),
        ("a.JSON.gz", b"", "jsonl"),
        ("a.ndjson.zst", b"", "jsonl"),
        ("train-00000-of-00041.parquet", b"", "parquet"),
        ("wiki_00", b'{"id": "12", "text": "x"}', "jsonl"),
        ("wiki_00.bz2", bz2.compress(b'\n{"text": "x"}'), "jsonl"),
        ("a.txt", b'{"text": "x"}', "text"),
        ("a.md", b" = Title = \n", "text"),
        ("wiki.train.tokens", b" \n = Title = \n \n", "wikitext"),
        ("wiki.train.tokens", b"text\n = Title = \n", "text"),
    ],
)
def test_the_format_by_name_or_start(tmp_path, name, start, kind):
    (tmp_path / name).write_bytes(start)
    assert guess_format(tmp_path / name, wikipedia=True) == kind


@pytest.mark.parametrize("compression", [".gz", ".bz2", ".zst"])
def test_a_truncated_file_is_damaged_wherever_it_was_cut(tmp_path, compression):
    path = write(tmp_path, "jsonl", compression)
    whole = path.read_bytes()
    for size in (len(whole) // 3, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"in\.jsonl.* is damaged or was cut short"):
            list(read_file(path, settings(path)))


def test_flipped_bits_are_damage(tmp_path):
    for kind, compression in (("jsonl", ".gz"), ("jsonl", ".zst"), ("parquet", "")):
        path = write(tmp_path, kind, compression)
        damaged = bytearray(path.read_bytes())
        damaged[len(damaged) // 3] ^= 0xFF
        damaged[-6] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"in.{kind}.*get it again, or leave it out"):
            list(read_file(path, settings(path)))


def test_a_file_that_disappears(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.jsonl has disappeared; put it back"):
        list(read_file(tmp_path / "gone.jsonl", settings(tmp_path / "gone.jsonl")))


def test_a_file_without_line_ends_is_not_taken_for_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BATCH_BYTES", 100)
    monkeypatch.setattr(readers, "LARGEST_DOCUMENT", 1000)
    for name in ("in.jsonl", "in.txt"):
        (tmp_path / name).write_text("x" * 5000)
        with pytest.raises(ValueError, match=rf"{name}:1: a document of more than .* MiB; give"):
            list(read_file(tmp_path / name, settings(tmp_path / name)))


def test_the_columns_of_parquet(tmp_path):
    path = tmp_path / "in.parquet"
    columns = {"id": [1, 2], "text": ["a", None], "title": ["A", "B"]}
    pq.write_table(pa.table(columns), path)
    (batch,) = read_file(path, settings(path, json_keys=("title", "text")))
    assert list(batch) == [(1, (b"A", b"a")), (2, (b"B", None))]
    with pytest.raises(ValueError, match=r"no column 'body' \(the columns are id, text, title\)"):
        list(read_file(path, settings(path, json_keys=("body",))))
    with pytest.raises(ValueError, match="the column 'id' holds int64, not text"):
        list(read_file(path, settings(path, json_keys=("id",))))
    (batch,) = read_file(path, settings(path), start=Position(1))
    assert batch.documents == [(2, (None,))]


@pytest.mark.parametrize(
    ("kind", "compression", "package"), [("jsonl", ".zst", "zstandard"), ("parquet", "", "pyarrow")]
)
def test_a_missing_package_is_named(tmp_path, monkeypatch, kind, compression, package):
    path = write(tmp_path, kind, compression)
    monkeypatch.setattr(optional_packages, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=f"^{re.escape(str(path))}, .* needs the {package} package"
    ):
        list(read_file(path, settings(path)))
