"""Damaged and hostile data sets, index caches, recipes, settings and texts, made by code.

A case makes its file or folder, names the entry that opens it (see `hostile_worker.ENTRIES`), and
says what the one error must contain.
"""

import gzip
import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LENGTHS = [5, 3, 4]
HEADER = 34  #: bytes of an index before its lengths; 8-byte pointers and 8-byte bounds follow
PLACES = HEADER + 4 * len(LENGTHS)
BOUNDS = PLACES + 8 * len(LENGTHS)
RULE = "matchers:\n  all: {config: mxfp8, type: glob, pattern: '*', enabled: true}\n"
MANIFEST = {
    "schema_version": 1,
    "tokenizer": {"type": "null", "vocab_size": 100, "eod": 99, "fingerprint": "x"},
    "dtype": "uint16",
    "documents": 3,
    "tokens": 12,
    "text_bytes": 30,
    "bad_lines": 0,
    "json_key": "text",
    "append_eod": True,
    "sources": [["a.txt", 30]],
}


@dataclass(frozen=True)
class Case:
    """A file or folder that must be refused."""

    name: str
    entry: str  #: key of `hostile_worker.ENTRIES`
    make: Callable[[Path], Path]  #: creates the input in an empty folder and returns its path
    says: str  #: a part of the error


def cases() -> list[Case]:
    """Return every case, in a fixed order."""
    return [*_data(), *_manifests(), *_caches(), *_recipes(), *_settings(), *_texts()]


def special(kind: str) -> Callable[[Path], None]:
    """Return a function that creates a special file at a path."""

    def make(path: Path) -> None:
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to({"zero": "/dev/zero", "loop": path.name}[kind])

    return make


def sparse(size: int) -> Callable[[Path], None]:
    """Return a function that creates a sparse file of `size` bytes."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return make


def _written(name: str, content: bytes | str | Callable[[Path], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


# Data sets.


def sound_pair(folder: Path) -> Path:
    """Write three documents with 12 tokens in total; return the prefix."""
    ends = np.cumsum(LENGTHS)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(LENGTHS), len(LENGTHS) + 1)
    places = (ends - LENGTHS) * 2
    index = np.array(LENGTHS, "<i4").tobytes() + places.astype("<i8").tobytes()
    index += np.arange(len(LENGTHS) + 1, dtype="<i8").tobytes()
    (folder / "d.idx").write_bytes(header + index)
    np.arange(12, dtype="<u2").tofile(folder / "d.bin")
    return folder / "d"


def _pair(damage: Callable[[Path], None]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        prefix = sound_pair(folder)
        damage(prefix)
        return prefix

    return make


def _at(offset: int, form: str, value: int | bytes) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        content = bytearray(Path(f"{prefix}.idx").read_bytes())
        struct.pack_into(form, content, offset, value)
        Path(f"{prefix}.idx").write_bytes(content)

    return change


def _cut(suffix: str, bytes_left: int) -> Callable[[Path], None]:
    def change(prefix: Path) -> None:
        path = Path(f"{prefix}{suffix}")
        path.write_bytes(path.read_bytes()[:bytes_left])

    return change


def _replaced(suffix: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda prefix: make(Path(f"{prefix}{suffix}"))


def _data() -> Iterator[Case]:
    place = "has a wrong length or position"
    damages: dict[str, tuple[Callable[[Path], None], str]] = {
        "mark": (_at(0, "<c", b"X"), "is not a megatron-core index"),
        "version": (_at(9, "<Q", 2), "is not a megatron-core index"),
        "type": (_at(17, "<B", 77), "is not an index of token ids (dtype code 77)"),
        "type of floats": (_at(17, "<B", 7), "is not an index of token ids (dtype code 7)"),
        "type of other size": (_at(17, "<B", 4), place),
        "too many sequences": (_at(18, "<Q", 1 << 60), "is not an index"),
        "one sequence more": (_at(18, "<Q", 4), "the index has 102 bytes, but needs 114"),
        "no sequence": (_at(18, "<Q", 0), "is not an index"),
        "too many documents": (_at(26, "<Q", 1 << 63), "is not an index"),
        "longer sequence": (_at(HEADER, "<i", 6), place),
        "longer last sequence": (_at(HEADER + 8, "<i", 5), "the .bin has 24 bytes"),
        "negative length": (_at(HEADER, "<i", -5), place),
        "largest length": (_at(HEADER, "<i", (1 << 31) - 1), place),
        "wrong place": (_at(PLACES + 8, "<q", 12), place),
        "negative place": (_at(PLACES + 8, "<q", -2), place),
        "far place": (_at(PLACES + 16, "<q", 1 << 62), place),
        "wrong first bound": (_at(BOUNDS, "<q", 1), "bounds of the documents do not ascend"),
        "descending bounds": (_at(BOUNDS + 8, "<q", 3), "bounds of the documents do not ascend"),
        "wrong last bound": (_at(BOUNDS + 24, "<q", 9), "end with sequence 9 of 3"),
        "index cut short": (_cut(".idx", 101), "the index has 101 bytes, but needs 102"),
        "index without numbers": (_cut(".idx", 20), "is not an index: it has 20 bytes"),
        "empty index": (_cut(".idx", 0), "is not an index: it has 0 bytes"),
        "tokens cut short": (_cut(".bin", 10), "the .bin has 10 bytes"),
        "tokens with an odd byte": (_cut(".bin", 23), "the .bin has 23 bytes"),
        "no tokens": (_cut(".bin", 0), "d.bin: is empty"),
    }
    for suffix in (".idx", ".bin"):
        for kind in ("fifo", "folder", "zero", "loop"):
            said = "symbolic links" if kind == "loop" else "not a regular file"
            damages[f"{suffix} is a {kind}"] = (_replaced(suffix, special(kind)), said)
    damages["huge index"] = (_replaced(".idx", sparse(1 << 40)), "is not a megatron-core index")
    for name, (damage, said) in damages.items():
        yield Case(f"data: {name}", "train", _pair(damage), said)
        if name in ("negative length", "wrong place", ".bin is a fifo", "tokens cut short"):
            yield Case(f"checked data: {name}", "check", _pair(damage), said)
    yield Case("data: long name", "train", lambda folder: folder / ("x" * 5000), "too long")


def _manifests() -> Iterator[Case]:
    said = "does not describe a data set"
    contents: dict[str, tuple[bytes | str | Callable[[Path], None], str]] = {
        "list": ("[]", said),
        "deep nesting": ("[" * 100_000, "nested deeper than 64 levels"),
        "key twice": ('{"schema_version": 1, "schema_version": 1}', "occurs twice"),
        "vocabulary of another type": (
            json.dumps(MANIFEST | {"tokenizer": {**MANIFEST["tokenizer"], "vocab_size": "x"}}),
            "vocab_size is 'x', not int",
        ),
        "sources of another type": (json.dumps(MANIFEST | {"sources": [1]}), "sources holds 1"),
        "number of 5000 digits": ('{"schema_version": ' + "1" * 5000 + "}", said),
        "fifo": (special("fifo"), "not a regular file"),
        "device": (special("zero"), "not a regular file"),
        "huge": (sparse(1 << 40), "larger than 16 MiB"),
        "utf-16": ("{}".encode("utf-16"), "not UTF-8 text"),
    }
    for name, (content, message) in contents.items():

        def make(folder: Path, content=content) -> Path:
            sound_pair(folder)
            _written("d.json", content)(folder)
            return folder / "d"

        yield Case(f"manifest: {name}", "manifest", make, message)


# Sample indices of megatron-core.


class _Hostile:
    """An object that, when unpickled, creates a folder `executed` in the current one."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("executed",)


def _saved(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array, allow_pickle=True)


def _caches() -> Iterator[Case]:
    whole = np.arange(10, dtype=np.int32)

    def cut(path: Path) -> None:
        np.save(path, whole)
        path.write_bytes(path.read_bytes()[:-1])

    def foreign(path: Path) -> None:
        (path.parent.parent / "foreign").write_text("keep")
        path.symlink_to(path.parent.parent / "foreign")

    contents: dict[str, tuple[bytes | Callable[[Path], None], str]] = {
        "pickle": (pickle.dumps(_Hostile()), "not an array"),
        "array of objects": (_saved(np.array([_Hostile()])), "not an array of integers"),
        "floats": (_saved(whole.astype(float)), "not an array of integers (float64)"),
        "cut short": (cut, "but its header requires"),
        "empty": (b"", "not an array"),
        "header without end": (b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b"(" * 10**6, "not an array"),
        "fifo": (special("fifo"), "not a regular file"),
        "link": (foreign, "a link, which megatron-core never writes"),
    }
    for name, (content, said) in contents.items():

        def make(folder: Path, content=content) -> Path:
            (folder / "cache").mkdir()
            _written("0-GPTDataset-train-document_index.npy", content)(folder / "cache")
            return folder / "cache"

        yield Case(f"sample index: {name}", "cache", make, said)


# Recipes and settings.


def _bomb(levels: int = 9) -> str:
    """Return YAML aliases of aliases; nine levels stand for 10^9 values."""
    lines = ["a0: &a0 {k0: 1, k1: 1, k2: 1}"]
    for level in range(1, levels + 1):
        inner = ", ".join(f"k{k}: *a{level - 1}" for k in range(10))
        lines.append(f"a{level}: &a{level} {{{inner}}}")
    return "\n".join(lines) + "\n"


def _recipes() -> Iterator[Case]:
    contents: dict[str, tuple[bytes | str | Callable[[Path], None], str]] = {
        "python tag": (
            "description: !!python/object/apply:os.mkdir [executed]\n" + RULE,
            "the tag tag:yaml.org,2002:python/object/apply:os.mkdir is not allowed; remove it",
        ),
        "python tag on a scalar": ("description: !!python/object/new:os.mkdir x\n", "line 1: "),
        "python name": ("description: !!python/name:os.system\n" + RULE, "line 1: could not"),
        "cycle": ("configs: &a {x: *a}\n" + RULE, "an alias refers to a value that contains it"),
        "cycle of lists": ("description: &a [*a]\n" + RULE, "an alias refers to a value"),
        "deep nesting": ("configs: " + "[" * 100_000, "nested deeper than 32 levels"),
        "deep block nesting": (
            "".join(f"{' ' * i}a:\n" for i in range(300)) + " " * 300 + "b",
            "nested deeper than 32 levels",
        ),
        "alias bomb": (_bomb(), "more than 100,000 values once its aliases are followed"),
        "alias bomb of lists": (
            _bomb().replace("{", "[").replace("}", "]"),
            "more than 100,000 values",
        ),
        "huge scalar": ("description: " + "x" * 200_000 + "\n" + RULE, "200,000 characters"),
        "huge number": (
            "configs: {c: {linear: " + "9" * 5000 + "}}\n" + RULE,
            "line 1: Exceeds the limit",
        ),
        "huge layer number": (
            RULE.replace("enabled", "layers: first " + "9" * 5000 + ", enabled"),
            "line 2: matcher 'all' has layers: first 999",
        ),
        "impossible date": ("description: 2001-13-45\n" + RULE, "line 1: month must be in 1..12"),
        "key twice": (RULE + RULE, "line 3: the key 'matchers' occurs twice"),
        "key that is a list": ("? [a]\n: b\n" + RULE, "line 1: a key is a sequence"),
        "key with escape sequences": ('"\\e[31m\\n[ERROR] forged": 1\n' + RULE, "not printable"),
        "value with line breaks": (
            'matchers: {m: {config: "x\\n[ERROR] forged", type: glob, pattern: "*", '
            "enabled: true}}\n",
            "names the config 'x\\n",
        ),
        "utf-16": (RULE.encode("utf-16"), "not UTF-8 text"),
        "latin-1": ("description: é\n".encode("latin-1") + RULE.encode(), "not UTF-8 text"),
        "binary": (bytes(range(128)) * 10, "it is not YAML: "),
        "null bytes": (b"\0" * 1000, "it is not YAML: "),
        "empty": (b"", "it takes configs: and matchers:"),
        "fifo": (special("fifo"), "not a regular file"),
        "device": (special("zero"), "not a regular file"),
        "folder": (special("folder"), "a folder, not a regular file"),
        "loop of links": (special("loop"), "symbolic links"),
        "huge": (sparse(1 << 40), "it cannot be read: larger than"),
    }
    for name, (content, said) in contents.items():
        yield Case(f"recipe: {name}", "recipe", _written("hostile.yaml", content), said)


def _settings() -> Iterator[Case]:
    contents: dict[str, tuple[bytes | str | Callable[[Path], None], str]] = {
        "deep nesting": ('{"qk":' * 5_000 + "1" + "}" * 5_000, "nested deeper than 64 levels"),
        "key twice": ('{"qk": "mxfp8", "qk": "bf16"}', "the key 'qk' occurs twice"),
        "lone surrogate": (r'{"qk": "\ud800"}', "a lone surrogate"),
        "escape sequence": (r'{"qk": "\u001b[31m\n[ERROR] forged", "x": 1}', "it takes an object"),
        "other types": ('{"qk": [1]}', "it takes an object with any of the keys"),
        "binary": (b"\xff\xfe\x00", "not UTF-8 text"),
        "fifo": (special("fifo"), "not a regular file"),
        "device": (special("zero"), "not a regular file"),
        "huge": (sparse(1 << 40), "larger than"),
    }
    for name, (content, said) in contents.items():
        yield Case(f"settings: {name}", "settings", _written("settings.json", content), said)


# Texts for script/data/preprocess.py.


def _texts() -> Iterator[Case]:
    deep = '{"text": ' + "[" * 200_000 + "]" * 200_000 + "}\n"
    twins = r'{"text": "\ud800"}' + "\n"
    contents: dict[str, tuple[str, bytes | str | Callable[[Path], None], str]] = {
        "deep nesting": ("a.jsonl", deep, "nested too deep"),
        "lone surrogate": ("a.jsonl", twins, "half of a surrogate pair"),
        "number of 5000 digits": ("a.jsonl", '{"n": ' + "1" * 5000 + "}\n", "not JSON"),
        "keys with escape sequences": ("a.jsonl", '{"\\u001b[31m\\n": 1}\n', "no text under"),
        "many keys": ("a.jsonl", json.dumps(dict.fromkeys(map(str, range(10**5)))), "no text"),
        "wrong encoding": ("a.jsonl", '{"text": "1"}'.encode("utf-16"), "not UTF-8"),
        "gigantic line": ("a.jsonl", sparse(300 << 20), "a document of more than 256 MiB"),
        "gigantic text": ("a.txt", sparse(8 << 30), "a document of more than 256 MiB"),
        "damaged gzip": ("a.txt.gz", gzip.compress(b"1 2 3" * 99)[:-9], "cut short"),
        "gzip that is none": ("a.txt.gz", b"\x1f\x8b" + b"x" * 99, "is damaged"),
        "damaged zstandard": ("a.txt.zst", b"\x28\xb5\x2f\xfd" + b"\xff" * 99, "is damaged"),
        "damaged bzip2": ("a.txt.bz2", b"BZh9" + b"x" * 99, "cannot be read"),
        "gzip bomb": ("a.txt.gz", gzip.compress(bytes(300 << 20), 1), "more than 256 MiB"),
        "damaged parquet": ("a.parquet", b"PAR1" + b"x" * 99 + b"PAR1", "not a Parquet file"),
        "fifo": ("a.txt", special("fifo"), "is not a file or folder"),
        "device": ("a.txt", special("zero"), "is not a file or folder"),
        "empty": ("a.txt", b"", "is empty"),
    }
    for name, (file, content, said) in contents.items():
        yield Case(f"text: {name}", "preprocess", _written(file, content), said)
    states = {
        "empty": ("{}", "is damaged or not written by"),
        "deep nesting": ('{"a":' * 10**5, "nested deeper than 64 levels"),
        "list": ("[]", "is damaged or not written by"),
        "other types": ('{"mark": {"counts": 1, "position": []}}', "is damaged or not written by"),
    }
    for name, (content, said) in states.items():

        def make(folder: Path, content=content) -> Path:
            (folder / "out.partial").mkdir()
            (folder / "out.partial" / "progress.json").write_text(content)
            return _written("a.txt", "1 2 3")(folder)

        yield Case(f"interrupted run: {name}", "preprocess", make, said)
    yield Case("text: folder without data", "preprocess", lambda folder: folder, "holds no data")
