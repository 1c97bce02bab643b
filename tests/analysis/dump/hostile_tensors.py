"""Hostile `.pt` files for tests, each made by a function from a good file."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import socket
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MANY = 1 << 20


def _save(path: Path, tensor: Any, **metadata: Any) -> None:
    """Write a tensor with the metadata of the good file at `path`, changed by `metadata`."""
    known = torch.load(path, weights_only=True)["metadata"]
    path.unlink()
    torch.save({"tensor": tensor, "metadata": known | metadata}, path)


def _claims(path: Path, tensor: Tensor) -> None:
    """Write a tensor with matching metadata, so that only the tensor is at fault."""
    dims = " ".join("abcdefghijklmnop"[: tensor.dim()])
    shape = list(tensor.shape)
    dtype = str(tensor.dtype).removeprefix("torch.")
    _save(path, tensor, shape=shape, global_shape=shape, dtype=dtype, dims=dims)


def _nested(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    _save(path, tensor)


def _quantized(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    _save(path, tensor)


def _overwrite(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def _instead(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _rezip(path: Path, members: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> None:
    path.unlink()
    with zipfile.ZipFile(path, "w", how) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def _pickled(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Replace the pickle of a file by `change(pickle)`."""
    members = _members(path)
    name = next(name for name in members if name.endswith("data.pkl"))
    _rezip(path, members | {name: change(members[name])})


def _deflated(path: Path) -> None:
    """Write a good file with compressed members, one of which expands to 256 MiB."""
    members = _members(path)
    prefix = next(iter(members)).split("/")[0]
    path.unlink()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        with archive.open(f"{prefix}/bomb", "w", force_zip64=True) as bomb:
            for _ in range(256):
                bomb.write(bytes(1 << 20))


def _memo_entries(path: Path) -> None:
    """Write a pickle that stores a million objects in its memo before the tensor."""
    junk = b"".join(b"]r" + struct.pack("<I", 1000 + i) + b"0" for i in range(MANY))
    _pickled(path, lambda old: old[:2] + junk + old[2:])


_MODULE = b"X\x06\x00\x00\x00module"  #: a key of the metadata, as it is pickled


def _deep_pickle(path: Path) -> None:
    """Write metadata in which two million tuples are nested."""
    deep = b"X\x04\x00\x00\x00deep" + b")" + b"\x85" * 2_000_000
    _pickled(path, lambda old: old.replace(_MODULE, deep + _MODULE, 1))


def _truncated_data(path: Path) -> None:
    """Write a valid archive with fewer bytes of values than its pickle claims."""
    members = _members(path)
    name = next(name for name in members if name.endswith("data/0"))
    _rezip(path, members | {name: members[name][:100]})


def _in_bytes(path: Path) -> None:
    """Write a file that holds a whole file of torch.save as bytes."""
    inner = path.read_bytes()
    path.unlink()
    torch.save({"tensor": io.BytesIO(inner).getvalue(), "metadata": {}}, path)


def _wrong_zip(path: Path) -> None:
    _rezip(path, {"word/document.xml": b"<x/>", "[Content_Types].xml": b"<x/>"})


def _many_members(path: Path) -> None:
    members = _members(path)
    prefix = next(iter(members)).split("/")[0]
    _rezip(path, members | {f"{prefix}/data/{i + 5}": b"" for i in range(20_000)})


def _local_headers(path: Path) -> None:
    """Make the central directory refer to a member far beyond the end of the file."""
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02")
    content[at + 42 : at + 46] = b"\xf0\xff\xff\x7f"
    _overwrite(path, bytes(content))


def _legacy(path: Path) -> None:
    known = torch.load(path, weights_only=True)
    path.unlink()
    torch.save(known, path, _use_new_zipfile_serialization=False)


def _script(path: Path) -> None:
    path.unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Identity()).save(str(path))


def _socket(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        try:  # the name of a socket may have at most 107 bytes
            os.chdir(path.parent)
            server.bind(path.name)
        finally:
            os.chdir(here)


class _Subclass(Tensor):
    """A tensor class that only this module knows."""


def _strange_metadata(**changes: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        _save(path, torch.load(path, weights_only=True)["tensor"].clone(), **changes)

    return write


def _write(tensor: Callable[[], Tensor]) -> Callable[[Path], None]:
    return lambda path: _claims(path, tensor())


def _bits(dtype: torch.dtype, size: int = 64) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8).view(dtype)


#: Functions that make a good `.pt` file hostile, and the message of a reader, by name.
TENSORS: dict[str, tuple[Callable[[Path], object], str]] = {
    "expanded": (_write(lambda: torch.zeros(1).expand(MANY, MANY)), "claims"),
    "expanded rows": (_write(lambda: torch.zeros(64).expand(1 << 34, 64)), "claims"),
    "zero elements, huge": (_write(lambda: torch.zeros(0, 1 << 40)), "shape"),
    "too many dimensions": (_write(lambda: torch.zeros([1] * 100)), "dimensions"),
    "nested": (_nested, "a plain dense tensor"),
    "negative bit": (_write(lambda: torch._neg_view(torch.ones(8))), "negated or conjugated"),
    "imaginary part": (
        _write(lambda: torch.ones(8, dtype=torch.complex64).conj().imag),
        "negated or conjugated",
    ),
    "conjugated": (
        _write(lambda: torch.ones(8, dtype=torch.complex64).conj()),
        "negated or conjugated",
    ),
    "complex": (_write(lambda: torch.ones(8, dtype=torch.complex64)), "complex"),
    "sparse": (lambda p: _save(p, torch.ones(4, 4).to_sparse()), "a plain dense tensor"),
    "sparse rows": (lambda p: _save(p, torch.eye(4).to_sparse_csr()), "a plain dense tensor"),
    "quantized": (_quantized, "a plain dense tensor"),
    "meta device": (
        lambda p: _save(p, torch.empty(1 << 30, 4, device="meta")),
        "a plain dense tensor",
    ),
    "subclass": (
        lambda p: _save(p, torch.ones(4).as_subclass(_Subclass)),
        "a plain dense tensor|run code",
    ),
    "4-bit dtype": (_write(lambda: _bits(torch.float4_e2m1fn_x2)), "float4_e2m1fn_x2"),
    "bits dtype": (_write(lambda: _bits(torch.bits8)), "bits8"),
    "another dtype": (_strange_metadata(dtype="float64"), "float64"),
    "another shape": (_strange_metadata(shape=[7]), "its record (is|says)"),
    "values cut short": (_truncated_data, "truncated|claims"),
    "compressed": (_deflated, "compressed"),
    "a million memo entries": (_memo_entries, "pickle"),
    "deep pickle": (_deep_pickle, "its pickle|deep"),
    "bytes of a file": (_in_bytes, "no tensor|objects other than tensors"),
    "another zip": (_wrong_zip, "archive"),
    "twenty thousand members": (_many_members, "members"),
    "member behind the end": (_local_headers, "archive|corrupt"),
    "legacy format": (_legacy, "archive"),
    "script module": (_script, "objects other than tensors|compressed"),
    "pickle": (lambda p: _overwrite(p, pickle.dumps([1, 2])), "archive"),
    "empty": (lambda p: _overwrite(p, b""), "empty"),
    "zeros": (lambda p: _overwrite(p, bytes(5000)), "archive"),
    "pipe": (lambda p: _instead(p, os.mkfifo), "FIFO"),
    "socket": (_socket, "socket"),
    "link to /dev/zero": (lambda p: _instead(p, lambda q: q.symlink_to("/dev/zero")), "device"),
    "link to a terminal": (lambda p: _instead(p, lambda q: q.symlink_to("/dev/tty")), "device"),
    "folder": (lambda p: _instead(p, Path.mkdir), "folder"),
    "metadata: a long text": (_strange_metadata(module="m" * 5_000_000), "characters|pickle"),
    "metadata: nested": (_strange_metadata(codes={"shape": [[[1]]], "x": {"y": {}}}), "codes"),
    "metadata: huge number": (_strange_metadata(counter=2**200), "counter"),
    "metadata: a boolean": (_strange_metadata(micro_batch=True), "micro_batch"),
    "metadata: negative": (_strange_metadata(iteration=-3), "iteration"),
}
if not hasattr(torch, "float4_e2m1fn_x2"):  # new in torch 2.8
    del TENSORS["4-bit dtype"]


def copy_of(good: Path, path: Path) -> Path:
    """Write a copy of a good file, to be made hostile."""
    shutil.copyfile(good, path)
    return path
