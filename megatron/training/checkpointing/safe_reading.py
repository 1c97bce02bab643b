"""Replacements for the parts of megatron-core's checkpoint reader that let a file run code.

    file            in megatron-core                   here
    .metadata       torch unpickles it                 read by `index`
    *.distcp        torch unpickles random states      checked and read by `checked_archive`
    common.pt       torch unpickles it if an           read by `common_state`
                    environment variable requests it

At each load, megatron-core looks up the reader, the planner and, since 0.17, the function that
reads common.pt in its own modules. Importing this module replaces them there, so that all
checkpoints in this process are read safely.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from megatron.bounded_files import printable
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common as common_strategies
from megatron.core.dist_checkpointing.strategies import torch as wheel
from megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from megatron.training.checkpointing import checked_archive
from megatron.training.checkpointing.common_state import read_common
from megatron.training.checkpointing.index import DamagedError, read_index


def load(state: dict[str, Any], folder: str | Path) -> dict[str, Any]:
    """Return the content of a checkpoint: the parts that `state` describes, and `common.pt`."""
    if _READS_COMMON_BY_STRATEGY:
        strategy = common_strategies.TorchCommonLoadStrategy()
        strategy.load_common = read_common
        return dist_checkpointing.load(state, str(folder), common_strategy=strategy)
    return dist_checkpointing.load(state, str(folder))


class Window(io.RawIOBase):
    """A file object for a byte range of another file.

    Unlike the corresponding class in torch, it can seek relative to the end of the range.
    """

    def __init__(self, file: IO[bytes], start: int, length: int):
        self._file, self._start, self._length = file, start, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("cannot seek to a position before the start")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._length - self._position))
        self._file.seek(self._start + self._position)
        content = self._file.read(count)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class Reader(CachedMetadataFileSystemReader):
    """A subclass of megatron-core's file reader that checks all data before torch opens it."""

    _index: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """Return the checkpoint's index, which is read once and then cached."""
        if self._index is None:
            index = read_index(Path(self.path))
            meta = dataclasses.replace(index.storage_meta, load_id=self.load_id)
            self._index = dataclasses.replace(index, storage_meta=meta)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors and objects that a load plan requests.

        Raises:
            DamagedError: if the content of a file does not match the index; the message names the
                file.
        """
        self._file: Path = Path(self.path)
        try:
            return super().read_data(plan, planner)
        except (DamagedError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # unexpected content can raise almost any exception
            why = printable(error, limit=300) or type(error).__name__
            raise DamagedError(f"{self._file} does not match its index: {why}") from None

    def _slice_file(self, file: Any, sinfo: _StorageInfo) -> IO[bytes]:
        self._file = Path(self.path, sinfo.relative_path)
        try:
            checked_archive.check(Window(file, sinfo.offset, sinfo.length))
        except ValueError as error:
            where = f"{self._file} at byte {sinfo.offset}"
            raise DamagedError(f"{where}: {printable(error, limit=300)}") from None
        return super()._slice_file(file, sinfo)


class Planner(wheel.MCoreLoadPlanner):
    """A subclass of megatron-core's load planner that checks each object before unpickling it."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle an object safely and store it in the state dictionary.

        The object is the random states of a rank or the extra state of a layer.

        Raises:
            DamagedError: if the object is unsafe or does not have the expected form.
        """
        name = read_item.dest_index.fqn
        try:
            objects = checked_archive.load(value.getvalue())
        except ValueError as error:
            raise DamagedError(f"{name}: {printable(error, limit=300)}") from None
        if not isinstance(objects, list) or len(objects) != 1:
            raise DamagedError(
                f"{name} has type {type(objects).__name__}, not a list with one object"
            )
        if "_extra_state" in name and _holds_bytes(objects):
            raise DamagedError(
                f"{name} is the state of a Transformer Engine FP8 layer, which is a pickle that "
                "can run code"
            )
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], objects)
        else:
            self.state_dict[name] = objects


def _holds_bytes(objects: list[Any]) -> bool:
    """Return whether a layer's extra state contains data, which Transformer Engine would unpickle.

    Without FP8, the extra state is empty.
    """
    return any(not (i is None or (isinstance(i, torch.Tensor) and not i.numel())) for i in objects)


def _reader(folder: str | Path, **options: Any) -> Reader:
    """Return a `Reader` for `folder`; `options` (caching and asynchronous saves) are ignored."""
    return Reader(folder)


#: True for megatron-core 0.16, which reads common.pt with an object that `load` receives
_READS_COMMON_BY_STRATEGY = hasattr(common_strategies, "TorchCommonLoadStrategy")
wheel._get_filesystem_reader = _reader
wheel.MCoreLoadPlanner = Planner
for _name, _replacement in (("load_common", read_common), ("_get_filesystem_reader", _reader)):
    if hasattr(serialization, _name):
        setattr(serialization, _name, _replacement)
