"""Run script/data/preprocess.py in this process on made-up inputs, for several test files."""

import gzip
import json
import sys
from pathlib import Path

from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "script/data"))

import preprocess
from documents import Encoder

SCRIPTS = REPO / "script/data"
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "60000", "--append-eod")
ENDS = (".bin", ".idx", ".json")


def numbers(seed: int) -> str:
    """Return a document of the NullTokenizer: up to 60 numbers below 60,000."""
    return " ".join(str((seed * 7919 + k * 31) % 60000) for k in range(1 + seed % 60))


def make_inputs(folder: Path, files: int = 4, documents: int = 150) -> list[Path]:
    """Write JSONL files with one bad line each; every other file is compressed."""
    paths = []
    for number in range(files):
        rows = [{"text": numbers(number * documents + i)} for i in range(documents)]
        lines = [json.dumps(row) for row in rows]
        lines.insert(documents // 2, "bad")
        path = folder / f"part{number}.jsonl{'.gz' * (number % 2)}"
        content = "\n".join(lines).encode()
        path.write_bytes(gzip.compress(content, mtime=0) if number % 2 else content)
        paths.append(path)
    return paths


def call(folder: Path, prefix: str, *options: str) -> int:
    """Preprocess `folder`/part* in this process and return the exit status."""
    inputs = sorted(map(str, folder.glob("part*")))
    arguments = ["--input", *inputs, "--output-prefix", str(folder / prefix), "--workers", "1"]
    return preprocess.main([*arguments, *NULL, *options])


def result(folder: Path, prefix: str) -> list[bytes]:
    """Return the contents of a run's output files; its partial folder must be gone."""
    assert not (folder / f"{prefix}.partial").exists()
    names = [f"{prefix}_text_document{end}" for end in ENDS] + [f"{prefix}_bad_lines.txt"]
    return [(folder / name).read_bytes() for name in names]


def stop_after(monkeypatch, batches: int, error: BaseException) -> None:
    """Make the tokenizer raise an error once, after `batches` batches."""
    encode, count = Encoder.encode, iter(range(batches + 1))

    def failing(self, batch):
        if next(count, None) == batches:
            raise error
        return encode(self, batch)

    monkeypatch.setattr(Encoder, "encode", failing)
