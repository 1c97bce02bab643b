"""Write a conformance kit, and compare the installed code with one.

A kit is a folder of test vectors for other implementations of the formats. A vector is an input
with the codes, scales and dequantized values that it must give. The folder contains

    manifest.json   for every format: its description, its files with their SHA-256, and its
                    vectors, each with a shape, an axis, a dtype and the rule that it tests
    FORMAT.npz      arrays named VECTOR.input, .codes, .block_scales, .tensor_scale and .values
    FORMAT.json     the same arrays; the bits of each number are in hexadecimal

In the names of files, `.` stands for the colons in the name of a format, and `of` for a slash.

Inputs and values are float32. If the dtype of a vector is bfloat16 or float16, they are numbers of
that dtype. `codes` has one code per value; the axis along which blocks run is its last one. The
scales are those of `QuantizedTensor`, and a format without a scale has no such array. The values
come from plain torch operations; the comparison includes the fused kernels.

The bytes of a kit depend on the code and the formats only, so two runs write the same files.
"""

import hashlib
import io
import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.bounded_files import UnusableFileError, printable, read_bytes
from megatron.fake_quant.code_points import unpack_nibbles
from megatron.fake_quant.formats import Format
from megatron.fake_quant.inspect.format_report import describe
from megatron.fake_quant.inspect.vector_inputs import VectorInput, vector_inputs
from megatron.fake_quant.names import get_format
from megatron.fake_quant.packing import dequantize, quantize
from megatron.fake_quant.quantize import fake_quantize

KIT = "conformance vectors of megatron.fake_quant"
VERSION = 1
MANIFEST = "manifest.json"
#: Variants that a kit includes by default besides the named formats, because they test more rules.
VARIANTS = (
    "mxfp8:rceil",
    "nvfp4:4over6-mae",
    "nvfp4:4over6-mse",
    "nvfp4:2d",
    "nvfp4:outer-row",
    "hifp8:hr",
)
_LARGEST_FILE = 1 << 28  #: maximum size in bytes of a file of a kit
_NIBBLE = 4
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Unsigned integer types of the same sizes as the types of a kit's arrays.
_BITS: Mapping[str, Any] = {"float32": np.uint32, "uint8": np.uint8, "uint16": np.uint16}

Array: TypeAlias = NDArray[Any]


def results(x: Tensor, fmt: Format, axis: int) -> dict[str, Array]:
    """Return the codes, scales and values of a tensor as arrays, keyed by their names in a kit."""
    quantized = quantize(x, fmt.with_own_amax(), axis)
    codes, element = quantized.codes, fmt.element
    if element.is_cast:
        arrays = {"codes": codes.view(torch.int16).numpy().view(np.uint16)}
    else:
        length = quantized.shape[quantized.axis]
        packed = element.bits <= _NIBBLE
        arrays = {"codes": (unpack_nibbles(codes, length) if packed else codes).numpy()}
    if quantized.scales.blocks is not None:
        arrays["block_scales"] = quantized.scales.blocks.numpy()
    if quantized.scales.tensor is not None:
        arrays["tensor_scale"] = quantized.scales.tensor.numpy()
    arrays["values"] = dequantize(quantized).float().numpy()
    return {name: array.copy() for name, array in arrays.items()}


def write(folder: Path, formats: Iterable[Format]) -> str:
    """Write a kit for `formats` to `folder`, and return a message for the user.

    Raises:
        ValueError: if the folder contains something other than a kit, if a format rounds at random,
            or if a file cannot be written, for example because the disk is full.
    """
    formats = list(dict.fromkeys(formats))
    for fmt in formats:
        if fmt.stochastic:
            raise ValueError(
                f"format {fmt.name!r} rounds at random, so it has no fixed vectors; choose one "
                "that rounds to nearest"
            )
    _make_room(folder)
    # If this call is interrupted, the first manifest lets the next call replace the kit.
    entries: dict[str, Any] = {fmt.name: {"files": {}, "vectors": {}} for fmt in formats}
    count = 0
    try:
        _write_manifest(folder, entries)
        for fmt in formats:
            vectors = vector_inputs(fmt)
            entries[fmt.name] = _write_format(folder, fmt, vectors)
            count += len(vectors)
        _write_manifest(folder, entries)
    except OSError as error:
        raise ValueError(
            f"cannot write the kit to {folder}: {error.strerror or error}; the kit is incomplete: "
            "make room, and run the same command again, which replaces it"
        ) from None
    return f"wrote {count} vectors of {len(formats)} formats to {folder}"


def _write_manifest(folder: Path, entries: dict[str, Any]) -> None:
    manifest = {"kit": KIT, "version": VERSION, "layout": __doc__, "formats": entries}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _make_room(folder: Path) -> None:
    """Make the folder, or remove the files of the kit in an existing folder.

    Raises:
        ValueError: if `folder` is a file, or a folder that is not empty and has no kit.
    """
    if not folder.exists():
        if not folder.parent.is_dir():
            raise ValueError(f"no folder {folder.parent} for {folder}; make it first")
        folder.mkdir()
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a folder that does not exist or is empty")
    if not any(folder.iterdir()):
        return
    try:
        names = _read_manifest(folder)["formats"]
    except ValueError:
        raise ValueError(
            f"{folder} is not empty and has no conformance kit; name a folder that does not exist, "
            "is empty, or has a kit to replace"
        ) from None
    for name in names:
        for path in _paths(folder, name):
            path.unlink(missing_ok=True)
    (folder / MANIFEST).unlink()


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
    """Return the paths of the npz file and the JSON file of the format with the given name."""
    stem = name.replace(":", ".").replace("/", "of")
    if Path(stem).name != stem:
        raise ValueError(f"the format name {name!r} is not valid; choose one as in --help")
    return folder / f"{stem}.npz", folder / f"{stem}.json"


def _write_format(folder: Path, fmt: Format, vectors: Sequence[VectorInput]) -> dict[str, Any]:
    """Write both files of a format, and return its entry in the manifest."""
    arrays: dict[str, dict[str, Array]] = {}
    entries: dict[str, Any] = {}
    for vector in vectors:
        arrays[vector.name] = {
            "input": vector.x.float().numpy().copy(),
            **results(vector.x, fmt, vector.axis),
        }
        entries[vector.name] = {
            "rule": vector.rule,
            "dtype": str(vector.x.dtype).removeprefix("torch."),
            "axis": vector.axis,
            "shape": list(vector.x.shape),
        }
    npz, text = _paths(folder, fmt.name)
    flat = {f"{name}.{part}": a for name, parts in arrays.items() for part, a in parts.items()}
    with npz.open("wb") as file:
        np.savez(file, **flat)  # type: ignore[arg-type]
    text.write_text(_json(fmt.name, entries, arrays))
    return {
        "description": describe(fmt).splitlines(),
        "files": {path.name: _sha256(path.read_bytes()) for path in (npz, text)},
        "vectors": entries,
    }


def _json(name: str, entries: dict[str, Any], arrays: dict[str, dict[str, Array]]) -> str:
    """Return the text of the JSON file of a format."""
    content = {
        "format": name,
        "vectors": {
            vector: entries[vector] | {part: _as_hex(array) for part, array in parts.items()}
            for vector, parts in arrays.items()
        },
    }
    return json.dumps(content, indent=1) + "\n"


def _as_hex(array: Array) -> dict[str, Any]:
    """Return an array as its type, its shape and the bits of its numbers in hexadecimal."""
    numbers = array.view(_BITS[array.dtype.name])
    big_endian = numbers.astype(numbers.dtype.newbyteorder(">")).tobytes()
    return {
        "type": array.dtype.name,
        "shape": list(array.shape),
        "bits": big_endian.hex(" ", array.dtype.itemsize),
    }


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a kit.

    Raises:
        ValueError: if the folder has no readable manifest of this version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no conformance kit, because {MANIFEST} is missing; write one by "
            f"python -m megatron.fake_quant vectors {folder}"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableFileError(path, f"not JSON: {error}; write the kit anew") from None
    if not isinstance(manifest, dict) or manifest.get("kit") != KIT:
        raise UnusableFileError(path, "not the manifest of a conformance kit; name another folder")
    if manifest.get("version") != VERSION:
        raise UnusableFileError(
            path,
            f"a kit of version {manifest.get('version')!r}, but this code reads version {VERSION}; "
            "write the kit anew",
        )
    formats = manifest.get("formats")
    if not isinstance(formats, dict) or not all(_is_entry(entry) for entry in formats.values()):
        raise UnusableFileError(path, "its formats are missing or invalid; write the kit again")
    return manifest


def _is_entry(entry: Any) -> bool:
    """Return whether a part of a manifest has the fields of a format."""
    fields = ("files", "vectors")
    if not isinstance(entry, dict) or not all(isinstance(entry.get(f), dict) for f in fields):
        return False
    return all(
        isinstance(vector, dict)
        and str(vector.get("dtype")) in _DTYPES
        and isinstance(vector.get("axis"), int)
        for vector in entry["vectors"].values()
    )


def first_difference(folder: Path) -> tuple[str | None, str]:
    """Compare the installed code with a kit; return the first difference and a summary.

    Returns:
        the first difference in words, or None if there is none; and a summary of what was compared.

    Raises:
        ValueError: if the folder has no readable kit.
    """
    formats = _read_manifest(folder)["formats"]
    count = sum(len(entry["vectors"]) for entry in formats.values())
    if not formats or not all(entry["vectors"] for entry in formats.values()):
        raise UnusableFileError(
            folder / MANIFEST, "a kit without vectors, or one that was not completed; write it anew"
        )
    summary = f"compared {count} vectors of {len(formats)} formats in {folder}"
    for name, entry in formats.items():
        if (words := _differing_format(folder, name, entry)) is not None:
            return words, summary
    return _extra_file(folder, formats), summary


def _extra_file(folder: Path, names: Iterable[str]) -> str | None:
    """Return a message about the first vector file that belongs to no format, or None.

    Files of other kinds, such as notes, are ignored.
    """
    known = {path.name for name in names for path in _paths(folder, name)} | {MANIFEST}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".npz", ".json") and path.name not in known:
            return f"{printable(path.name)}: not in {MANIFEST}; remove it, or write the kit anew"
    return None


def _differing_format(folder: Path, name: str, entry: dict[str, Any]) -> str | None:
    """Return a message about the first difference in the vectors or files of a format, or None."""
    fmt = get_format(name)
    npz, text = _paths(folder, name)
    contents = {path: _content(path) for path in (npz, text)}
    arrays: dict[str, dict[str, Array]] = {}
    for key, array in _load(npz, contents[npz]).items():
        vector, _, part = key.rpartition(".")
        arrays.setdefault(vector, {})[part] = array
    for vector, fields in entry["vectors"].items():
        if (words := _differing(dict(arrays.get(vector, {})), fmt, fields)) is not None:
            return f"{name}, vector {vector}: {words}"
    if unknown := arrays.keys() - entry["vectors"].keys():
        return f"{npz.name}: the vector {printable(min(unknown))} is not in {MANIFEST}"
    for path, content in contents.items():
        if entry["files"].get(path.name) != _sha256(content):
            return f"{path.name}: its SHA-256 is not the one in {MANIFEST}"
    if contents[text] != _json(name, entry["vectors"], arrays).encode():
        return f"{text.name}: its content is not that of {npz.name} and {MANIFEST}"
    return None


def _content(path: Path) -> bytes:
    try:
        return read_bytes(path, limit=_LARGEST_FILE)
    except FileNotFoundError:
        raise UnusableFileError(path, "missing from the kit; write the kit anew") from None


def _load(path: Path, content: bytes) -> dict[str, Array]:
    """Return the arrays of an npz file, given its path and its content.

    Compressed or overlapping arrays could exhaust the memory, so they are refused.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise ValueError("its arrays are compressed; those of a kit are not")
        if sum(member.file_size for member in members) > len(content):
            raise ValueError("its arrays are larger than the file")
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception as error:  # zipfile and numpy raise many types of errors for a damaged file
        raise UnusableFileError(path, f"not a readable npz file: {error}") from None


def _differing(stored: dict[str, Array], fmt: Format, fields: dict[str, Any]) -> str | None:
    """Return a message about the first difference in a vector, or None if there is none."""
    if "input" not in stored or stored["input"].dtype != np.float32:
        return "the kit has no float32 input"
    given = stored.pop("input")
    if list(given.shape) != fields.get("shape"):
        return f"the input has the shape {list(given.shape)}, and {MANIFEST} states a different one"
    x = torch.from_numpy(given).to(_DTYPES[fields["dtype"]])
    computed = results(x, fmt, fields["axis"])
    if stored.keys() != computed.keys():
        return f"the kit has {', '.join(stored)}; the installed code has {', '.join(computed)}"
    for part, array in computed.items():
        if (words := _first_unlike(part, stored[part], array, given)) is not None:
            return words
    fused = fake_quantize(x, fmt.with_own_amax(), fields["axis"]).float().numpy()
    return _first_unlike("values", stored["values"], fused, given, "fake_quantize")


def _first_unlike(
    part: str, stored: Array, computed: Array, given: Array, code: str = "the installed code"
) -> str | None:
    """Return a message about the first difference between two arrays, or None if there is none."""
    if (stored.dtype, stored.shape) != (computed.dtype, computed.shape):
        return (
            f"{part} of the kit are {stored.dtype} {list(stored.shape)}; those of {code} are "
            f"{computed.dtype} {list(computed.shape)}"
        )
    bits = _BITS[stored.dtype.name]
    unlike = np.argwhere(stored.copy().view(bits) != computed.copy().view(bits))
    if not len(unlike):
        return None
    index = tuple(unlike[0].tolist())
    where = part if stored.ndim == 0 else f"{part}{list(index)}"
    source = f" for the input {_number(given[index])}" if part == "values" else ""
    return (
        f"{where}{source}: the kit has {_number(stored[index])}, {code} gives "
        f"{_number(computed[index])}; {len(unlike)} of {stored.size} differ"
    )


def _number(x: Any) -> str:
    """Return the bits of a number in hexadecimal, after its decimal value if it is a float32."""
    bits = int(np.asarray(x).view(_BITS[x.dtype.name]))
    digits = f"0x{bits:0{2 * x.dtype.itemsize}x}"
    return f"{float(x)!r} ({digits})" if x.dtype == np.float32 else digits
