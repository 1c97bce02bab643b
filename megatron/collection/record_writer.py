"""Write tensor records to disk so that neither a crash nor another run can damage them.

A file is written under a temporary name and then hard-linked to its final name. A reader therefore
never sees an incomplete file, and a link, unlike a rename, never replaces an existing file. The
index line is written after the file, so every line refers to an existing file. Each rank has its
own index, so lines of different ranks never interleave. File names contain the time in seconds; if
another run has already used a name, the next second is used instead.
"""

import contextlib
import datetime
import json
import math
import os
import tempfile
import time
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from megatron.collection.direct_io import DirectFile
from megatron.tensor_record import (
    PARTIAL_SUFFIX,
    TIMESTAMP,
    TensorRecord,
    index_name,
    run_card_name,
)


def check_writable(directory: Path) -> None:
    """Create `directory` if needed, and check that files can be written there.

    Raises:
        ValueError: if that fails; the message says why and what to do.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0")
    except OSError as error:
        is_file = isinstance(error, FileExistsError)
        why = "it is a file" if is_file else error.strerror or error
        raise ValueError(
            f"cannot write to the tensor folder {directory}: {why}; "
            "name another one with --tensor-save-dir, or change its permissions"
        ) from None


class CardFile:
    """Run-card file, which is written when a run begins and replaced when the run ends.

    Meanwhile, a file of zeros reserves space for the final card, so that the card can report a full
    disk.
    """

    ROOM = 64 << 10  #: disk space reserved for the final run card, in bytes

    def __init__(self, path: Path):
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)

    def write(self, content: dict[str, Any], *, last: bool) -> None:
        """Replace the run card atomically.

        Args:
            content: new content of the card.
            last: whether this is the final card; otherwise space is reserved for the next one.

        Raises:
            OSError: if writing fails; the card is then unchanged.
        """
        text = json.dumps(content, indent=2, default=str) + "\n"
        try:
            with self._partial.open("r+b" if self._partial.exists() else "wb") as file:
                file.write(text.encode())
                file.truncate()
            self._partial.replace(self._path)
        except BaseException:
            with contextlib.suppress(OSError):  # only the first error is reported
                self._partial.unlink(missing_ok=True)
            raise
        if not last:
            # if the disk is full, the error is reported when the first tensor is written
            with contextlib.suppress(OSError):
                self._partial.write_bytes(bytes(self.ROOM))


class _Counted:
    """File wrapper that counts the bytes written and keeps the error that the file system raises.

    The error is kept because torch's writer replaces it with its own. Without a file, the wrapper
    only counts.
    """

    def __init__(self, file: DirectFile | None):
        self.bytes = 0
        self.error: OSError | None = None
        self._file = file

    def write(self, data: bytes) -> int:
        """Count the bytes of `data`, and write them to the file if there is one."""
        try:
            if self._file is not None:
                self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing, because `write` does not buffer."""


def serialize(
    tensor: torch.Tensor,
    record: TensorRecord,
    scales: dict[str, torch.Tensor],
    file: DirectFile | None = None,
) -> int:
    """Write a tensor and its metadata to a `.pt` file; if `file` is None, only compute the size.

    Returns:
        Size of the content in bytes.

    Raises:
        OSError: if writing fails.
    """
    counted = _Counted(file)
    try:
        content = {"tensor": tensor, "metadata": record.to_metadata()}
        torch.save(content | ({"scales": scales} if scales else {}), counted)
    except RuntimeError:
        if counted.error is not None:
            raise counted.error from None
        raise
    return counted.bytes


class RecordWriter:
    """Writer that stores one rank's records in a folder, and lists them in an index file."""

    def __init__(self, directory: Path, run_id: str, rank: int):
        self.directory = directory
        self.run_id = run_id
        self.records = 0
        self.bytes = 0
        self.latest = -math.inf  #: monotonic time at which the file system last accepted data
        self._index_path = directory / index_name(run_id, rank)
        self._index: FileIO | None = None
        self._card = CardFile(directory / run_card_name(run_id))

    def write(
        self,
        tensor: torch.Tensor,
        record: TensorRecord,
        index: contextlib.AbstractContextManager,
        scales: dict[str, torch.Tensor],
    ) -> None:
        """Write a CPU tensor to a file, then append a line about the file to the index.

        Args:
            tensor: a contiguous tensor that fills its storage, as each of the scales must.
            record: metadata of the tensor.
            index: lock to hold while the index line is written, because several threads write.
            scales: scales of quantized codes, by name; empty for other tensors.

        Raises:
            OSError, RuntimeError: if the file system or torch's writer fails; no partial file is
                left behind.
        """
        while True:
            try:
                size = self._write_file(tensor, record, scales)
                break
            except FileExistsError:  # another run already uses the name in this folder
                record = replace(record, timestamp=_a_second_later(record.timestamp))
        line = record.to_metadata() | {"file": record.filename, "bytes": size}
        with index:
            try:
                self.append(line)
            except OSError:
                (self.directory / record.filename).unlink(missing_ok=True)
                raise
            self.records += 1
            self.bytes += size

    def _write_file(
        self, tensor: torch.Tensor, record: TensorRecord, scales: dict[str, torch.Tensor]
    ) -> int:
        """Write one file under a temporary name, publish it, and return its size in bytes."""
        partial = self.directory / f"{record.filename}.{self.run_id}{PARTIAL_SUFFIX}"
        try:
            with DirectFile(partial, self._has_taken) as file:
                size = serialize(tensor, record, scales, file)
            self._publish(partial, record)
        finally:
            with contextlib.suppress(OSError):  # only the first error is reported
                partial.unlink(missing_ok=True)
        return size

    def _has_taken(self) -> None:
        self.latest = time.monotonic()

    def append(self, line: dict[str, Any]) -> None:
        """Append `line` to the index file, either completely or not at all.

        Raises:
            OSError: if writing fails.
        """
        if self._index is None:
            self._index = self._index_path.open("ab", buffering=0)
        end, rest = self._index.tell(), (json.dumps(line) + "\n").encode()
        try:
            while rest:
                rest = rest[self._index.write(rest) :]
        except OSError:
            self._index.truncate(end)
            self._index.seek(end)
            raise

    def _publish(self, partial: Path, record: TensorRecord) -> None:
        """Hard-link a complete file to its final name, or rename it if links are not supported.

        Raises:
            FileExistsError: if another run has already used the name.
        """
        path = self.directory / record.filename
        try:
            os.link(partial, path)
        except FileExistsError:
            raise
        except OSError:  # the file system has no hard links
            if path.exists():
                raise FileExistsError(f"{path} exists already") from None
            partial.rename(path)

    def write_run_card(self, card: dict[str, Any], *, last: bool) -> None:
        """Write the run card or replace the existing one; `last` marks the final card."""
        self._card.write(card, last=last)

    def close(self) -> None:
        """Close the index file."""
        if self._index is not None:
            self._index.close()


def _a_second_later(timestamp: str) -> str:
    moved = datetime.datetime.strptime(timestamp, TIMESTAMP) + datetime.timedelta(seconds=1)
    return moved.strftime(TIMESTAMP)
