"""Check untrusted `torch.save` archives before torch opens them.

With `weights_only=True`, torch runs no code from the file, but it trusts the sizes in the file. For
example, torch allocates a terabyte if a compressed member, a storage or a bytearray claims this
size. It also accepts a tensor with a million rows that stores a single number. The archive must
therefore be uncompressed, its pickle may name only classes and functions that checkpoints need, and
the file must contain the bytes of every tensor.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from typing import IO, Any

import numpy as np
import torch

from megatron.training.checkpointing import plain_pickle
from megatron.training.checkpointing.plain_pickle import Global, Record, UnsafePickleError

#: maximum size of an archive's pickle, in bytes; the tensors' values are stored outside the pickle
PICKLE_LIMIT = 1 << 26
_REBUILD = "torch._utils._rebuild_tensor_v2"
#: size of one element in bytes, by the name of torch's storage class
_STORAGES = {
    "torch.DoubleStorage": 8,
    "torch.FloatStorage": 4,
    "torch.HalfStorage": 2,
    "torch.BFloat16Storage": 2,
    "torch.LongStorage": 8,
    "torch.IntStorage": 4,
    "torch.ShortStorage": 2,
    "torch.CharStorage": 1,
    "torch.ByteStorage": 1,
    "torch.BoolStorage": 1,
}
#: names of the function that rebuilds an array from a pickle, in NumPy 2 and in NumPy 1
_ARRAY = ("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct")
_PLAIN = {
    _REBUILD,
    *_STORAGES,
    *_ARRAY,
    "numpy.ndarray",
    "numpy.dtype",
    "_codecs.encode",
    "collections.OrderedDict",
    "torch.Size",
    "torch.device",
}
_DTYPE = re.compile(r"torch\.(u?int\d+|b?float\d+\w*|bool)")
_ARRAY_DTYPE = re.compile(r"[iuf][1248]|b1")


def load(content: bytes) -> Any:
    """Return the object in an archive written by `torch.save`, with tensors on the CPU.

    Raises:
        ValueError: if the content is not such an archive, is damaged, or contains anything other
            than plain values, tensors and NumPy arrays of numbers.
    """
    stream = io.BytesIO(content)
    check(stream)
    stream.seek(0)
    rebuild_array = np.empty(0).__reduce__()[0]
    functions = [(rebuild_array, name) for name in _ARRAY]
    types = [np.ndarray, np.dtype, *_classes_of_dtypes()]
    try:
        with torch.serialization.safe_globals([*functions, *types]):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except torch.OutOfMemoryError:
        raise
    except pickle.UnpicklingError:  # torch's own message advises disabling weights_only
        raise ValueError("its pickle is not as torch.save writes it") from None
    except Exception as error:  # a damaged archive can raise almost any exception
        why = str(error).partition("\n")[0] or type(error).__name__
        raise ValueError(f"torch cannot read it: {why}") from None


def check(stream: IO[bytes]) -> None:
    """Check that an archive is safe for torch to open.

    Raises:
        ValueError: if the archive is damaged or unsafe; the message gives the reason.
    """
    size = stream.seek(0, io.SEEK_END)
    try:
        with zipfile.ZipFile(stream) as archive:
            members = _members(archive, size)
            (name,) = [n for n in members if n.endswith("/data.pkl") and n.count("/") == 1]
            if members[name] > PICKLE_LIMIT:
                raise ValueError(f"its pickle is larger than {PICKLE_LIMIT >> 20} MiB")
            data = archive.read(name)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, OverflowError) as error:
        raise ValueError(f"it is not intact, or torch.save did not write it ({error})") from None
    storages = {n: count for n, count in members.items() if n.split("/")[1:-1] == ["data"]}
    _check_objects(plain_pickle.parse(data, known=_is_known), storages)


def _is_known(name: str) -> bool:
    return name in _PLAIN or _DTYPE.fullmatch(name) is not None


def _classes_of_dtypes() -> list[type]:
    """Return NumPy's numeric dtype classes, which torch loads only if explicitly allowed."""
    codes = "i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 b1"
    return [type(np.dtype(code)) for code in codes.split()]


def _members(archive: zipfile.ZipFile, size: int) -> dict[str, int]:
    """Return the size in bytes of each member of a zip archive, by the member's name.

    Raises:
        ValueError: if a member is compressed or encrypted, if two members have the same name, if
            the sizes add up to more than the size of the file, or if there is not exactly one
            pickle.
    """
    sizes: dict[str, int] = {}
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise ValueError("it has compressed or encrypted parts, which torch.save never writes")
        if member.filename in sizes:
            raise ValueError("two of its parts have the same name")
        sizes[member.filename] = member.file_size
    if sum(sizes.values()) > size:
        raise ValueError("its parts claim to be larger than the file")
    if sum(name.endswith("/data.pkl") and name.count("/") == 1 for name in sizes) != 1:
        raise ValueError("it has no pickle or more than one: torch.save did not write it")
    return sizes


def _check_objects(root: Any, storages: dict[str, int]) -> None:
    """Check that a parsed pickle constructs every object in the way that torch or NumPy does.

    An object that is referenced several times is checked once.

    Raises:
        ValueError: if an object is constructed differently.
    """
    prefix = next(iter(storages), "archive/data/0").partition("/")[0]
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if not isinstance(item, (Record, list, tuple, dict)) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Record):
            if item.kind == _REBUILD:
                _check_tensor(item.arguments, prefix, storages)
            else:
                _check_record(item)
            waiting += [item.arguments, item.state]
        elif isinstance(item, dict):
            waiting += [*item, *item.values()]
        else:
            waiting += item


def _check_record(record: Record) -> None:
    arguments = record.arguments
    match record.kind:
        case plain_pickle.PERSISTENT:
            well = len(arguments) == 5 and arguments[0] == "storage"
        case "_codecs.encode":
            well = len(arguments) == 2 and all(isinstance(a, str) for a in arguments)
            well = well and arguments[1] == "latin1"
        case "numpy.dtype":
            well = bool(arguments) and isinstance(arguments[0], str)
            well = well and _ARRAY_DTYPE.fullmatch(arguments[0]) is not None
        case "collections.OrderedDict":
            well = arguments == ()
        case "torch.Size" | "torch.device":
            well = len(arguments) <= 2
        case kind if kind in _ARRAY:
            well = len(arguments) == 3 and arguments[0] == Global("numpy.ndarray")
            well = well and arguments[1] == (0,)
        case _:
            well = False
    if not well:
        raise UnsafePickleError(f"it builds a {record.kind} in a way that no checkpoint does")


def _check_tensor(arguments: tuple[Any, ...], prefix: str, storages: dict[str, int]) -> None:
    """Check that a tensor's storage is in the file and is large enough for the tensor.

    Raises:
        ValueError: if the storage is missing or too small.
    """
    try:
        storage, _, shape, stride, *_ = arguments
        _, kind, key, _, count = storage.arguments
        stored = storages[f"{prefix}/data/{key}"]
        width = _STORAGES[kind.name]
        well = len(shape) == len(stride) <= 64 and all(type(n) is int and n >= 0 for n in shape)
        well = well and type(count) is int and 0 <= count * width <= stored
        well = well and math.prod(shape) <= count
    except (AttributeError, KeyError, TypeError, ValueError):
        well = False
    if not well:
        raise ValueError("it has a tensor that is larger than its stored values")
