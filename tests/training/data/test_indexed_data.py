"""Damaged data ends a run before training with one line that names the file, on every rank."""

import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from megatron.training.data.index_cache import check_samples
from megatron.training.data.indexed_data import BLOCK, check_index, read_header
from megatron.training.errors import UserError
from tests import hostile_inputs
from tests.training.corpus import DOCUMENTS
from tests.training.runs import refused, succeeded

HEADER = 34


def copy_of(corpus: Path, folder: Path) -> Path:
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus}{suffix}", folder / f"c{suffix}")
    return folder / "c"


def change(prefix: Path, offset: int, form: str, value: int) -> None:
    content = bytearray(Path(f"{prefix}.idx").read_bytes())
    struct.pack_into(form, content, offset, value)
    Path(f"{prefix}.idx").write_bytes(content)


def test_a_wrong_place_is_found_before_training(run_quickly, corpus, tmp_path):
    """Without the check, the run would train on the wrong tokens."""
    prefix = copy_of(corpus, tmp_path)
    change(prefix, HEADER + 4 * DOCUMENTS + 8 * 5, "<q", 14)
    line = refused(run_quickly("--data-path", prefix))
    assert f"data file {prefix}.idx: sequence 5 has a wrong length or position" in line
    assert line.endswith(
        "make the data again with script/data/preprocess.py, or get the files again"
    )


def test_every_wrong_byte_that_training_reads_is_found(tmp_path):
    """Only the bounds between documents are left out, because documents may have any length."""
    prefix = hostile_inputs.sound_pair(tmp_path)
    check_index(str(prefix))
    path = Path(f"{prefix}.idx")
    content = path.read_bytes()
    first = hostile_inputs.BOUNDS + 8
    for offset in (*range(first), *range(first + 16, len(content))):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        with pytest.raises(UserError, match=r"d\.idx"):
            check_index(str(prefix))


def test_large_indexes_are_checked_in_blocks(tmp_path):
    count = 2 * BLOCK + 3
    lengths = np.full(count, 2, dtype="<i4")
    places = np.arange(count, dtype="<i8") * 4

    def write() -> None:
        header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
        bounds = np.arange(count + 1, dtype="<i8")
        content = header + lengths.tobytes() + places.tobytes() + bounds.tobytes()
        (tmp_path / "l.idx").write_bytes(content)

    (tmp_path / "l.bin").write_bytes(b"")
    with (tmp_path / "l.bin").open("wb") as file:
        file.truncate(4 * count)
    write()
    assert read_header(str(tmp_path / "l")).problems() == []
    places[BLOCK + 7] += 2
    write()
    (problem,) = read_header(str(tmp_path / "l")).problems()
    assert problem.startswith(f"sequence {BLOCK + 7} has a wrong length or position")


def test_empty_sequences_train_but_are_reported_by_a_check(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "e.bin"), dtype=np.uint16)
    for length in (2, 0, 3):
        builder.add_document(np.ones(length), [length])
    builder.finalize(str(tmp_path / "e.idx"))
    check_index(str(tmp_path / "e"))
    (problem,) = read_header(str(tmp_path / "e")).problems()
    assert problem.startswith("sequence 1 has a wrong length or position")


def test_a_negative_token_id_is_refused(run_quickly, tmp_path):
    import torch

    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "n.bin"), dtype=np.int32)
    for _ in range(DOCUMENTS):
        builder.add_item(torch.arange(100) - 5)
        builder.end_document()
    builder.finalize(str(tmp_path / "n.idx"))
    line = refused(run_quickly("--data-path", tmp_path / "n"), status=1)
    assert "the data holds token id -5, but ids begin at 0" in line


# The following tests concern the sample indices on disk.


@pytest.fixture(scope="module")
def cached(run_quickly, tmp_path_factory) -> Path:
    """Return the folder of a run's sample indices."""
    folder = tmp_path_factory.mktemp("indices")
    succeeded(run_quickly("--data-cache-path", folder))
    return folder


def test_a_damaged_sample_index_ends_the_run(run_quickly, cached, tmp_path):
    """megatron-core would unpickle a file that is not an array, which may execute code."""
    folder = Path(shutil.copytree(cached, tmp_path / "cache"))
    assert succeeded(run_quickly("--data-cache-path", folder)), "undamaged indices are accepted"
    (index,) = folder.glob("*/*-train-document_index.npy")
    index.write_bytes(b"cos\nmkdir\n(S'executed'\ntR.")
    line = refused(run_quickly("--data-cache-path", folder))
    assert f"sample index {index}: not an array" in line
    assert f"delete the folder {index.parent}; the next run recreates it" in line

    (index,) = folder.glob("*/*-train-shuffle_index.npy")
    (other,) = cached.glob("*/*-train-document_index.npy")
    shutil.copy(other, folder / index.parent.name / other.name)
    order = np.load(index)
    order[0] = order[1]
    np.save(index, order)
    line = refused(run_quickly("--data-cache-path", folder))
    assert f"{index.name}: does not fit the data (not every sample occurs exactly once)" in line


@pytest.fixture
def samples(corpus):
    """Return a data set of megatron-core with 1.5 epochs of sample indices in memory."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split
    from megatron.training.data.tokenizer import build_tokenizer

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=64,
        blend=([str(corpus)], None),
        split="100,0,0",
        tokenizer=build_tokenizer("NullTokenizer", vocab_size=127),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=None,
        mid_level_dataset_surplus=0.005,
    )
    indexed = IndexedDataset(str(corpus))
    config.mock = True  # keeps the indices only in memory
    tokens = int(indexed.sequence_lengths.sum())
    split = np.arange(DOCUMENTS, dtype=np.int32)
    return GPTDataset(indexed, str(corpus), split, 3 * tokens // 128, Split.train, config)


@pytest.mark.parametrize(
    ("name", "place", "value", "why"),
    [
        ("document_index", 3, -1, "names a document outside its split"),
        ("document_index", 3, DOCUMENTS, "names a document outside its split"),
        ("document_index", 3, None, "some documents occur more often"),
        ("sample_index", (3, 0), -1, "names a position beyond the data"),
        ("sample_index", (3, 1), 1 << 20, "names a position beyond the data"),
        ("sample_index", (3, 1), None, "a sample begins at the wrong token"),
        ("shuffle_index", 3, 1 << 30, "not every sample occurs exactly once"),
        ("shuffle_index", 3, None, "not every sample occurs exactly once"),
    ],
)
def test_sample_indices_are_held_against_the_data(samples, name, place, value, why):
    check_samples(samples, "here")
    index = getattr(samples, name).copy()
    if value is None:  # stands for a wrong value within bounds
        other = (4, *place[1:]) if isinstance(place, tuple) else 4
        value = index[other] if index[other] != index[place] else index[place] + 1
    index[place] = value
    setattr(samples, name, index)
    said = rf"sample index .*{name}\.npy: does not fit the data \({why}.*delete the folder here"
    with pytest.raises(UserError, match=said):
        check_samples(samples, "here")
