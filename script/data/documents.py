"""Define the settings of a preprocessing run and the encoder that tokenizes its batches.

Each document is identified by its file and its first line, so that messages can refer to it.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batch import Batch, Position
from readers import guess_format

#: Names of the JSON types other than string, by the Python type to which json.loads converts them.
_JSON_TYPES = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "an array",
    dict: "an object",
}
KEYS_SHOWN = 10  #: maximum number of keys in the error message for a missing key


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a preprocessing run; most fields are named after a command-line option."""

    input: tuple[Path, ...]  #: input files, in the order in which they are read
    output_prefix: Path
    json_keys: tuple[str, ...] = ("text",)
    input_format: str | None = None  #: format of all input files; if None, it is guessed for each
    document_separator: str = ""
    wikipedia: bool = False  #: True if text that begins with a title is read as wikitext
    tokenizer_type: str | None = None
    tokenizer_model: Path | None = None
    vocab_size: int | None = None
    append_eod: bool = False
    workers: int = 1
    strict: bool = False
    overwrite: bool = False

    def prefix(self, key: str) -> str:
        """Return the path of the output files for `key`, without a suffix, as in --data-path."""
        return f"{self.output_prefix}_{key}_document"

    def format_of(self, path: Path) -> str:
        """Return the format of an input file: `input_format`, or a guess if it is None."""
        return self.input_format or guess_format(path, wikipedia=self.wikipedia)

    def check_free(self) -> None:
        """Check that the run would not replace existing output without --overwrite.

        Raises:
            ValueError: if output exists and --overwrite is not set.
        """
        for key in () if self.overwrite else self.json_keys:
            for suffix in (".idx", ".bin", ".json"):
                if Path(self.prefix(key) + suffix).exists():
                    raise ValueError(
                        f"{self.prefix(key)}{suffix} exists; give --overwrite to replace it, "
                        "or another --output-prefix"
                    )


@dataclass
class Tokens:
    """Tokenized batch: for each key, the concatenated token ids and the documents' lengths."""

    file: int
    end: Position
    last: bool
    bytes_read: int
    #: token ids by key; each value is an array of the output's dtype
    ids: dict[str, Any] = field(default_factory=dict)
    #: lengths of the documents by key; each value is an array of int32
    lengths: dict[str, Any] = field(default_factory=dict)
    text_bytes: dict[str, int] = field(default_factory=dict)
    read: int = 0  #: number of valid documents, including those without text
    bad: list[tuple[int, str]] = field(
        default_factory=list
    )  #: line and reason of each bad document


class Encoder:
    """Encoder that tokenizes batches; a worker process inherits or creates one."""

    shared: Encoder | None = None

    def __init__(self, settings: Settings) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not")
            from megatron.core.datasets.indexed_dataset import DType
            from megatron.training.data.tokenizer import batch_encoder, build_tokenizer

        self.settings = settings
        self.tokenizer = build_tokenizer(
            settings.tokenizer_type, settings.tokenizer_model, settings.vocab_size
        )
        if settings.append_eod and self.tokenizer.eod is None:
            raise ValueError(
                f"the tokenizer {settings.tokenizer_model} has no end-of-document token; "
                "leave --append-eod out, or set eos_token in its tokenizer_config.json"
            )
        self.vocab_size = self.tokenizer.vocab_size
        self.dtype = DType.optimal_dtype(self.vocab_size)
        self.encode_texts = batch_encoder(self.tokenizer)

    @classmethod
    def start_worker(cls, settings: Settings) -> None:
        """Initialize a worker process, and create its encoder unless a fork copied the parent's."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent terminates its workers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        if cls.shared is None:
            cls.shared = cls(settings)

    @classmethod
    def run(cls, batch: Batch) -> Tokens:
        """Tokenize a batch with this process's encoder."""
        assert cls.shared is not None
        return cls.shared.encode(batch)

    def encode(self, batch: Batch) -> Tokens:
        """Tokenize a batch.

        Raises:
            ValueError: with --strict, if a document is bad; the message names its file and line.
        """
        tokens = Tokens(batch.file, batch.end, batch.last, batch.bytes_read)
        lines: list[int] = []
        columns: dict[str, list[str]] = {key: [] for key in self.settings.json_keys}
        for line, document in batch:
            try:
                texts = self.texts(batch, document)
            except ValueError as error:
                tokens.bad.append((line, str(error)))
                continue
            lines.append(line)
            for key in columns:
                columns[key].append(texts[key])
        faulty: dict[int, str] = {}
        encoded = {key: self._encode(texts, faulty) for key, texts in columns.items()}
        if faulty:
            tokens.bad = sorted(tokens.bad + [(lines[i], why) for i, why in faulty.items()])
        tokens.read = len(lines) - len(faulty)
        for key, ids in encoded.items():
            valid = [i for i, text_ids in enumerate(ids) if text_ids and i not in faulty]
            self._collect(tokens, key, [ids[i] for i in valid])
            tokens.text_bytes[key] = sum(len(columns[key][i].encode()) for i in valid)
        if tokens.bad and self.settings.strict:
            line, why = tokens.bad[0]
            raise ValueError(f"{batch.path}:{line}: {why}")
        return tokens

    def _encode(self, texts: list[str], faulty: dict[int, str]) -> list[list[int]]:
        """Return the token ids of each text.

        If a text cannot be tokenized, its ids must not be used, and `faulty` gets the reason, with
        the index of the text as the key.
        """
        try:
            encoded = self.encode_texts(texts)
        except BaseException as error:
            _reason(error)
            encoded = []
            for i, text in enumerate(texts):  # one text at a time, to find those that fail
                try:
                    encoded += self.encode_texts([text]) if text else [[]]
                except BaseException as error:
                    faulty[i] = _reason(error)
                    encoded.append([])
        if self.tokenizer.library == "null":  # only the null tokenizer returns invalid ids
            for i, ids in enumerate(encoded):
                if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                    faulty[i] = f"a token id is not within the vocabulary of {self.vocab_size}"
        return encoded

    def _collect(self, tokens: Tokens, key: str, documents: list[list[int]]) -> None:
        import numpy as np

        if self.settings.append_eod:
            for ids in documents:
                ids.append(self.tokenizer.eod)
        tokens.lengths[key] = np.array([len(ids) for ids in documents], dtype=np.int32)
        count = int(tokens.lengths[key].sum(dtype=np.int64))
        joined = itertools.chain.from_iterable(documents)
        tokens.ids[key] = np.fromiter(joined, dtype=self.dtype, count=count)

    def texts(self, batch: Batch, document: Any) -> dict[str, str]:
        """Return a document's text for each of the requested keys.

        Raises:
            ValueError: if the document is bad; the message gives the reason.
        """
        keys = self.settings.json_keys
        if batch.format == "parquet":
            if None in document:
                raise ValueError(f"no text in the column {keys[document.index(None)]!r}")
            return {key: _decode(cell) for key, cell in zip(keys, document, strict=True)}
        text = _decode(document).removeprefix("\ufeff")
        if batch.format != "jsonl":
            return {keys[0]: text.replace("\r\n", "\n")}
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
        except ValueError as error:  # int() rejects numbers with thousands of digits
            raise ValueError("not JSON that can be read (a number has too many digits)") from error
        except RecursionError as error:
            raise ValueError("not JSON that can be read (nested too deep)") from error
        if not isinstance(record, dict):
            raise ValueError("not a JSON object; give one object per line")
        for key in keys:
            if key in record and not isinstance(record[key], str):
                kind = _JSON_TYPES[type(record[key])]
                raise ValueError(f"the value under the key {key!r} is {kind}, not a string")
            if key not in record:
                present = _some(record) or "none"
                raise ValueError(
                    f"no text under the key {key!r} (available keys: {present}); name the key in "
                    "--json-keys"
                )
            try:
                record[key].encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"half of a surrogate pair under the key {key!r}") from error
        return {key: record[key] for key in keys}


def _some(keys: Iterable[str]) -> str:
    """Return text for an error message that lists the first keys of a JSON document."""
    shown = [repr(key[:40]) for key in itertools.islice(keys, KEYS_SHOWN + 1)]
    return ", ".join(shown[:KEYS_SHOWN]) + ", ..." * (len(shown) > KEYS_SHOWN)


def _reason(error: BaseException) -> str:
    """Return why a tokenizer rejected a text; raise `error` again if it has another cause.

    The NullTokenizer raises ValueError. The tokenizer libraries may raise any exception. Libraries
    in Rust raise a PanicException, which is not a subclass of `Exception`.
    """
    if isinstance(error, ValueError):
        return str(error)
    by_text = isinstance(error, Exception) and not isinstance(error, (MemoryError, OSError))
    if not by_text and type(error).__name__ != "PanicException":
        raise error
    first = (str(error).strip().splitlines() or ["no reason given"])[0]
    return f"the tokenizer fails on it ({type(error).__name__}: {first})"


def _end_with_parent() -> None:
    """End this worker when its parent ends.

    A killed parent cannot end its workers, which would then wait forever.
    """
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _decode(document: bytes) -> str:
    try:
        return document.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}); convert the file with iconv") from error
