"""Make pickles and archives that run a command, claim false sizes or are damaged."""

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch


class Touch:
    """An object whose pickle creates a file when it is unpickled."""

    def __init__(self, canary: Path):
        self.command = f"touch '{canary}'"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def text(value: str) -> bytes:
    """Return the operation that pushes a string."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def programs(canary: Path) -> dict[str, bytes]:
    """Return pickles that run a command, each by a different operation of the pickle machine."""
    command = f"touch '{canary}'"
    python = f"open({str(canary)!r}, 'w')"
    return {
        "reduce": pickle.dumps(Touch(canary)),
        "protocol 0": pickle.dumps(Touch(canary), protocol=0),
        "inst": b"(" + f"S{command!r}\n".encode() + b"ios\nsystem\n.",
        "obj": b"(cos\nsystem\n" + text(command) + b"o.",
        "eval": b"\x80\x02cbuiltins\neval\n" + text(python) + b"\x85R.",
        "stack global": b"\x80\x04"
        + text("os")
        + text("system")
        + b"\x93"
        + text(command)
        + b"\x85R.",
        "newobj": b"\x80\x02csubprocess\nPopen\n"
        + text("touch")
        + text(str(canary))
        + b"\x86\x85\x81.",
        "torch's loader": b"\x80\x02ctorch.storage\n_load_from_bytes\nC\x03abc\x85R.",
        "in a list": pickle.dumps([1, {"a": Touch(canary)}]),
    }


def bombs() -> dict[str, bytes]:
    """Return pickles of a few bytes for which an unpickler needs gigabytes or endless time."""
    again = b"".join(b"q%ch%c\x86" % (i, i) for i in range(80))  # each pair holds the previous one
    return {
        "memo": b"\x80\x02]r\xff\xff\xff\x7f.",
        "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        "long text": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"a.",
        "long frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",
        "bytearray of a size": b"\x80\x02cbuiltins\nbytearray\n\x8a\x06"
        + struct.pack("<Q", 1 << 40)[:6]
        + b"\x85R.",
        "nested key": b"\x80\x02}K\x01" + again + b"Ns.",
        "deep list": b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".",
    }


def damaged() -> dict[str, bytes]:
    """Return files that are not pickles, or pickles of other objects."""
    return {
        "empty": b"",
        "random": bytes(range(256)) * 16,
        "number": pickle.dumps(3),
        "nothing": pickle.dumps(None),
        "list": pickle.dumps([{"a": 1}]),
        "text": pickle.dumps("x" * 5000),
        "json": b'{"state_dict_metadata": {}}',
    }


def archive(data: bytes, *, compression: int = zipfile.ZIP_STORED, **parts: bytes) -> bytes:
    """Return an archive like those of torch.save that contains the given pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", b"3\n")
        file.writestr("archive/byteorder", b"little")
        for name, content in parts.items():
            file.writestr(f"archive/data/{name.removeprefix('part_')}", content)
    return stream.getvalue()


def saved(value: Any) -> bytes:
    """Return what torch.save writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def claims() -> dict[str, bytes]:
    """Return archives that claim more data than they hold, or are truncated."""
    tensor = saved({"a": torch.ones(1).expand(1 << 20, 1 << 20)})
    missing = archive(
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\nFloatStorage"
        b"\n"
        + text("0")
        + text("cpu")
        + b"\x8a\x06"
        + struct.pack("<Q", 10**12)[:6]
        + b"tQK\x00\x8a\x06"
        + struct.pack("<Q", 10**12)[:6]
        + b"\x85K\x01\x85\x89}tR."
    )
    return {
        "expanded": tensor,
        "storage of a terabyte": missing,
        "compressed": archive(b"\x80\x02" + b"N0" * (1 << 22) + b"N.", compression=8),
        "no pickle": archive(b"").replace(b"data.pkl", b"data.xyz"),
        "cut off": saved({"a": torch.ones(100)})[:-40],
        "legacy": pickle.dumps(0x1950A86A20F9469CFC6C) + pickle.dumps(1001),
    }
