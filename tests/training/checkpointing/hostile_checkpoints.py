"""Change copies of a good checkpoint so that they run a command, claim false sizes, block a reader
or are damaged.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.training.checkpointing import hostile_pickles
from tests.training.checkpointing.hostile_pickles import Touch, archive, saved

TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Case:
    """A folder to open, and the file that the refusal must name."""

    name: str
    kind: str
    folder: Path
    names: str


class Checkpoint:
    """A copy of a good checkpoint, and ways to change it."""

    def __init__(self, folder: Path, *, iteration: int = 4):
        self.folder = folder
        self.path = folder / f"iter_{iteration:07d}"
        self.index = self.path / ".metadata"
        self.common = self.path / "common.pt"

    def edit_index(self, change: Callable[[Any], None]) -> None:
        """Unpickle the index, change the object, and write it back."""
        index = pickle.loads(self.index.read_bytes())
        change(index)
        self.index.write_bytes(pickle.dumps(index))

    def edit_common(self, change: Callable[[Any], None]) -> None:
        """Change the state that is the same on every rank."""
        common = torch.load(self.common, weights_only=True)
        change(common)
        torch.save(common, self.common)

    def replace(self, part: str, data: bytes) -> None:
        """Replace the first object whose name starts with `part` by `data`."""
        file = self.path / "__0_0.distcp"
        offset = file.stat().st_size
        with file.open("ab") as end:
            end.write(data)

        def change(index: Any) -> None:
            key = next(k for k in index.storage_data if k.fqn.startswith(part))
            place = index.storage_data[key]
            place.relative_path, place.offset, place.length = file.name, offset, len(data)

        self.edit_index(change)


def special(path: Path, kind: str) -> None:
    """Replace a file by one that blocks a reader or has no end."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


def checkpoints(good: Path, root: Path, canary: Path) -> Iterator[Case]:
    """Write every changed checkpoint to a folder of its own and yield its case."""

    def case(name: str, change: Callable[[Checkpoint], None], names: str) -> Case:
        folder = root / f"{len(list(root.iterdir())):03d}"
        shutil.copytree(good, folder)
        change(Checkpoint(folder))
        return Case(name, "checkpoint", folder, names)

    for changes in (_indices, _commons, _trackers, _formats, _parts):
        for name, (change, names) in changes(canary).items():
            yield case(f"{changes.__name__[1:]}: {name}", change, names)


Changes = dict[str, tuple[Callable[[Checkpoint], None], str]]


def _indices(canary: Path) -> Changes:
    files = hostile_pickles.programs(canary) | hostile_pickles.bombs() | hostile_pickles.damaged()
    found: Changes = {
        name: (lambda c, data=data: c.index.write_bytes(data), ".metadata")
        for name, data in files.items()
    }
    for name, edit in _index_edits(canary).items():
        found[name] = (lambda c, edit=edit: c.edit_index(edit), ".metadata")
    for kind in ("fifo", "device", "folder"):
        found[kind] = (lambda c, kind=kind: special(c.index, kind), ".metadata")
    found["half"] = (
        lambda c: c.index.write_bytes(c.index.read_bytes()[:7000]),
        ".metadata",
    )
    found["escape sequences"] = (
        lambda c: c.edit_index(lambda i: _rename(i, "\x1b[2J\n[ERROR] forged")),
        ".metadata",
    )
    return found


def _weight(index: Any) -> Any:
    return index.state_dict_metadata["embedding.word_embeddings.weight"]


def _place(index: Any) -> Any:
    return next(p for k, p in index.storage_data.items() if k.fqn.startswith("embedding."))


def _rename(index: Any, name: str) -> None:
    index.state_dict_metadata[name] = _weight(index)


def _index_edits(canary: Path) -> dict[str, Callable[[Any], None]]:
    return {
        "command inside": lambda i: setattr(i, "planner_data", {"a": Touch(canary)}),
        "10^12 elements": lambda i: setattr(_weight(i), "size", torch.Size([10**6, 10**6])),
        "huge part": lambda i: setattr(_weight(i).chunks[0], "sizes", torch.Size([10**12, 32])),
        "negative": lambda i: setattr(_weight(i), "size", torch.Size([-128, -32])),
        "no parts": lambda i: _weight(i).chunks.clear(),
        "twice": lambda i: _weight(i).chunks.append(_weight(i).chunks[0]),
        "shape is text": lambda i: setattr(_weight(i), "size", "128x32"),
        "type is text": lambda i: setattr(_weight(i).properties, "dtype", "float32"),
        "tensor is a list": lambda i: i.state_dict_metadata.update({"decoder.x": [1]}),
        "tensors are a list": lambda i: setattr(i, "state_dict_metadata", [1]),
        "no places": lambda i: setattr(i, "storage_data", None),
        "a place is missing": lambda i: i.storage_data.popitem(),
        "place outside": lambda i: setattr(_place(i), "relative_path", "../../secret"),
        "absolute place": lambda i: setattr(_place(i), "relative_path", "/etc/passwd"),
        "place is a number": lambda i: setattr(_place(i), "relative_path", 3),
        "beyond the end": lambda i: setattr(_place(i), "offset", 10**12),
        "negative length": lambda i: setattr(_place(i), "length", -1),
        "transformed": lambda i: setattr(_place(i), "transform_descriptors", ["zstd"]),
    }


def _commons(canary: Path) -> Changes:
    found: Changes = {}
    pickles = hostile_pickles.programs(canary) | hostile_pickles.bombs()
    files = {name: archive(data) for name, data in pickles.items()}
    files |= {f"raw {k}": v for k, v in hostile_pickles.damaged().items()}
    files |= {"raw program": pickle.dumps(Touch(canary))}
    files |= {f"holds {k}": saved(v) for k, v in (("3", 3), ("a list", [1, [2, [3]]]))}
    files |= hostile_pickles.claims()
    for name, data in files.items():
        found[name] = (lambda c, data=data: c.common.write_bytes(data), "common.pt")
    edits: dict[str, Callable[[Any], Any]] = {
        "progress is a list": lambda c: c.update(progress=[4]),
        "iteration is text": lambda c: c["progress"].update(iteration="4"),
        "iteration is negative": lambda c: c["progress"].update(iteration=-4),
        "iteration is huge": lambda c: c["progress"].update(iteration=10**30),
        "args are a number": lambda c: c.update(args=3),
        "an arg is a tensor": lambda c: c["args"].update(num_layers=torch.ones(3)),
        "progress is short": lambda c: c["progress"].pop("levels"),
        "a flag is missing": lambda c: c["args"].pop("rotary_base"),
        "run is a list": lambda c: c.update(run=["a"]),
        "no run": lambda c: c.pop("run"),
        "has_optim is text": lambda c: c.update(has_optim="yes"),
        "no has_rng": lambda c: c.pop("has_rng"),
        "schedule is a list": lambda c: c.update(opt_param_scheduler=[1]),
        "steps are text": lambda c: c["opt_param_scheduler"].update(num_steps="32"),
        "schedule is short": lambda c: c["opt_param_scheduler"].pop("max_lr"),
        "optimizer is a number": lambda c: c.update(optimizer=3),
        "no groups": lambda c: c["optimizer"].update(param_groups=[]),
        "rate is text": lambda c: c["optimizer"]["param_groups"][0].update(lr="fast"),
        "rate is NaN": lambda c: c["optimizer"]["param_groups"][0].update(eps=float("nan")),
    }
    special_names = {
        "schedule is short": "iter_0000004",
        "no groups": "iter_0000004",
        "a flag is missing": "iter_0000004 does not record rotary_base; only complete checkpoints",
    }
    for name, edit in edits.items():
        names = special_names.get(name, "common.pt")
        found[name] = (lambda c, edit=edit: c.edit_common(edit), names)
    for kind in ("fifo", "device"):
        found[kind] = (lambda c, kind=kind: special(c.common, kind), "common.pt")
    return found


def _trackers(_: Path) -> Changes:
    files = {
        "5000 digits": b"9" * 5000,
        "50 digits": b"9" * 50,
        "superscript": "²".encode(),
        "Arabic digit": "٤".encode(),
        "empty": b"",
        "binary": bytes(range(256)),
        "negative": b"-4",
        "two lines": b"4\n[ERROR] forged",
        "escape sequence": b"\x1b[2J4",
        "no such iteration": b"7",
    }
    found: Changes = {
        name: (
            lambda c, data=data: (c.folder / TRACKER).write_bytes(data),
            TRACKER if name != "no such iteration" else "iter_0000007",
        )
        for name, data in files.items()
    }
    for kind in ("fifo", "device", "folder"):
        found[kind] = (lambda c, kind=kind: special(c.folder / TRACKER, kind), TRACKER)
    return found


def _formats(_: Path) -> Changes:
    good = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    files = {
        "another": json.dumps(good | {"sharded_backend": "zarr"}),
        "another common": json.dumps(good | {"common_backend": "pickle"}),
        "more fields": json.dumps(good | {"run": "touch x"}),
        "version is text": json.dumps(good | {"sharded_backend_version": "1"}),
        "list": "[]",
        "number": "1e999",
        "deep": "[" * 100_000,
        "empty": "",
        "twice": '{"sharded_backend": "torch_dist", "sharded_backend": "zarr"}',
    }
    found: Changes = {
        name: (
            lambda c, text=text: (c.path / "metadata.json").write_text(text),
            "metadata.json",
        )
        for name, text in files.items()
    }
    for kind in ("fifo", "device"):
        found[kind] = (
            lambda c, kind=kind: special(c.path / "metadata.json", kind),
            "metadata.json",
        )
    return found


def _parts(canary: Path) -> Changes:
    first = "__0_0.distcp"
    objects = {
        f"random states: {name}": archive(data)
        for name, data in (hostile_pickles.programs(canary) | hostile_pickles.bombs()).items()
    }
    objects |= {f"random states: {k}": v for k, v in hostile_pickles.claims().items()}
    found: Changes = {
        name: (lambda c, data=data: c.replace("rng_state", data), "iter_0000004")
        for name, data in objects.items()
    }
    states = {
        "are none": [None],
        "are a number": 3,
        "are incomplete": [{"random": (3, (1,), None)}],
        "are text": [{"random": "x", "numpy": "y", "torch": "z", "cuda": "", "tracker": {}}],
    }
    for name, value in states.items():
        found[f"random states {name}"] = (
            lambda c, value=value: c.replace("rng_state", saved(value)),
            "iter_0000004",
        )
    extra = archive(b"\x80\x02]" + text_of_bytes() + b"a.")
    found["Transformer Engine's state"] = (
        lambda c: c.replace("decoder.layers.self_attention.linear_proj._extra_state", extra),
        "_extra_state",
    )
    weights = {
        "weight that runs a command": archive(pickle.dumps(Touch(canary), protocol=2)),
        "weight of another shape": saved(torch.ones(4, 4)),
        "weight that is a list": saved([1]),
    } | {f"weight: {name}": data for name, data in hostile_pickles.claims().items()}
    for name, data in weights.items():
        found[name] = (
            lambda c, data=data: c.replace("embedding.word_embeddings", data),
            "iter_0000004",
        )
    files = {"empty": b"", "foreign": b"foreign\n" * 40_000, "short": b"PK\x03\x04"}
    for name, data in files.items():
        found[f"file is {name}"] = (lambda c, data=data: (c.path / first).write_bytes(data), first)
    for kind in ("fifo", "device", "folder"):
        found[kind] = (lambda c, kind=kind: special(c.path / first, kind), first)
    found["another file is a fifo"] = (lambda c: special(c.path / "notes", "fifo"), "notes")
    found["missing"] = (lambda c: (c.path / first).unlink(), first)
    return found


def text_of_bytes() -> bytes:
    """Return the operations that push a byte string."""
    return (
        b"c_codecs\nencode\n"
        + hostile_pickles.text("abc")
        + hostile_pickles.text("latin1")
        + b"\x86R"
    )
