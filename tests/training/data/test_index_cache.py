"""Cached sample indices are used only with the data that they were made from."""

import os
import sys
from pathlib import Path

from megatron.training.data.paths import index_state
from tests.subprocesses import REPO
from tests.training.runs import MODEL, refused, train

sys.path.insert(0, str(REPO / "script/data"))

import preprocess

SHORT = (*MODEL, "--train-iters", "1", "--split", "100,0,0")
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "127", "--append-eod")


def make(folder: Path, documents: int) -> Path:
    """Write a data set with the given number of documents, always with the same prefix."""
    rows = (" ".join(str((i + k) % 97) for k in range(20 + i % 50)) for i in range(documents))
    (folder / "in.txt").write_text("\n\n".join(rows))
    where = ["--input", str(folder / "in.txt"), "--output-prefix", str(folder / "o")]
    assert preprocess.main([*where, *NULL, "--workers", "1", "--overwrite"]) == 0
    return folder / "o_text_document"


def test_data_that_are_made_again_get_new_indices(tmp_path):
    """A run with outdated indices would read missing or wrong documents."""
    data = make(tmp_path, documents=300)
    assert train("--data-path", data, model=SHORT).status == 0
    make(tmp_path, documents=100)
    again = train("--data-path", data, model=SHORT)
    assert again.status == 0, again.errors
    fresh = train("--data-path", data, "--data-cache-path", tmp_path / "new", model=SHORT)
    assert again.lines[1]["loss"] == fresh.lines[1]["loss"]
    assert again.lines[1]["norm"] == fresh.lines[1]["norm"]


def test_a_cache_folder_that_cannot_be_written_is_refused(run_quickly, corpus):
    message = refused(run_quickly("--data-cache-path", f"{corpus}.bin"))
    assert f"{corpus}.bin" in message
    assert "can be written" in message


def test_the_state_of_an_index(tmp_path):
    """The state covers path, size and time of every index in a blend, and their order."""
    for name in "ab":
        (tmp_path / f"{name}.idx").write_bytes(b"1234")
        os.utime(tmp_path / f"{name}.idx", ns=(10**18, 10**18))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    state = index_state([a])
    assert index_state([a]) == state
    assert len({state, index_state([b]), index_state([a, b]), index_state([b, a])}) == 4
    os.utime(f"{a}.idx", ns=(10**18, 10**18 + 1))
    later = index_state([a])
    Path(f"{a}.idx").write_bytes(b"12345")
    os.utime(f"{a}.idx", ns=(10**18, 10**18 + 1))
    assert len({state, later, index_state([a])}) == 3
