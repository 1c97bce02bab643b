"""How one file of a dump is read: a tensor, or a run card. Nothing that a file holds is run."""

from __future__ import annotations

import json
import stat
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class UnreadableTensorError(ValueError):
    """A file that holds no tensor we can read; the message says which and why."""

    def __init__(self, path: Path, why: str):
        super().__init__(f"{path}: {why}")
        self.why = why


@dataclass(frozen=True, slots=True)
class Problem:
    """A file that was left out, and why."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path}: {self.why}"


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
        why = 'holds no tensor (expected {"tensor": ..., "metadata": ...})'
        raise UnreadableTensorError(path, why)
    if payload.layout != torch.strided or payload.is_quantized or payload.is_meta:
        why = f"holds no plain dense tensor ({payload.layout}, {payload.dtype})"
        raise UnreadableTensorError(path, why)
    return payload, metadata if isinstance(metadata, dict) and metadata else None


def read_payload(path: Path) -> Any:
    """Whatever a file of torch.save holds, tensors memory-mapped.

    Raises:
        UnreadableTensorError: it cannot be read without running code, or at all.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            raise UnreadableTensorError(path, "no regular file")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnreadableTensorError:
        raise
    except Exception as error:  # a damaged archive or pickle can raise nearly anything
        raise UnreadableTensorError(path, reason(error, path)) from None


def read_run_card(path: Path) -> dict[str, Any]:
    """The content of a run card.

    Raises:
        ValueError: it cannot be read, or is none.
    """
    try:
        card = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the run card is not read ({reason(error)})") from None
    if not isinstance(card, dict):
        raise ValueError(f"a JSON {type(card).__name__}, no run card")
    for name, kind in {"arguments": dict, "quantization": list, "ranks": list}.items():
        if not isinstance(card.get(name), (kind, type(None))):
            found = type(card[name]).__name__
            raise ValueError(f"no run card: its {name} are a {found}, no {kind.__name__}")
    return card


def reason(error: Exception, path: Path | None = None) -> str:
    """An exception in one line, for a person; `path` is the tensor file it is about."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if path is not None and not path.stat().st_size:
        return "the file is empty"
    if path is not None and not zipfile.is_zipfile(path):
        return "no archive of torch.save: corrupt, cut short, or of another program"
    text = str(error).strip()
    if "eights only" in text or "weights_only" in text:
        return "it holds other things than tensors and plain values; loading it could run code"
    line = text.splitlines()[0] if text else type(error).__name__
    prefix = "corrupt or cut short: " if path is not None else ""
    return prefix + line
