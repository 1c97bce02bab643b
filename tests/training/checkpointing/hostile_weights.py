"""Make Hugging Face folders that run code, claim false sizes, block a reader or are damaged."""

import json
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.training.checkpointing.hostile_checkpoints import Case, special
from tests.training.checkpointing.hostile_pickles import Touch

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DEEP = "[" * 100_000 + "]" * 100_000


def make(folder: Path) -> Path:
    """Write a good folder with an index and one file."""
    from megatron.training.hf.architectures import LLAMA, Model

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    sources = Model(LLAMA, CONFIG).sources
    file = "model-00001-of-00001.safetensors"
    save_file({name: torch.ones(s.shape) for name, s in sources.items()}, folder / file)
    index = {"metadata": {}, "weight_map": dict.fromkeys(sources, file)}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def header(fields: Any, *, length: int | None = None, data: bytes = b"") -> bytes:
    """Return a safetensors file with any header."""
    text = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def folders(root: Path, canary: Path) -> Iterator[Case]:
    """Write every hostile folder and yield its case."""
    changes = _configs(canary) | _indices() | _files(canary)
    for number, (name, (change, names)) in enumerate(changes.items()):
        folder = make(root / f"{number:03d}")
        change(folder)
        yield Case(name, "weights", folder, names)


Changes = dict[str, tuple[Callable[[Path], Any], str]]


def _writes(name: str, content: str | bytes) -> tuple[Callable[[Path], Any], str]:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return (lambda folder: (folder / name).write_bytes(data)), name


def _configs(canary: Path) -> Changes:
    fields: dict[str, dict[str, Any]] = {
        "layers 10^9": {"num_hidden_layers": 10**9},
        "layers 10^300": {"num_hidden_layers": 10**300},
        "layers of no tensor": {"num_hidden_layers": 9000},
        "layers as text": {"num_hidden_layers": "1"},
        "no layers": {"num_hidden_layers": 0},
        "layers null": {"num_hidden_layers": None},
        "hidden 10^12": {"hidden_size": 10**12},
        "hidden 2^30": {"hidden_size": 2**30},
        "hidden negative": {"hidden_size": -8},
        "hidden true": {"hidden_size": True},
        "hidden list": {"hidden_size": [8]},
        "vocabulary float": {"vocab_size": 16.5},
        "heads 0": {"num_attention_heads": 0},
        "epsilon text": {"rms_norm_eps": "small"},
        "epsilon infinite": {"rms_norm_eps": float("inf")},
        "rope list": {"rope_scaling": [1]},
        "rope factor text": {"rope_scaling": {"rope_type": "llama3", "factor": "x"}},
        "rope kind list": {"rope_scaling": {"rope_type": ["llama3"]}},
        "rope base 10^400": {"rope_theta": 10**400},
        "dropout text": {"attention_dropout": "no"},
        "activation object": {"hidden_act": {"a": 1}},
        "architectures number": {"architectures": 3},
        "architectures escape": {"architectures": ["\x1b[2J\n[ERROR] forged"]},
        "no architectures": {"architectures": None},
        "tied text": {"tie_word_embeddings": "yes"},
    }
    found = {k: _writes("config.json", json.dumps(CONFIG | v)) for k, v in fields.items()}
    found["hidden 2^30"] = (found["hidden 2^30"][0], "but config.json requires")
    found["layers of no tensor"] = (found["layers of no tensor"][0], "config.json claims")
    texts = {
        "deep": DEEP,
        "list": "[]",
        "number": "3",
        "empty": "",
        "digits": "9" * 10_000,
        "binary": b"\xff\xfe\x00",
        "surrogate": '{"a": "\ud800"}',
        "large": "[" + "0," * (1 << 23),
        "pickle": pickle.dumps(Touch(canary)),
    }
    found |= {f"config {k}": _writes("config.json", v) for k, v in texts.items()}
    for kind in ("fifo", "device", "folder"):
        found[f"config {kind}"] = (
            lambda f, kind=kind: special(f / "config.json", kind),
            "config.json",
        )
    return found


def _indices() -> Changes:
    maps: dict[str, Any] = {
        "outside": {"weight_map": {"a": "../../x.safetensors"}},
        "absolute": {"weight_map": {"a": "/etc/passwd"}},
        "folder itself": {"weight_map": {"a": ".."}},
        "numbers": {"weight_map": {"a": 3}},
        "lists": {"weight_map": {"a": ["b"]}},
        "list": {"weight_map": ["a"]},
        "none": {},
        "missing file": {"weight_map": {"a": "other.safetensors"}},
        "null byte": {"weight_map": {"a": "x\x00y"}},
        "escape": {"weight_map": {"a": "\x1b[2J\n[ERROR] forged"}},
    }
    found = {f"index: {k}": _writes(INDEX, json.dumps(v)) for k, v in maps.items()}
    for name in ("folder itself", "missing file", "null byte", "escape"):
        found[f"index: {name}"] = (found[f"index: {name}"][0], "of its 1 files")
    found["index: deep"] = _writes(INDEX, DEEP)
    found["index: empty"] = _writes(INDEX, "")
    for kind in ("fifo", "device", "folder"):
        found[f"index {kind}"] = (lambda f, kind=kind: special(f / INDEX, kind), INDEX)
    return found


def _files(canary: Path) -> Changes:
    file = "model-00001-of-00001.safetensors"
    one = {"dtype": "F32", "shape": [16, 8], "data_offsets": [0, 512]}
    files = {
        "empty": b"",
        "short": b"\x01",
        "pickle": pickle.dumps(Touch(canary)),
        "length 2^63": header({}, length=1 << 63),
        "length beyond": header({}, length=10**8),
        "deep": header(DEEP.encode()),
        "list": header([]),
        "shape 10^12": header({"a": one | {"shape": [10**6, 10**6]}}, data=bytes(512)),
        "shape negative": header({"a": one | {"shape": [-1]}}, data=bytes(512)),
        "offsets beyond": header({"a": one | {"data_offsets": [0, 10**12]}}, data=bytes(512)),
        "offsets swapped": header({"a": one | {"data_offsets": [512, 0]}}, data=bytes(512)),
        "overlap": header({"a": one, "b": one}, data=bytes(512)),
        "unknown type": header({"a": one | {"dtype": "X"}}, data=bytes(512)),
        "not UTF-8": header(b'{"\xff": 1}'),
    }
    found = {f"file: {k}": _writes(file, v) for k, v in files.items()}
    found["file: other tensors"] = _writes(file, header({"a": one}, data=bytes(512)))
    for kind in ("fifo", "device"):
        found[f"file {kind}"] = (lambda f, kind=kind: special(f / file, kind), file)

    def pickled(folder: Path) -> None:
        (folder / INDEX).unlink()
        (folder / file).unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(canary)))

    found["pickles alone"] = (pickled, INDEX)
    return found
