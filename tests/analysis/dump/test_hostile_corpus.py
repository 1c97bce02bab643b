"""Test every reader on over a hundred hostile files and folders.

Every hostile file is reported in one line, without a traceback, in bounded time and memory, and the
good files beside it are read. The hostile files are in a few dumps, because a reader needs some
time per dump, but every assertion is about one file.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests import forks
from tests.analysis.dump import hostile_worker
from tests.analysis.dump.hostile_tensors import TENSORS
from tests.analysis.dump.hostile_texts import CARDS, INDEX_PLACES, INDEXES
from tests.analysis.fake_dump import records, values, write_tensor
from tests.subprocesses import REPO, environment

READERS = tuple(hostile_worker.READERS)
SECONDS = 60  #: time limit for one reader of one dump, in seconds; an idle machine needs about 3


def good_tensors(folder: Path, run_id: str, count: int = 2) -> list[tuple[Path, dict]]:
    """Write the good files of one run; return each with its line for an index."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    found = []
    for number, (record, shape, scale) in enumerate(records(run_id=run_id, quant_type="mxfp8")):
        if number == count:
            break
        path = write_tensor(folder, record, values(shape, scale, generator))
        line = record.to_metadata() | {"file": path.name, "bytes": path.stat().st_size}
        found.append((path, line))
    return found


def name_of(kind: str) -> str:
    return re.sub(r"\W+", "_", kind)


def write_tensors(dump: Path) -> dict[str, Path]:
    """Write one folder per kind, with a good file and a hostile one, and no index."""
    hostile = {}
    for kind, (make, _) in TENSORS.items():
        _, (path, _) = good_tensors(dump / name_of(kind), f"run_{name_of(kind)}")
        hostile[kind] = path
        make(path)
    return hostile


def write_indexes(dump: Path) -> dict[str, Path]:
    """Write one folder per kind, with two good files, one of them listed in a hostile line."""
    hostile = {}
    for kind, (change, _) in INDEXES.items():
        run_id = f"run_{name_of(kind)}"
        (_, line), (_, other) = good_tensors(dump / name_of(kind), run_id)
        index = hostile[kind] = dump / name_of(kind) / f"index_{run_id}_rank00.jsonl"
        with index.open("wb") as file:
            for content in change(line):
                file.write(content)
            file.write(json.dumps(other).encode() + b"\n")
    for kind, (make, _) in INDEX_PLACES.items():
        run_id = f"run_place_{name_of(kind)}"
        good_tensors(dump / f"place_{name_of(kind)}", run_id)
        hostile[f"place: {kind}"] = dump / f"place_{name_of(kind)}" / f"index_{run_id}_rank00.jsonl"
        make(hostile[f"place: {kind}"])
    return hostile


def write_cards(dump: Path) -> dict[str, Path]:
    hostile = {}
    for kind, (write, _) in CARDS.items():
        run_id = f"run_{name_of(kind)}"
        good_tensors(dump / name_of(kind), run_id)
        hostile[kind] = dump / name_of(kind) / f"run_{run_id}.json"
        write(hostile[kind], {"run_id": run_id, "quant_type": "mxfp8"})
    return hostile


SAYS = {
    "tensors": {kind: says for kind, (_, says) in TENSORS.items()},
    "indexes": {kind: says for kind, (_, says) in INDEXES.items()}
    | {f"place: {kind}": says for kind, (_, says) in INDEX_PLACES.items()},
    "cards": {kind: says for kind, (_, says) in CARDS.items()},
}
GOOD = {"tensors": len(TENSORS), "indexes": 2 * len(SAYS["indexes"]), "cards": 2 * len(CARDS)}


def read_all(folder: Path, *dumps: Path) -> dict:
    """Run every reader on the dumps in a process of its own, and return what each printed."""
    result = folder / "told.json"
    worker = Path(hostile_worker.__file__)
    done = forks.run(worker, result, *dumps, env=environment(PYTHONPATH=REPO))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Write the hostile files of each dump, and run every reader on it."""
    folder = tmp_path_factory.mktemp("corpus")
    writers = {"tensors": write_tensors, "indexes": write_indexes, "cards": write_cards}
    hostile = {name: write(folder / name) for name, write in writers.items()}
    found = read_all(folder, *(folder / name for name in writers))
    yield hostile, found
    shutil.rmtree(folder)


def test_the_corpus_is_large():
    assert sum(map(len, SAYS.values())) >= 100


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("dump", SAYS)
def test_every_reader_ends_without_a_traceback(corpus, dump, reader):
    told = corpus[1][f"{dump}/{reader}"]
    assert "Traceback" not in told["err"] + told["out"]
    assert told["status"] == {"store": 0, "verify": 1}.get(reader, 3), told["err"][-2000:]
    assert told["seconds"] < SECONDS


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(("dump", "kind"), [(d, k) for d, kinds in SAYS.items() for k in kinds])
def test_a_hostile_file_is_named_in_one_line(corpus, dump, kind, reader):
    hostile, found = corpus
    told = found[f"{dump}/{reader}"]
    path = str(hostile[dump][kind])
    lines = (told["out"] + told["err"]).splitlines()
    named = [line for line in lines if f"{path}: " in line]
    assert len(named) == 1, named
    assert re.search(SAYS[dump][kind], named[0].partition(f"{path}: ")[2])
    assert len(named[0]) < len(path) + 1200


@pytest.mark.parametrize("dump", SAYS)
def test_the_good_files_are_read(corpus, dump):
    found = corpus[1]
    assert found[f"{dump}/store"]["out"].count("loaded ") == GOOD[dump]
    assert f"\n{GOOD[dump]} tensors, " in f"\n{found[f'{dump}/stats']['out']}"
    assert f"{GOOD[dump]} tensors\n" in found[f"{dump}/quick"]["out"]
    assert f"{GOOD[dump]} tensors\n" in found[f"{dump}/report"]["out"]
    assert f"checked: {GOOD[dump]} files\n" in found[f"{dump}/verify"]["out"]
