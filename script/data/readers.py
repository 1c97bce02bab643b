"""Files on disk -> batches of raw documents, from any place in them on.

A file is JSONL, Parquet, plain text whose documents are parted by a line, or wikitext whose
articles begin with a ` = Title = `; all but Parquet may be compressed (gzip, bzip2, zstandard),
which their first bytes tell and not their names. Everything is streamed: what is in memory is a
batch of about BATCH_BYTES, or one document where that is larger.
"""

from __future__ import annotations

import bz2
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

BATCH_BYTES = 1 << 18  # small enough that workers end at about the same time
#: A document beyond this is no document: most likely the file has another format.
LARGEST_DOCUMENT = 256 << 20
PARQUET_ROWS = 32  # decoded at a time
FORMATS = ("text", "wikitext", "jsonl", "parquet")

COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstandard"}
HEADING = re.compile(rb" ?= (?!=)[^\r\n]*(?<!=) = ?\r?\n?")  # of an article; its parts have ` = = `


@dataclass(frozen=True, slots=True)
class Position:
    """Where a file is read from: behind how many lines (rows, of Parquet) and bytes of text."""

    line: int = 0
    offset: int = 0


@dataclass
class Batch:
    """Some documents, one after another, and where the file goes on.

    Of JSONL `block` holds whole lines, so that a worker cuts them and not the reader that all
    workers wait for. Of other formats `documents` holds (first line or row from 1, content); of
    Parquet the content is a cell for each key, None where there is no text.
    """

    file: int
    path: Path
    format: str
    start: Position
    end: Position = Position()
    block: bytes = b""
    documents: list[tuple[int, Any]] = field(default_factory=list)
    bytes_read: int = 0  # of the file as it is on disk
    last: bool = False  # of its file

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        if self.format != "jsonl":
            yield from self.documents
            return
        for number, line in enumerate(self.block.split(b"\n"), start=self.start.line + 1):
            if line := line.strip():
                yield number, line


class _Zstandard(io.RawIOBase):
    """A zstandard stream that notices where it was cut off, which the library's own reader does
    not.
    """

    def __init__(self, raw: BinaryIO) -> None:
        import zstandard

        self._frames = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._raw, self._frame = raw, self._frames.decompressobj()
        self._rest, self._fed, self._error = b"", False, zstandard.ZstdError

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if self._frame.eof:
                data = self._frame.unused_data or self._raw.read(1 << 16)
                self._frame, self._fed = self._frames.decompressobj(), False
            else:
                data = self._raw.read(1 << 16)
            if not data:
                if self._fed:
                    raise EOFError("the compressed file ends before its end mark")
                return 0
            self._fed = True
            try:
                self._rest = self._frame.decompress(data)
            except self._error as error:
                raise EOFError(str(error)) from error
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def decompressed(raw: BinaryIO) -> BinaryIO:
    """The content of a file; itself if it is not compressed."""
    start = raw.read(4)
    raw.seek(0)
    kind = next((kind for magic, kind in COMPRESSIONS.items() if start.startswith(magic)), None)
    if kind == "gzip":
        return gzip.open(raw)
    if kind == "bzip2":
        return bz2.open(raw)
    if kind == "zstandard":
        return io.BufferedReader(_Zstandard(raw), 1 << 16)
    return raw


def guess_format(path: Path, *, wikipedia: bool = False) -> str:
    """By the file's name, or by its start where that says nothing, as of `wiki_00`.

    Text of Wikipedia that begins with the title of an article has one above each.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in (".gz", ".zst", ".bz2"):
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in (".jsonl", ".json", ".ndjson"):
        return "jsonl"
    if last == ".parquet":
        return "parquet"
    if last in ("", ".txt", ".text", ".tokens"):
        with path.open("rb") as raw, decompressed(raw) as stream:
            start = stream.read(4096).lstrip(b"\xef\xbb\xbf \r\n")
        if not last and start.startswith(b"{"):
            return "jsonl"
        if start.startswith(b"<doc "):
            raise ValueError(f"{path} has <doc> elements; run wikiextractor with --json")
        if wikipedia and HEADING.match(b" " + start):
            return "wikitext"
    return "text"


def read_file(
    path: Path, settings: Any, *, number: int = 0, start: Position = Position()
) -> Iterator[Batch]:
    """The batches of one file from `start` on; the last one is marked, and may be empty.

    Raises:
        ValueError: the file is damaged, has gone, or is not what its format says.
    """
    try:
        kind = settings.format_of(path)
        if kind == "parquet":
            yield from _parquet(path, settings, number, start)
            return
        with path.open("rb") as raw, decompressed(raw) as stream:
            _skip(raw, stream, start.offset)
            make = _jsonl if kind == "jsonl" else _text
            position, last = raw.tell() if start.offset else 0, None
            for batch in make(stream, settings, Batch(number, path, kind, start)):
                batch.bytes_read, position = raw.tell() - position, raw.tell()
                if last is not None:
                    yield last
                last = batch
            last = last or Batch(number, path, kind, start, start)
            last.last = True
            last.bytes_read += path.stat().st_size - position
            yield last
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path} is damaged or was cut short ({error}); get it again, or leave it out"
        ) from error
    except FileNotFoundError as error:
        raise ValueError(f"{path} has disappeared; put it back") from error
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read ({error}); get it again, or leave it out"
        ) from error


def _skip(raw: BinaryIO, stream: BinaryIO, offset: int) -> None:
    if stream is raw:
        raw.seek(offset)
        return
    while offset > 0 and (data := stream.read(min(offset, 1 << 20))):
        offset -= len(data)


def _too_long(path: Path, line: int) -> ValueError:
    return ValueError(
        f"{path}:{line}: a document of more than {LARGEST_DOCUMENT >> 20} MiB; give the file's "
        f"format in --input-format ({', '.join(FORMATS)}), or one JSON object a line"
    )


def _jsonl(stream: BinaryIO, settings: Any, batch: Batch) -> Iterator[Batch]:
    line, offset = batch.start.line, batch.start.offset
    while block := stream.read(BATCH_BYTES):
        if not block.endswith(b"\n"):
            block += stream.readline(LARGEST_DOCUMENT)
        if len(block) >= LARGEST_DOCUMENT:
            raise _too_long(batch.path, line + 1)
        start = Position(line, offset)
        line, offset = line + block.count(b"\n"), offset + len(block)
        yield Batch(batch.file, batch.path, "jsonl", start, Position(line, offset), block)


def _text(stream: BinaryIO, settings: Any, batch: Batch) -> Iterator[Batch]:
    cut = _articles if batch.format == "wikitext" else _parted
    here = batch.start
    for line, document, end in cut(stream, settings, batch):
        if document.strip():
            batch.documents.append((line, document))
        if end.offset - batch.start.offset >= BATCH_BYTES:
            batch.end = end
            yield batch
            batch = Batch(batch.file, batch.path, batch.format, end)
        here = end
    batch.end = here
    yield batch


def _parted(stream: BinaryIO, settings: Any, batch: Batch) -> Iterator[tuple[int, bytes, Position]]:
    """(first line, document, where the next begins), cut at the lines that are the separator."""
    separator = settings.document_separator.strip().encode()
    first, lines, size = batch.start.line + 1, list[bytes](), 0
    offset = batch.start.offset
    number = batch.start.line
    for number, line in enumerate(stream, start=first):
        offset += len(line)
        size += len(line)
        if size > LARGEST_DOCUMENT:
            raise _too_long(batch.path, first)
        if line.strip() == separator:
            yield first, b"".join(lines).strip(b"\r\n"), Position(number, offset)
            first, lines, size = number + 1, [], 0
        else:
            lines.append(line)
    yield first, b"".join(lines).strip(b"\r\n"), Position(number, offset)


def _articles(
    stream: BinaryIO, settings: Any, batch: Batch
) -> Iterator[tuple[int, bytes, Position]]:
    """(first line, article, where the next begins), cut before the headings behind empty lines."""
    first, lines, size = batch.start.line + 1, list[bytes](), 0
    offset = batch.start.offset
    number, after_empty = batch.start.line, True
    for number, line in enumerate(stream, start=first):
        if after_empty and lines and HEADING.fullmatch(line):
            yield first, b"".join(lines).strip(b"\r\n").rstrip(), Position(number - 1, offset)
            first, lines, size = number, [], 0
        after_empty = not line.strip()
        lines.append(line)
        offset += len(line)
        size += len(line)
        if size > LARGEST_DOCUMENT:
            raise _too_long(batch.path, first)
    yield first, b"".join(lines).strip(b"\r\n").rstrip(), Position(number, offset)


def _parquet(path: Path, settings: Any, number: int, start: Position) -> Iterator[Batch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Pages, which have a MB as a rule, are read as they are needed: a row group of any size
        # takes little memory.
        with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            _check_columns(path, file.schema_arrow, settings.json_keys)
            size, rows = path.stat().st_size, max(file.metadata.num_rows, 1)
            batch = Batch(number, path, "parquet", start)
            row = text = 0
            for group in range(file.num_row_groups):
                behind = row + file.metadata.row_group(group).num_rows
                if behind <= start.line:
                    row = behind
                    continue
                for table in file.iter_batches(
                    PARQUET_ROWS, [group], list(settings.json_keys), use_threads=False
                ):
                    columns = [table[key].cast(pa.large_binary()) for key in settings.json_keys]
                    cells = zip(*(column.to_pylist() for column in columns), strict=True)
                    for document in cells:
                        row += 1
                        if row > start.line:
                            batch.documents.append((row, document))
                            text += sum(len(cell or b"") for cell in document)
                    if text >= BATCH_BYTES:
                        batch.end, text = Position(row), 0
                        batch.bytes_read = size * row // rows - size * batch.start.line // rows
                        yield batch
                        batch = Batch(number, path, "parquet", batch.end)
            batch.end, batch.last = Position(row), True
            batch.bytes_read = size - size * batch.start.line // rows
            yield batch
    except pa.ArrowException as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path} is damaged, or no Parquet file ({reason}); get it again, or leave it out"
        ) from error


def _check_columns(path: Path, schema: Any, keys: tuple[str, ...]) -> None:
    import pyarrow as pa

    for key in keys:
        if key not in schema.names:
            raise ValueError(
                f"{path}: no column {key!r} (there are {', '.join(schema.names)}); name the column "
                "of the text in --json-keys"
            )
        kind = schema.field(key).type
        if not any(is_text(kind) for is_text in (pa.types.is_string, pa.types.is_large_string)):
            raise ValueError(
                f"{path}: the column {key!r} holds {kind}, not text; name another in --json-keys"
            )
