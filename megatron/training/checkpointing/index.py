"""Read and check a checkpoint's index, `.metadata`, which maps each part of a tensor to its file.

torch unpickles the index, and imports any module that it names. This module instead parses it as
data, checks its numbers against the files, and creates only the objects that an index needs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.bounded_files import UnusableFileError, check_regular, printable, read_bytes
from megatron.training.checkpointing import plain_pickle
from megatron.training.checkpointing.files import INDEX
from megatron.training.checkpointing.plain_pickle import Global, Record

#: maximum size of an index file, in bytes; 10,000 tensors on 1,000 ranks take a tenth of this
INDEX_LIMIT = 1 << 30
DIMENSIONS = 64  #: maximum number of dimensions of a tensor, as in torch
_LARGEST = (1 << 63) - 1
_CLASSES = "torch.distributed.checkpoint."
#: pattern of the class and function names that an index may contain, including placeholders of
#: older versions of megatron-core
_KNOWN = re.compile(
    r"torch\.distributed\.checkpoint\.(metadata|filesystem|planner)\.\w+|torch\.Size"
    r"|torch\.(u?int\d+|b?float\d+\w*|bool|complex\d+)|torch\.serialization\._get_layout"
    r"|torch\.distributed\._shard\.\w+(\.\w+)*|pathlib\.(_local\.)?\w*Path"
    r"|megatron\.core\.dist_checkpointing\.strategies\.torch\.MCore\w+"
    rf"|collections\.(OrderedDict|defaultdict)|builtins\.list|{re.escape(plain_pickle.GETATTR)}"
)


class DamagedError(ValueError):
    """Error raised for a checkpoint file that cannot be used; the message names the file.

    Its constructor takes a single argument, because ranks pickle this error to send it to each
    other.
    """


def read_index(folder: Path) -> Metadata:
    """Return the index of a checkpoint after comparing it with the checkpoint's files.

    All files must exist and be at least as long as the index states.

    Raises:
        DamagedError: if a file cannot be used; the message names the file and the reason.
    """
    path = folder / INDEX
    try:
        data = read_bytes(path, limit=INDEX_LIMIT)
        index = _index(plain_pickle.parse(data, known=lambda n: _KNOWN.fullmatch(n) is not None))
    except FileNotFoundError:
        raise DamagedError(f"{path} does not exist") from None
    except UnusableFileError as error:
        raise DamagedError(str(error)) from None
    except ValueError as error:
        raise DamagedError(f"{path}: {printable(error, limit=300)}") from None
    _check_files(folder, index)
    return index


def _index(content: Any) -> Metadata:
    state = _state(content, "metadata.Metadata")
    tensors, stored = state.get("state_dict_metadata"), state.get("storage_data")
    if type(tensors) is not dict or type(stored) is not dict:
        raise ValueError("it has no list of tensors, or no list of where they are stored")
    if not all(isinstance(name, str) for name in tensors):
        raise ValueError("the name of a tensor is not a string")
    index = Metadata(
        {name: _entry(name, entry) for name, entry in tensors.items()},
        storage_data=dict(_place(key, place) for key, place in stored.items()),
        storage_meta=StorageMeta(),
    )
    if hasattr(index, "version") and isinstance(state.get("version"), str):  # not in torch 2.6
        index.version = state["version"]
    for name, entry in index.state_dict_metadata.items():
        for key in _expected(name, entry):
            if key not in index.storage_data:
                raise ValueError(f"it does not state which file holds {name}")
    return index


def _expected(name: str, entry: TensorStorageMetadata | BytesStorageMetadata) -> Iterator[Any]:
    if isinstance(entry, BytesStorageMetadata):
        yield MetadataIndex(name)
    else:
        for chunk in entry.chunks:
            yield MetadataIndex(name, chunk.offsets)


def _state(item: Any, kind: str) -> dict[str, Any]:
    """Return the fields of `item`, which must represent an object of class `kind`.

    Raises:
        ValueError: if the object is of another class or has no fields.
    """
    if not isinstance(item, Record) or item.kind != _CLASSES + kind:
        raise ValueError(f"it has {_described(item)} in place of a {kind.partition('.')[2]}")
    state = {} if item.state is None else item.state
    if item.arguments or type(state) is not dict or not all(isinstance(n, str) for n in state):
        raise ValueError(f"a {kind.partition('.')[2]} in it has no fields")
    return state


def _described(item: Any) -> str:
    kind = item.kind if isinstance(item, Record) else type(item).__name__
    return f"a value of type {kind}"


def _entry(name: str, item: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(item, Record) and item.kind == _CLASSES + "metadata.BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _state(item, "metadata.TensorStorageMetadata")
    size, chunks = _size(state.get("size")), state.get("chunks")
    if type(chunks) is not list:
        raise ValueError(f"it lists no parts for {name}")
    parts = [_chunk(name, chunk, size) for chunk in chunks]
    if len({part.offsets for part in parts}) != len(parts):
        raise ValueError(f"it lists a part of {name} twice")
    if sum(math.prod(part.sizes) for part in parts) != math.prod(size):
        raise ValueError(f"the parts of {name} do not add up to its shape {tuple(size)}")
    return TensorStorageMetadata(_properties(name, state.get("properties")), size, parts)


def _chunk(name: str, item: Any, size: torch.Size) -> ChunkStorageMetadata:
    state = _state(item, "metadata.ChunkStorageMetadata")
    offsets, sizes = _size(state.get("offsets")), _size(state.get("sizes"))
    fits = len(offsets) == len(sizes) == len(size)
    if not fits or any(o + s > n for o, s, n in zip(offsets, sizes, size, strict=True)):
        raise ValueError(f"a part of {name} lies outside its shape {tuple(size)}")
    return ChunkStorageMetadata(offsets, sizes)


def _properties(name: str, item: Any) -> TensorProperties:
    """Return the properties of a tensor, with only the dtype set.

    The other properties are deprecated, and torch does not read them.
    """
    if not isinstance(item, Record) or item.kind != _CLASSES + "metadata.TensorProperties":
        raise ValueError(f"it has no properties for {name}")
    kind = item.state[0] if type(item.state) is tuple and item.state else None
    dtype = getattr(torch, kind.name.removeprefix("torch."), None) if type(kind) is Global else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"it has no dtype for {name}")
    return TensorProperties(dtype=dtype)


def _size(item: Any) -> torch.Size:
    if not isinstance(item, Record) or item.kind != "torch.Size" or len(item.arguments) != 1:
        raise ValueError(f"it has {_described(item)} in place of a shape")
    (numbers,) = item.arguments
    if type(numbers) is not tuple or len(numbers) > DIMENSIONS or not all(map(_counts, numbers)):
        raise ValueError("it has an invalid shape")
    return torch.Size(numbers)


def _counts(number: Any) -> bool:
    return type(number) is int and 0 <= number <= _LARGEST


def _place(key: Any, place: Any) -> tuple[MetadataIndex, _StorageInfo]:
    """Return the key of a stored tensor part or object, and its byte range in a file."""
    named = _state(key, "metadata.MetadataIndex")
    name, offset = named.get("fqn"), named.get("offset")
    state = _state(place, "filesystem._StorageInfo")
    file, start, length = (state.get(n) for n in ("relative_path", "offset", "length"))
    if not isinstance(name, str) or not isinstance(file, str):
        raise ValueError("a storage entry lacks a name or a file")
    if not _counts(start) or not _counts(length):
        raise ValueError(f"the storage entry of {name} is not a range of bytes")
    if state.get("transform_descriptors"):
        raise ValueError(f"{name} is compressed or encoded, which cannot be read")
    if Path(file).name != file or file in ("", ".", ".."):
        raise ValueError(f"it names the file {file!r} outside the checkpoint")
    index = MetadataIndex(name, None if offset is None else _size(offset))
    return index, _StorageInfo(file, start, length)


def _check_files(folder: Path, index: Metadata) -> None:
    """Check that a checkpoint's files exist, are regular, and are long enough for its index.

    Raises:
        DamagedError: if a file fails the check; the message names the file and the reason.
    """
    ends: dict[str, int] = {}
    for place in index.storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(end, ends.get(place.relative_path, 0))
    for name, end in ends.items():
        path = folder / name
        try:
            size = check_regular(path).st_size
        except FileNotFoundError:
            raise DamagedError(f"{printable(path, limit=1000)} does not exist") from None
        except UnusableFileError as error:
            raise DamagedError(str(error)) from None
        if size < end:
            raise DamagedError(f"{path} has {size} bytes, but {INDEX} requires at least {end}")
