"""Check that a `.pt` file is a plain archive of tensors before torch reads it.

`torch.load(weights_only=True)` does not run code from the file, but it unpacks compressed members
into memory and takes minutes for a pickle of millions of objects. It also builds kinds of tensors
that the analysis does not support (nested, sparse, quantized, and subclasses). When torch.save
writes one tensor, the archive is uncompressed and has a small pickle. Any other archive is refused
before torch reads it.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

import torch

from megatron.bounded_files import open_regular

#: Maximum size of the pickle, in bytes; a tensor and its metadata need about 2,000.
PICKLE_LIMIT = 1 << 20
MEMBER_LIMIT = 1000  #: maximum number of archive members; an archive with one tensor has 7
DIRECTORY_LIMIT = 1 << 20  #: maximum size of a zip archive's central directory, in bytes

#: Maximum distance, in bytes, from a zip archive's end record to the end of the file.
_TAIL = (1 << 16) + 22
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_FOREIGN = "not an archive of torch.save: corrupt, truncated, or written by another program"
_CODE = "it holds objects other than tensors and plain values; loading them could run code"
#: Names of classes and functions that may occur in the pickle of a dense tensor.
_PLAIN = frozenset(
    {
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "collections.OrderedDict",
        "torch.Size",
        "torch.device",
        "torch.storage.UntypedStorage",
        "torch.storage.TypedStorage",
    }
)
#: Prefixes of names that indicate another kind of tensor, unless the name is in _PLAIN.
_OTHER = (
    "torch._utils._rebuild",
    "torch._tensor._rebuild",
    "torch.serialization._get_layout",
    "torch.nested.",
    "torch.per_",
)


class ArchiveError(ValueError):
    """Error raised if an archive is refused; the message gives the reason but not the file name."""


def check_archive(path: Path) -> None:
    """Raise ArchiveError if a file is not a plain archive written by torch.save.

    Raises:
        ArchiveError: if the file is empty, damaged or not such an archive.
        FileNotFoundError: if the file does not exist.
        UnusableFileError: if the file is not a regular file or cannot be opened.
    """
    with open_regular(path) as file:
        size = file.seek(0, 2)
        if not size:
            raise ArchiveError("the file is empty")
        _check_directory(file, size)
        try:
            with zipfile.ZipFile(file) as archive:
                _check_members(archive.infolist(), size)
                pickled = _pickle_of(archive)
        except (
            zipfile.BadZipFile,
            struct.error,
            NotImplementedError,
            EOFError,
            KeyError,
            OSError,
            UnicodeError,
            RuntimeError,
        ):
            raise ArchiveError(_FOREIGN) from None
    _check_globals(pickled)


def _check_directory(file: BinaryIO, size: int) -> None:
    """Raise ArchiveError if the zip archive's directory is too large to be read into memory."""
    file.seek(max(size - _TAIL, 0))
    tail = file.read(_TAIL)
    at = tail.rfind(_END)
    if at < 0 or len(tail) < at + 22:
        raise ArchiveError(_FOREIGN)
    members, length = struct.unpack_from("<HI", tail, at + 10)
    if at >= 76 and tail[at - 20 : at - 16] == _LOCATOR64 and tail[at - 76 : at - 72] == _END64:
        members, length = struct.unpack_from("<QQ", tail, at - 76 + 32)
    if members > MEMBER_LIMIT or length > DIRECTORY_LIMIT:
        raise ArchiveError(
            f"an archive of {members} members; a file with one tensor has at most {MEMBER_LIMIT}"
        )


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ArchiveError("it has compressed members, which torch.save never writes")
        if member.header_offset + member.file_size > size:
            raise ArchiveError("corrupt or truncated: a member extends beyond the end of the file")


def _pickle_of(archive: zipfile.ZipFile) -> bytes:
    pickles = [
        member for member in archive.infolist() if member.filename.rpartition("/")[2] == "data.pkl"
    ]
    if len(pickles) != 1:
        raise ArchiveError(_FOREIGN)
    if pickles[0].file_size > PICKLE_LIMIT:
        raise ArchiveError(
            f"its pickle has {pickles[0].file_size} bytes; that of a tensor with metadata has at "
            f"most {PICKLE_LIMIT}"
        )
    return archive.read(pickles[0])


def _check_globals(pickled: bytes) -> None:
    """Raise ArchiveError if a pickle names a class or function that plain tensors do not need."""
    try:
        named = [
            str(argument).replace(" ", ".", 1)
            for code, argument, _ in pickletools.genops(pickled)
            if code.name in ("GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4")
        ]
    except Exception as error:  # a damaged pickle can raise almost any exception
        raise ArchiveError(
            f"corrupt or truncated: reading its pickle raises {type(error).__name__}"
        ) from None
    for name in named:
        if name in _PLAIN or _is_of_torch(name):
            continue
        if name.startswith(_OTHER):
            raise ArchiveError(f"does not hold a plain dense tensor ({name.rpartition('.')[2]})")
        raise ArchiveError(_CODE)


def _is_of_torch(name: str) -> bool:
    """Return whether `name` refers to a dtype or a storage class of torch."""
    module, _, own = name.rpartition(".")
    if module != "torch":
        return False
    return own.endswith("Storage") or isinstance(getattr(torch, own, None), torch.dtype)
