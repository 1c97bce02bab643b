"""script/data/default_corpus.py works as the drivers call it."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forks
from tests.subprocesses import REPO, environment, run

SCRIPT = REPO / "script/data/default_corpus.py"


def command(folder: Path) -> list[str]:
    return [sys.executable, *words(folder)]


def words(folder: Path) -> list[str]:
    where = ["--output-dir", str(folder / "data"), "--model-dir", str(folder / "model")]
    return [str(SCRIPT), *where]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Make the corpus by two simultaneous calls, as when two drivers start."""
    folder = tmp_path_factory.mktemp("made")
    calls = [
        subprocess.Popen(
            command(folder), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [call.communicate(timeout=120) for call in calls]
    assert [call.returncode for call in calls] == [0, 0], outputs
    assert [out for out, _ in outputs] == [b"", b""]
    assert sum(b"Training a tokenizer" in err for _, err in outputs) == 1
    return folder


def test_the_files_are_there_and_nothing_else(made):
    assert list(digests(made)) == [
        "data/corpus.jsonl",
        "data/corpus_text_document.bin",
        "data/corpus_text_document.idx",
        "data/corpus_text_document.json",
        "model/.lock",
        "model/tokenizer.model",
    ]


def test_every_topic_comes_back_from_the_token_ids(made):
    import sentencepiece

    from megatron.core.datasets.indexed_dataset import IndexedDataset

    model = sentencepiece.SentencePieceProcessor(str(made / "model/tokenizer.model"))
    dataset = IndexedDataset(str(made / "data/corpus_text_document"))
    rows = [json.loads(line) for line in (made / "data/corpus.jsonl").read_text().splitlines()]
    assert len(rows) == len(dataset) > 50
    assert sum(dataset.sequence_lengths) > 100_000
    for row, ids in zip(rows, dataset, strict=True):
        assert ids[-1] == model.eos_id()
        assert model.decode(ids[:-1].tolist()) == row["text"], row["topic"]


def test_the_second_call_does_nothing_at_once(made):
    before = {path: path.stat().st_mtime_ns for path in made.rglob("*")}
    times = []
    for _ in range(3):
        started = time.perf_counter()
        result = run(command(made))
        times.append(time.perf_counter() - started)
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert min(times) < 0.5
    assert {path: path.stat().st_mtime_ns for path in made.rglob("*")} == before


def test_what_is_missing_is_made_again_the_same(made):
    before = digests(made)
    (made / "data/corpus_text_document.idx").unlink()
    assert forks.run(*words(made)).returncode == 0
    assert digests(made) == before
    (made / "model/tokenizer.model").unlink()
    result = forks.run(*words(made))
    assert "Training a tokenizer" in result.stderr
    assert digests(made) == before


def test_a_python_without_its_topics(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data/__init__.py").touch()
    result = run(command(tmp_path), env=environment(PYTHONPATH=tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("[ERROR] ")
    assert "lacks its documentation topics" in result.stderr
    assert "script/data/preprocess.py" in result.stderr


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "data").touch()
    result = forks.run(*words(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("[ERROR] cannot make the default corpus")
    assert "--output-dir" in result.stderr
