"""What lies in a dump's folder: tensor files, indexes and run cards, and how each is read.

What is known of a tensor comes from the run's index where there is one, else from the file's own
metadata, else from its name. Nothing is written, and no file spoils the others: what cannot be read
is a `Problem` beside the good rows.
"""

from __future__ import annotations

import json
import os
import zipfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.tensor_record import TensorRecord, parse_filename, read_index

_UNKNOWN: dict[str, Any] = {item.name: None for item in fields(TensorRecord)}

#: What is known of one tensor: the fields of TensorRecord (None where unknown), `path`, `bytes` and
#: `source` (index | file | name).
Row = dict[str, Any]


class UnreadableTensorError(ValueError):
    """A file that holds no tensor we can read; the message says why."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that was left out, and why."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass
class Found:
    """What a folder holds."""

    rows: list[Row] = field(default_factory=list)  #: in the order in which they were written
    missing: list[Row] = field(default_factory=list)  #: index lines whose file is not there
    problems: list[Problem] = field(default_factory=list)  #: files that are no tensors of ours


def scan(folder: Path) -> Found:
    """Find all tensors below `folder`, in its subfolders too. Reads indexes; opens only files that
    stand in none.

    Raises:
        ValueError: the folder is missing, is no folder, or holds no `.pt` file.
    """
    if not folder.exists():
        raise ValueError(f"no folder {folder}; collect tensors first, or name another folder")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder that holds the .pt files")
    found = Found()
    files, indexes = _walk(folder, found.problems)
    indexed: dict[str, Row] = {}
    for index in indexes:
        _read_index_into(indexed, index, found.problems)
    for path in files:
        row = indexed.pop(path, None)
        try:
            found.rows.append(_row_of_file(Path(path)) if row is None else row)
        except UnreadableTensorError as error:
            found.problems.append(Problem(Path(path), str(error)))
    found.missing = list(indexed.values())
    if not files:
        detail = f" ({len(found.missing)} are in its index)" if found.missing else ""
        raise ValueError(
            f"no .pt file in {folder} or below{detail}; collect tensors first, or name "
            "another folder"
        )
    found.rows.sort(key=_order)
    found.missing.sort(key=_order)
    return found


def _walk(folder: Path, problems: list[Problem]) -> tuple[list[str], list[Path]]:
    """Tensor files and indexes; the folders that could not be listed are problems."""
    files: list[str] = []
    indexes: list[Path] = []

    def unreadable(error: OSError) -> None:
        problems.append(Problem(Path(str(error.filename)), _reason(error)))

    for parent, _, names in os.walk(folder, onerror=unreadable):
        for name in names:
            if name.endswith(".pt"):
                files.append(f"{parent}{os.sep}{name}")
            elif name.startswith("index_") and name.endswith(".jsonl"):
                indexes.append(Path(parent, name))
    return sorted(files), sorted(indexes)


def _read_index_into(rows: dict[str, Row], index: Path, problems: list[Problem]) -> None:
    """Add the lines of one index, by the path of their file; a spoilt index is one problem."""
    parent = f"{index.parent}{os.sep}"
    read: dict[str, Row] = {}
    try:
        for line in read_index(index):
            path = parent + line["file"]
            known = line if _UNKNOWN.keys() <= line.keys() else _UNKNOWN | line
            known["path"], known["source"] = path, "index"
            read[path] = known
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"not read ({_reason(error)}); its files are opened instead"
        problems.append(Problem(index, why))
        return
    rows |= read


def _row_of_file(path: Path) -> Row:
    """What is known of a file that stands in no index."""
    tensor, metadata = read_tensor(path)
    named = parse_filename(path.name)
    if named is not None:
        named["rank"] = {"world": named["rank"]}
    if metadata is None and named is None:
        raise UnreadableTensorError(
            "no metadata in it, and its name is not "
            "{timestamp}_{counter}_{layer}_L{n}_{operation}_{phase}_{component}_{type}_{tensor}.pt"
        )
    actual = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    of_file = {"path": str(path), "bytes": path.stat().st_size}
    source = "name" if metadata is None else "file"
    return _UNKNOWN | (named or {}) | actual | (metadata or {}) | of_file | {"source": source}


def _order(row: Row) -> tuple[str, str, int, str]:
    """By run, then as written; the name decides between ranks."""
    return row["run_id"] or "", row["timestamp"] or "", row["counter"] or 0, row["path"]


def read_tensor(path: Path) -> tuple[Tensor, dict[str, Any] | None]:
    """The tensor of a file, memory-mapped, and its metadata if it has any.

    Raises:
        UnreadableTensorError: not a tensor, or not one that can be read without running code.
    """
    payload = read_payload(path)
    metadata = None
    if isinstance(payload, dict):
        metadata = payload.get("metadata")
        payload = payload.get("tensor")
    if not isinstance(payload, Tensor):
        raise UnreadableTensorError('holds no tensor (expected {"tensor": ..., "metadata": ...})')
    if payload.layout != torch.strided or payload.is_quantized or payload.is_meta:
        raise UnreadableTensorError(
            f"holds no plain dense tensor ({payload.layout}, {payload.dtype})"
        )
    return payload, metadata if isinstance(metadata, dict) and metadata else None


def read_payload(path: Path) -> Any:
    """Whatever a file of torch.save holds, tensors memory-mapped.

    Raises:
        UnreadableTensorError: it cannot be read without running code, or at all.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged archive or pickle can raise nearly anything
        raise UnreadableTensorError(_reason(error, path)) from None


def read_run_card(folder: Path, run_id: str) -> dict[str, Any]:
    """A run's card from anywhere below `folder`; empty if there is none or it cannot be read."""
    for path in sorted(folder.rglob(f"run_{run_id}.json")):
        try:
            card = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(card, dict):
            return card
    return {}


def _reason(error: Exception, path: Path | None = None) -> str:
    """An exception in one line, for a person."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if path is not None and not path.stat().st_size:
        return "the file is empty"
    if path is not None and not zipfile.is_zipfile(path):
        return "corrupt or cut short: no archive of torch.save"
    text = str(error).strip()
    if "eights only" in text or "weights_only" in text:
        return "it holds other things than tensors and plain values; loading it could run code"
    line = text.splitlines()[0] if text else type(error).__name__
    prefix = "corrupt or cut short: " if path is not None else ""
    return prefix + line
