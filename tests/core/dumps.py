"""Check that a folder of tensors is consistent, however its runs ended."""

import hashlib
import json
from pathlib import Path

import torch

from megatron.analysis.store import TensorStore
from megatron.tensor_record import PARTIAL_SUFFIX, TensorRecord


def assert_sound(folder: Path, known: dict[str, str] | None = None) -> dict[str, str]:
    """Check that every `.pt` file, index and run card can be read.

    Every index line but the last is JSON and has its file, and every index has a run card.

    Args:
        folder: folder of the tensors.
        known: an earlier result of this function; its files must be unchanged and are not read
            again.

    Returns:
        The hash of each `.pt` file by name.
    """
    known = known or {}
    hashes = {path.name: _hash(path) for path in folder.glob("*.pt")}
    assert {name: hashes.get(name) for name in known} == known, "nothing was overwritten"
    for name in hashes.keys() - known.keys():
        content = torch.load(folder / name, weights_only=True)
        record = TensorRecord.from_metadata(content["metadata"])
        assert list(content["tensor"].shape) == record.shape
    cards = {path.name for path in folder.glob("run_*.json")}
    for path in folder.glob("run_*.json"):
        assert json.loads(path.read_text())["run_id"] in path.name
    named: list[str] = []
    for path in folder.glob("index_*.jsonl"):
        assert f"run_{run_of(path)}.json" in cards
        lines = index_lines(path)
        counters = [line["counter"] for line in lines if "event" not in line]
        assert len(set(counters)) == len(counters)
        named += [line["file"] for line in lines if "event" not in line]
    assert len(set(named)) == len(named), "each file is listed in only one index"
    assert set(named) <= hashes.keys(), "no index line without its file"
    if hashes:
        store = TensorStore(folder)
        assert store.problems == []
        assert len(store.missing) == 0
        assert len(store) == len(hashes)
    return hashes


def index_lines(path: Path) -> list[dict]:
    """Return the lines of one index, of which the last may be cut off."""
    lines = path.read_text().split("\n")
    whole = [json.loads(line) for line in lines[:-1]]
    assert not lines[-1] or not _is_json(lines[-1]), "a whole line ends with a line break"
    return whole


def run_of(index: Path) -> str:
    """Return the id of the run that an index belongs to."""
    return index.stem.removeprefix("index_").rpartition("_rank")[0]


def partial_files(folder: Path) -> list[str]:
    """Return the names of files that are being written or were left unfinished."""
    return [path.name for path in folder.glob(f"*{PARTIAL_SUFFIX}")]


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
