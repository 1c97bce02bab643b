"""Write records to disk so that neither a crash nor another run can damage them.

A tensor is written under a temporary name and then hard-linked to its final name. A reader
therefore never sees half a file, and a link, unlike a rename, never replaces an existing file. The
index line is written after the file, so every line has its file. Each rank has an index of its own,
so lines of different ranks never interleave. If another run has already used a file's name, which
contains the time in seconds, the file gets the name of the next second.
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
    """Create `directory` and write one byte to it.

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
    """A run card, which is written when the run begins and replaced when it ends.

    Between the two, a file of zeros reserves space for the final card, so that a run whose disk is
    full can still report it there.
    """

    ROOM = 64 << 10  #: bytes that are reserved

    def __init__(self, path: Path):
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)

    def write(self, content: dict[str, Any], *, last: bool) -> None:
        """Replace the card with `content` atomically.

        Raises:
            OSError: if the file system refuses; the card is then unchanged.
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
            with contextlib.suppress(OSError):  # the first write of a tensor reports a full disk
                self._partial.write_bytes(bytes(self.ROOM))


class _Counted:
    """A file that counts its bytes and stores the file system's error.

    torch's writer replaces that error with one of its own. Without a file, it only counts.
    """

    def __init__(self, file: DirectFile | None):
        self.bytes = 0
        self.error: OSError | None = None
        self._file = file

    def write(self, data: bytes) -> int:
        """Write all of `data`."""
        try:
            if self._file is not None:
                self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.bytes += len(data)
        return len(data)

    def flush(self) -> None:
        """Do nothing: `write` passes everything on at once."""


def serialize(
    tensor: torch.Tensor,
    record: TensorRecord,
    scales: dict[str, torch.Tensor],
    file: DirectFile | None = None,
) -> int:
    """Write the content of a `.pt` file, or only compute its size if there is no file.

    Returns:
        The size in bytes.

    Raises:
        OSError: if the file system refuses.
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
    """The writer of one rank into one folder. The first line creates the index."""

    def __init__(self, directory: Path, run_id: str, rank: int):
        self.directory = directory
        self.run_id = run_id
        self.records = 0
        self.bytes = 0
        self.latest = -math.inf  #: when the file system last accepted bytes; monotonic
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
        """Store one tensor on the CPU and its index line.

        Args:
            tensor: a contiguous tensor that fills its storage, as do the scales.
            record: metadata of the tensor.
            index: lock that is held while the index is written, for several threads.
            scales: scales of codes, by name; empty for other tensors.

        Raises:
            OSError, RuntimeError: if the file system or torch's writer fails; no partial file is
                left.
        """
        while True:
            try:
                size = self._write_file(tensor, record, scales)
                break
            except FileExistsError:  # another run in this folder, started in the same second
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
        """Write one file, give it its final name and return its size."""
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
        """Add a line to the index, as a whole or not at all.

        Raises:
            OSError: if the file system refuses.
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
        """Give the finished file its final name.

        Raises:
            FileExistsError: if another run has already used the name.
        """
        path = self.directory / record.filename
        try:
            os.link(partial, path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: check, then rename
            if path.exists():
                raise FileExistsError(f"{path} exists already") from None
            partial.rename(path)

    def write_run_card(self, card: dict[str, Any], *, last: bool) -> None:
        """Write the run card, or replace it with the last one."""
        self._card.write(card, last=last)

    def close(self) -> None:
        """Close the index."""
        if self._index is not None:
            self._index.close()


def _a_second_later(timestamp: str) -> str:
    moved = datetime.datetime.strptime(timestamp, TIMESTAMP) + datetime.timedelta(seconds=1)
    return moved.strftime(TIMESTAMP)
