"""Make tokenizers that run code, claim false sizes, block a reader or are damaged."""

import base64
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.training.checkpointing.hostile_checkpoints import Case, special
from tests.training.checkpointing.hostile_pickles import Touch

MODEL = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1, "<eos>": 2}, "unk_token": "[UNK]"}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": MODEL,
}
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
DEEP = "[" * 100_000 + "]" * 100_000
BYTES = b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))


def tokenizers(root: Path, canary: Path) -> Iterator[Case]:
    """Write every tokenizer to a folder of its own and yield its case."""
    for name, files in (_settings(canary) | _vocabularies() | _models(canary)).items():
        folder = root / f"tokenizer {len(list(root.iterdir()))}"
        folder.mkdir()
        for file, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (folder / file).write_bytes(data)
        last = next(reversed(files))
        names = last if "tokenizer.model" in files or name.startswith("settings") else folder.name
        yield Case(name, "tokenizer", folder, names)
    for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "added_tokens.json"):
        for kind in ("fifo", "device"):
            folder = root / f"tokenizer {len(list(root.iterdir()))}"
            folder.mkdir()
            if "added" in file:
                (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
            special(folder / file, kind)
            yield Case(f"{file} is a {kind}", "tokenizer", folder, file)


def _with(name: str, content: str) -> dict[str, str]:
    return {"tokenizer.json": json.dumps(TOKENIZER), name: content}


def _settings(canary: Path) -> dict[str, dict[str, Any]]:
    code = f"open({str(canary)!r}, 'w')\n"
    classes = ("AutoModelForCausalLM", "pipeline", "TrainingArguments", "RagTokenizer", 3, ["x"])
    found: dict[str, dict[str, Any]] = {
        f"settings: class {kind}": _with(
            "tokenizer_config.json", json.dumps(SETTINGS | {"tokenizer_class": kind})
        )
        for kind in classes
    }
    own = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]},
    }
    found["code of its own"] = _with("tokenizer_config.json", json.dumps(own)) | {"own.py": code}
    for file in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        for name, text in (("deep", DEEP), ("list", "[]"), ("number", "3"), ("escape", "\x1b[2J")):
            found[f"settings: {file} {name}"] = _with(file, text)
    odd = {
        "map is a number": {"auto_map": 3},
        "token is a number": {"eos_token": 3},
        "length is text": {"model_max_length": "x"},
        "added tokens": {"added_tokens_decoder": {"x": {"content": "x"}}},
    }
    for name, fields in odd.items():
        found[name] = _with("tokenizer_config.json", json.dumps(SETTINGS | fields))
    return found


def _vocabularies() -> dict[str, dict[str, Any]]:
    texts = {
        "deep": DEEP,
        "list": "[]",
        "empty": "",
        "binary": b"\xff\xfe",
        "id 10^30": json.dumps(TOKENIZER | {"model": MODEL | {"vocab": {"[UNK]": 10**30}}}),
        "id negative": json.dumps(TOKENIZER | {"model": MODEL | {"vocab": {"[UNK]": -1}}}),
        "no tokens": json.dumps(TOKENIZER | {"model": MODEL | {"vocab": {}}}),
        "pattern": json.dumps(
            TOKENIZER
            | {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": {"Regex": "(" * 5000},
                    "behavior": "Isolated",
                    "invert": False,
                }
            }
        ),
    }
    return {f"vocabulary: {name}": {"tokenizer.json": text} for name, text in texts.items()}


def _models(canary: Path) -> dict[str, dict[str, Any]]:
    files = {
        "empty": b"",
        "pickle": pickle.dumps(Touch(canary)),
        "random": bytes(range(256)) * 4,
        "text": b"hello\n" * 10,
        "long field": b"\x0a\xff\xff\xff\xff\x0f",
        "rank negative": BYTES + b"YWI= -5\n",
        "rank 2^32": BYTES + b"YWI= 4294967296\n",
        "rank below 2^32": BYTES + b"YWI= 4294967000\n",
        "rank of 5000 digits": BYTES + b"YWI= " + b"9" * 5000 + b"\n",
        "rank superscript": BYTES + "YWI= ²\n".encode(),
        "rank twice": BYTES + b"YWI= 5\n",
        "no token": BYTES + b" 300\n",
        "not base64": BYTES + b"\x1b[2J 300\n",
        "few bytes": b"YQ== 1\nYg== 2\n",
    }
    return {f"model: {name}": {"tokenizer.model": data} for name, data in files.items()}
