"""Read batches of raw documents from files, starting at any position.

A file is JSONL, Parquet, plain text with a separator line between documents, or wikitext whose
articles begin with ` = Title = `. All formats except Parquet may be compressed with gzip, bzip2 or
zstandard, which is detected from the first bytes of a file. Files are streamed: memory holds a
batch of about BATCH_BYTES, or one larger document.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from batch import START, Batch, Position
from compressed import decompressed
from parquet import read_parquet

#: Size of a batch in bytes. It is small, so that all workers end at about the same time.
BATCH_BYTES = 1 << 18
#: Maximum size of a document, in bytes; a larger document probably means that the format is wrong.
LARGEST_DOCUMENT = 256 << 20
FORMATS = ("text", "wikitext", "jsonl", "parquet")

#: Pattern of an article's title line; section headings begin with ` = = ` and do not match.
HEADING = re.compile(rb" ?= (?!=)[^\r\n]*(?<!=) = ?\r?\n?")


def guess_format(path: Path, *, wikipedia: bool = False) -> str:
    """Guess the format of a file from its name and, if the name is not enough, from its start.

    If `wikipedia` is true, text that begins with a title is treated as wikitext.

    Raises:
        ValueError: if the file is XML output of wikiextractor.
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
    path: Path, settings: Any, *, number: int = 0, start: Position = START
) -> Iterator[Batch]:
    """Yield the batches of one file from `start` on. The last one has `last` set and may be empty.

    Raises:
        ValueError: if the file is damaged, has disappeared, or has another format.
    """
    try:
        kind = settings.format_of(path)
        if kind == "parquet":
            yield from read_parquet(
                path, settings, number=number, start=start, batch_bytes=BATCH_BYTES
            )
            return
        with path.open("rb") as raw, decompressed(raw) as stream:
            _skip(raw, stream, start.offset)
            batches = _jsonl if kind == "jsonl" else _text
            position, last = raw.tell() if start.offset else 0, None
            for batch in batches(stream, settings, Batch(number, path, kind, start)):
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
        f"format in --input-format ({', '.join(FORMATS)}), or one JSON object per line"
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
    split = _articles if batch.format == "wikitext" else _separated
    position = batch.start
    for line, document, end in split(stream, settings, batch):
        if document.strip():
            batch.documents.append((line, document))
        if end.offset - batch.start.offset >= BATCH_BYTES:
            batch.end = end
            yield batch
            batch = Batch(batch.file, batch.path, batch.format, end)
        position = end
    batch.end = position
    yield batch


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a stream; split lines that exceed the maximum size of a document."""
    while line := stream.readline(LARGEST_DOCUMENT + 1):
        yield line


def _separated(
    stream: BinaryIO, settings: Any, batch: Batch
) -> Iterator[tuple[int, bytes, Position]]:
    """Split text at separator lines; yield (first line's number, document, start of the next)."""
    separator = settings.document_separator.strip().encode()
    first, lines, size = batch.start.line + 1, list[bytes](), 0
    offset = batch.start.offset
    number = batch.start.line
    for number, line in enumerate(_lines(stream), start=first):
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
    """Split text before each title after an empty line; yield tuples as `_separated` does."""
    first, lines, size = batch.start.line + 1, list[bytes](), 0
    offset = batch.start.offset
    number, after_empty = batch.start.line, True
    for number, line in enumerate(_lines(stream), start=first):
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
