"""Puts records on disk so that neither a crash nor another run can spoil them.

A tensor is written under a temporary name and then linked to its own: a reader never sees half a
file, and a link, unlike a rename, refuses to replace a file that is already there. The index line
follows the file: no line without its file. One index a rank, so that lines of different ranks never
interleave. Where another run holds a file's name, which has a second in it, ours gets the next one.
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
    """Make `directory` and write one byte to it.

    Raises:
        ValueError: it cannot be made or written; the message says why and what to do.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"\0")
    except OSError as error:
        there = isinstance(error, FileExistsError)  # and it is no folder
        why = "it is a file" if there else error.strerror or error
        raise ValueError(
            f"cannot write to the tensor folder {directory}: {why}; "
            "name another one with --tensor-save-dir, or change its permissions"
        ) from None


class CardFile:
    """A run card, which is written when the run begins and replaced when it ends.

    Between the two, a file of zeros keeps room for the last one: a run whose disk is full must be
    able to say so there.
    """

    ROOM = 64 << 10  #: bytes

    def __init__(self, path: Path):
        self._path = path
        self._partial = path.with_name(path.name + PARTIAL_SUFFIX)

    def write(self, content: dict[str, Any], *, last: bool) -> None:
        """Put `content` in the card's place, at once.

        Raises:
            OSError: the file system refused; the card is as it was.
        """
        text = json.dumps(content, indent=2, default=str) + "\n"
        try:
            with self._partial.open("r+b" if self._partial.exists() else "wb") as file:
                file.write(text.encode())
                file.truncate()
            self._partial.replace(self._path)
        except BaseException:
            with contextlib.suppress(OSError):  # of what went wrong, the first is told
                self._partial.unlink(missing_ok=True)
            raise
        if not last:
            with contextlib.suppress(OSError):  # what is written first will say so
                self._partial.write_bytes(bytes(self.ROOM))


class _Counted:
    """A file that counts what is written, and remembers the file system's error, which torch's
    writer hides behind one of its own; without a file it counts only.
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
        """Nothing is held back here."""


def serialize(
    tensor: torch.Tensor,
    record: TensorRecord,
    scales: dict[str, torch.Tensor],
    file: DirectFile | None = None,
) -> int:
    """Write the content of a `.pt` file; returns its size, which without a file is all that is
    done.

    Raises:
        OSError: the file system refused.
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
    """One rank's writer into one folder. The index is made with the first line."""

    def __init__(self, directory: Path, run_id: str, rank: int):
        self.directory = directory
        self.run_id = run_id
        self.records = 0
        self.bytes = 0
        self.latest = -math.inf  #: when the file system last took a part of a file; monotonic
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
            tensor: contiguous, and all of its storage, as are the scales.
            record: what is known of it.
            scales: of codes; else empty.
            index: held while the index is written to, where several threads write.

        Raises:
            OSError, RuntimeError: the file system or torch's writer failed; no partial file is
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
        """Write and publish one file; returns its size."""
        partial = self.directory / f"{record.filename}.{self.run_id}{PARTIAL_SUFFIX}"
        try:
            with DirectFile(partial, self._has_taken) as file:
                size = serialize(tensor, record, scales, file)
            self._publish(partial, record)
        finally:
            with contextlib.suppress(OSError):  # of what went wrong, the first is told
                partial.unlink(missing_ok=True)
        return size

    def _has_taken(self) -> None:
        self.latest = time.monotonic()

    def append(self, line: dict[str, Any]) -> None:
        """Add a line to the index, or nothing.

        Raises:
            OSError: the file system refused.
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
        """Give the finished file its name.

        Raises:
            FileExistsError: another run's file has it.
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
        """Write this run's card, or replace it by the last one."""
        self._card.write(card, last=last)

    def close(self) -> None:
        """Close the index."""
        if self._index is not None:
            self._index.close()


def _a_second_later(timestamp: str) -> str:
    moved = datetime.datetime.strptime(timestamp, TIMESTAMP) + datetime.timedelta(seconds=1)
    return moved.strftime(TIMESTAMP)
