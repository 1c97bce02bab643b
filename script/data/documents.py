"""Text on disk -> documents -> token ids: what a worker of preprocess.py does.

A document keeps the file and the line where it begins, so that an error can name them.
"""

from __future__ import annotations

import json
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

BATCH_BYTES = 1 << 20
FORMATS = ("text", "jsonl")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to read and how to tokenize it; each field is the option of the same name."""

    input: tuple[Path, ...]
    output_prefix: Path
    json_keys: tuple[str, ...] = ("text",)
    input_format: str | None = None  # None: by the name of each file
    document_separator: str = ""
    tokenizer_type: str | None = None
    tokenizer_model: Path | None = None
    vocab_size: int | None = None
    append_eod: bool = False
    workers: int = 1
    skip_bad_lines: bool = False
    overwrite: bool = False

    def prefix(self, key: str) -> str:
        """Where the documents of `key` go, as --data-path takes it."""
        return f"{self.output_prefix}_{key}_document"

    def format_of(self, path: Path) -> str:
        by_name = "jsonl" if path.suffix in (".jsonl", ".json", ".ndjson") else "text"
        return self.input_format or by_name


@dataclass
class Batch:
    """Raw documents in the order of the input, with the line where each begins."""

    path: Path
    format: str
    documents: list[tuple[int, bytes]] = field(default_factory=list)
    bytes_read: int = 0


@dataclass
class Tokens:
    """A tokenized batch: of each key the ids, one after another, and each document's length."""

    ids: dict[str, Any]  # numpy arrays of the output's dtype
    lengths: dict[str, list[int]]
    bytes_read: int
    text_bytes: dict[str, int]
    bad_lines: int


def read_batches(settings: Settings) -> Iterator[Batch]:
    """The input in batches of about BATCH_BYTES; only a document that is larger exceeds it."""
    for path in settings.input:
        kind = settings.format_of(path)
        with path.open("rb") as file:
            cut = _lines(file) if kind == "jsonl" else _paragraphs(file, settings)
            batch = Batch(path, kind)
            for line, document, size in cut:
                if document:
                    batch.documents.append((line, document))
                batch.bytes_read += size
                if batch.bytes_read >= BATCH_BYTES:
                    yield batch
                    batch = Batch(path, kind)
            yield batch


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes, int]]:
    """(line number, line, bytes read); an empty line yields no document."""
    for number, line in enumerate(file, start=1):
        yield number, line.strip(), len(line)


def _paragraphs(file: BinaryIO, settings: Settings) -> Iterator[tuple[int, bytes, int]]:
    """(first line number, document, bytes read), cut at the lines that are the separator."""
    separator = settings.document_separator.strip().encode()
    first, lines, size = 1, list[bytes](), 0
    for number, line in enumerate(file, start=1):
        size += len(line)
        if line.strip() == separator:
            yield first, b"".join(lines).strip(b"\r\n"), size
            first, lines, size = number + 1, [], 0
        else:
            lines.append(line)
    yield first, b"".join(lines).strip(b"\r\n"), size


class Encoder:
    """Turns a batch into token ids. A worker inherits it from the parent, or makes it once."""

    shared: Encoder | None = None

    def __init__(self, settings: Settings) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not")
            from megatron.core.datasets.indexed_dataset import DType
            from megatron.training.tokenizer import build_tokenizer

        self.settings = settings
        self.tokenizer = build_tokenizer(
            settings.tokenizer_type, settings.tokenizer_model, settings.vocab_size
        )
        if settings.append_eod and self.tokenizer.eod is None:
            raise ValueError(
                f"the tokenizer {settings.tokenizer_model} has no end-of-document token; "
                "leave --append-eod out, or set eos_token in its tokenizer_config.json"
            )
        self.dtype = DType.optimal_dtype(self.tokenizer.vocab_size)

    @classmethod
    def start_worker(cls, settings: Settings) -> None:
        """The initializer of a worker: a forked one has the parent's encoder already."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if cls.shared is None:
            cls.shared = cls(settings)

    @classmethod
    def run(cls, batch: Batch) -> Tokens:
        assert cls.shared is not None
        return cls.shared.encode(batch)

    def encode(self, batch: Batch) -> Tokens:
        import numpy as np

        keys = self.settings.json_keys
        ids: dict[str, list[int]] = {key: [] for key in keys}
        lengths: dict[str, list[int]] = {key: [] for key in keys}
        text_bytes = dict.fromkeys(keys, 0)
        bad_lines = 0
        for line, document in batch.documents:
            try:
                texts = self.texts(batch, document)
                tokens = {key: self.tokenizer.tokenize(text) for key, text in texts.items()}
            except ValueError as error:
                if not (self.settings.skip_bad_lines and batch.format == "jsonl"):
                    raise ValueError(f"{batch.path}:{line}: {error}") from error
                bad_lines += 1
                continue
            for key in keys:
                if not tokens.get(key):
                    continue
                document_ids = tokens[key] + [self.tokenizer.eod] * self.settings.append_eod
                ids[key].extend(document_ids)
                lengths[key].append(len(document_ids))
                text_bytes[key] += len(texts[key].encode())
        arrays = {key: np.array(ids[key], dtype=self.dtype) for key in keys}
        return Tokens(arrays, lengths, batch.bytes_read, text_bytes, bad_lines)

    def texts(self, batch: Batch, document: bytes) -> dict[str, str]:
        """The text of each key; ValueError says what is wrong with the document."""
        try:
            text = document.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 ({error.reason}); convert the file with iconv") from error
        if batch.format == "text":
            return {self.settings.json_keys[0]: text.replace("\r\n", "\n")}
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"not JSON ({error.msg} at column {error.colno}); correct the line, or leave such "
                "lines out with --skip-bad-lines"
            ) from error
        if not isinstance(record, dict):
            raise ValueError("not a JSON object; give one object a line, or --skip-bad-lines")
        for key in self.settings.json_keys:
            if not isinstance(record.get(key), str):
                raise ValueError(
                    f"no text under the key {key!r} (there are {', '.join(record) or 'no keys'}); "
                    "name the key in --json-keys, or leave such lines out with --skip-bad-lines"
                )
        return {key: record[key] for key in self.settings.json_keys}
