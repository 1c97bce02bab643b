"""Read a tensor file or a run card of a dump without running code from the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.analysis.dump.tensor_archive import ArchiveError, check_archive
from megatron.bounded_files import UnusableFileError, printable, read_json

PATH_LIMIT = 4096  #: maximum length of a path in a message, in characters
WHY_LIMIT = 1000  #: maximum length of the reason given in a message, in characters
TEXT_LIMIT = 20_000  #: maximum length of a string in a run card, in characters
#: Maximum number of dimensions of a tensor; a matmul operand has 2 to 4, and NumPy allows 64.
DIMENSIONS = 16
EMPTY_SIZES = 1 << 24  #: maximum product of the nonzero dimensions of an empty tensor
#: Dtypes that a dump may contain; statistics and checks do not support any others.
DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    }
) | ({torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else set())  # new in torch 2.7


class UnreadableTensorError(ValueError):
    """Error raised if a file contains no readable tensor; the message names file and reason."""

    def __init__(self, path: Path, why: str):
        self.why = printable(why, limit=WHY_LIMIT)
        super().__init__(f"{printable(path, limit=PATH_LIMIT)}: {self.why}")


@dataclass(frozen=True, slots=True)
class Problem:
    """A file of a dump that was left out, and the reason."""

    path: Path
    why: str

    def __str__(self) -> str:
        """Return the problem as one line of text, with control characters escaped."""
        return f"{printable(self.path, limit=PATH_LIMIT)}: {printable(self.why, limit=WHY_LIMIT)}"


def read_tensor(path: Path) -> tuple[Tensor, dict[str, Any] | None]:
    """Return the memory-mapped tensor in a file, and its metadata (None if missing).

    Raises:
        UnreadableTensorError: if the file does not contain a supported tensor that can be read
            without running code, or its metadata has a different dtype.
    """
    payload = read_payload(path)
    metadata = None
    if isinstance(payload, dict):
        metadata = payload.get("metadata")
        payload = payload.get("tensor")
    if not isinstance(payload, Tensor):
        why = 'holds no tensor (expected {"tensor": ..., "metadata": ...})'
        raise UnreadableTensorError(path, why)
    if why := _unusable(payload):
        raise UnreadableTensorError(path, why)
    metadata = metadata if isinstance(metadata, dict) and metadata else None
    dtype = str(payload.dtype).removeprefix("torch.")
    recorded = dtype if metadata is None else metadata.get("dtype", dtype)
    if isinstance(recorded, str) and recorded != dtype:
        why = f"holds {dtype}, but the dtype in its record is {printable(recorded)}"
        raise UnreadableTensorError(path, why)
    return payload.detach(), metadata


def _unusable(tensor: Tensor) -> str:
    """Return the reason why a tensor is refused, or "" if it is accepted."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        return f"does not hold a plain dense tensor (but a {type(tensor).__name__})"
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        return f"does not hold a plain dense tensor ({tensor.layout}, {tensor.dtype})"
    if tensor.is_neg() or tensor.is_conj():
        return "holds a negated or conjugated view; save a copy (resolve_neg, resolve_conj)"
    if tensor.is_complex():
        return f"holds complex values ({tensor.dtype}), which have no order and are not supported"
    if tensor.dtype not in DTYPES:
        return f"holds values of {tensor.dtype}, which is not supported"
    if tensor.dim() > DIMENSIONS:
        return f"holds a tensor of {tensor.dim()} dimensions; at most {DIMENSIONS} are read"
    if not tensor.numel():
        sizes = math.prod(max(size, 1) for size in tensor.shape)
        shape = list(tensor.shape)
        return "" if sizes <= EMPTY_SIZES else f"has no values, but a shape of {shape}"
    stored = tensor.untyped_storage().nbytes() // tensor.element_size()
    if tensor.numel() > stored:
        return f"claims {tensor.numel()} values ({list(tensor.shape)}), but stores {stored}"
    return ""


def read_payload(path: Path) -> Any:
    """Return the object in a file written by torch.save, with its tensors memory-mapped.

    Raises:
        UnreadableTensorError: if the file cannot be read without running code.
    """
    try:
        check_archive(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except UnusableFileError as error:
        raise UnreadableTensorError(path, error.why) from None
    except ArchiveError as error:
        raise UnreadableTensorError(path, str(error)) from None
    except UnicodeEncodeError:
        why = "its path is not valid UTF-8, and torch cannot open such a file; rename it"
        raise UnreadableTensorError(path, why) from None
    except Exception as error:  # a damaged archive or pickle can raise almost any exception
        why = reason(error)
        prefix = "" if isinstance(error, OSError) else "corrupt or truncated: "
        raise UnreadableTensorError(path, prefix + why) from None


#: Expected types of the run card fields that are used; each field may be missing or null.
_CARD = {
    "arguments": dict,
    "quantization": list,
    "ranks": list,
    "status": str,
    "iterations": int,
}
#: Expected types of the items in run card fields that are lists.
_PARTS = {"quantization": dict, "ranks": dict}


def read_run_card(path: Path) -> dict[str, Any]:
    """Return the content of a run card (JSON file that describes a run) in printable form.

    Raises:
        ValueError: if the file cannot be read or is not a run card.
    """
    try:
        card = read_json(path)
    except UnusableFileError as error:
        raise ValueError(f"the run card cannot be read ({error.why})") from None
    except OSError as error:
        raise ValueError(f"the run card cannot be read ({reason(error)})") from None
    if not isinstance(card, dict):
        raise ValueError(f"not a run card: it holds a JSON {type(card).__name__}, not an object")
    for name, kind in _CARD.items():
        value = card.get(name)
        if value is not None and type(value) is not kind:
            actual = type(value).__name__
            raise ValueError(f"not a run card: {name} has type {actual}, not {kind.__name__}")
    for name, kind in _PARTS.items():
        if wrong := [part for part in card.get(name) or [] if type(part) is not kind]:
            actual = type(wrong[0]).__name__
            raise ValueError(f"not a run card: {name} holds a {actual}, not a {kind.__name__}")
    escaped: dict[str, Any] = in_printable_form(card)
    return escaped


def in_printable_form(value: Any) -> Any:
    """Return a copy of a JSON value in which every string is on one line and safe to print.

    Strings of run cards and index events appear in logs, figures and pages. Escaping them once,
    when they are read, makes them safe everywhere.
    """
    if isinstance(value, str):
        return (
            value
            if value.isprintable() and len(value) <= TEXT_LIMIT
            else printable(value, limit=TEXT_LIMIT)
        )
    if isinstance(value, Mapping):
        return {in_printable_form(name): in_printable_form(part) for name, part in value.items()}
    return [in_printable_form(part) for part in value] if isinstance(value, list) else value


def reason(error: Exception) -> str:
    """Return the first line of an exception's message, in printable form."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error).strip()
    return printable(text.splitlines()[0] if text else type(error).__name__, limit=WHY_LIMIT)
