"""Finds the tensors of a dump and reads them, one at a time and memory-mapped.

What is known of a tensor comes from the run's index where there is one, else from the file's own
metadata, else from its name. Nothing is written, and no file spoils the others: what cannot be read
is a `Problem` beside the good entries.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.tensor_record import TensorRecord, parse_filename, read_index

_UNKNOWN: dict[str, Any] = {item.name: None for item in fields(TensorRecord)}


class UnreadableTensorError(ValueError):
    """A file that holds no tensor we can read; the message says why."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that was left out, and why."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a dump: where it is and what is known of it without its values."""

    path: Path
    metadata: Mapping[str, Any]  #: the fields of TensorRecord; None where unknown
    source: str  #: index | file | name: where the metadata come from

    def load(self) -> Tensor:
        """The tensor, memory-mapped: its pages are read when its values are.

        Raises:
            UnreadableTensorError: the file is corrupt, or is not what the index says.
        """
        tensor, _ = read_tensor(self.path)
        shape = self.metadata["shape"]
        if shape is not None and list(tensor.shape) != list(shape):
            raise UnreadableTensorError(
                f"holds a tensor of shape {list(tensor.shape)}, but its record says {list(shape)}"
            )
        return tensor


@dataclass(frozen=True)
class Dump:
    """The tensors below a folder, in the order in which they were written."""

    folder: Path
    entries: tuple[Entry, ...]
    problems: tuple[Problem, ...] = ()  #: files that are no tensors of ours
    missing: Mapping[Path, int] = field(
        default_factory=dict
    )  #: by index: files that it names in vain

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def runs(self) -> dict[str, int]:
        """Number of tensors by run, oldest first; those of unknown origin under the empty name."""
        counts: dict[str, int] = {}
        started: dict[str, str] = {}
        for entry in self.entries:
            run_id = str(entry.metadata["run_id"] or "")
            counts[run_id] = counts.get(run_id, 0) + 1
            written = str(entry.metadata["timestamp"] or "")
            started[run_id] = min(started.get(run_id, written), written)
        return {run_id: counts[run_id] for run_id in sorted(counts, key=lambda r: (started[r], r))}

    def only(self, run: str) -> Dump:
        """The part that belongs to one run, named by its id; `latest` is the one that started last.

        Raises:
            ValueError: no such run.
        """
        runs = [name for name in self.runs() if name]
        wanted = runs[-1] if run == "latest" and runs else run
        if wanted not in runs:
            found = ", ".join(runs) or "none that has an id"
            raise ValueError(f"no run {run!r} in {self.folder}; give 'latest' or one of: {found}")
        chosen = tuple(entry for entry in self.entries if entry.metadata["run_id"] == wanted)
        return replace(self, entries=chosen)


def open_dump(folder: Path) -> Dump:
    """Find all tensors below `folder`, in its subfolders too. Reads indexes; opens only files
    without.

    Raises:
        ValueError: the folder is missing, is no folder, or holds no `.pt` file.
    """
    if not folder.exists():
        raise ValueError(f"no folder {folder}; collect tensors first, or name another folder")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; name the folder that holds the .pt files")
    files, indexes, problems = _walk(folder)
    known: dict[Path, dict[str, Any]] = {}
    missing: dict[Path, int] = {}
    present = set(files)
    for index in indexes:
        try:
            records = {index.parent / str(line["file"]): line for line in read_index(index)}
        except (OSError, ValueError, KeyError, TypeError) as error:
            problems.append(
                Problem(index, f"not read ({_reason(error)}); its files are opened instead")
            )
            continue
        if lost := len(records.keys() - present):
            missing[index] = lost
        known |= records
    entries = []
    for path in files:
        try:
            entries.append(_entry(path, known.get(path)))
        except UnreadableTensorError as error:
            problems.append(Problem(path, str(error)))
    if not files:
        detail = f" ({sum(missing.values())} are in its index)" if missing else ""
        raise ValueError(
            f"no .pt file in {folder} or below{detail}; collect tensors first, or name "
            "another folder"
        )
    entries.sort(key=_order)
    return Dump(folder, tuple(entries), tuple(problems), missing)


def read_tensor(path: Path) -> tuple[Tensor, dict[str, Any] | None]:
    """The tensor of a file, memory-mapped, and its metadata if it has any.

    Raises:
        UnreadableTensorError: not a tensor, or not one that can be read without running code.
    """
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged archive or pickle can raise nearly anything
        raise UnreadableTensorError(_reason(error, path)) from None
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


def _walk(folder: Path) -> tuple[list[Path], list[Path], list[Problem]]:
    """Tensor files, indexes, and the folders that could not be listed."""
    files: list[Path] = []
    indexes: list[Path] = []
    problems: list[Problem] = []

    def unreadable(error: OSError) -> None:
        problems.append(Problem(Path(str(error.filename)), _reason(error)))

    for parent, _, names in os.walk(folder, onerror=unreadable):
        for name in names:
            if name.endswith(".pt"):
                files.append(Path(parent, name))
            elif name.startswith("index_") and name.endswith(".jsonl"):
                indexes.append(Path(parent, name))
    return sorted(files), sorted(indexes), problems


def _entry(path: Path, indexed: dict[str, Any] | None) -> Entry:
    """What is known of one file, from the best source there is."""
    if indexed is not None:
        return Entry(path, _UNKNOWN | indexed, "index")
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
    found = _UNKNOWN | (named or {}) | actual | (metadata or {})
    return Entry(path, found, "name" if metadata is None else "file")


def _order(entry: Entry) -> tuple[str, str, int, str]:
    """By run, then as written; the name decides between ranks."""
    known = entry.metadata
    return (
        str(known["run_id"] or ""),
        str(known["timestamp"] or ""),
        int(known["counter"] or 0),
        str(entry.path),
    )


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
