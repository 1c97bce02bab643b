"""Missing, truncated or foreign files of a checkpoint are refused; folders are written completely
or not at all.
"""

import json
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.training.errors import RunError, UserError
from megatron.training.hf import flags, folders
from megatron.training.hf.architectures import LLAMA, Model, read_model
from megatron.training.hf.layouts import Piece, Source, query_groups, rows, vocabulary
from megatron.training.hf.reading import INDEX, Weights
from tests.training.hf import hf_models


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return hf_models.write(tmp_path_factory.mktemp("files") / "llama", **hf_models.LLAMA)


@pytest.fixture
def folder(original, tmp_path) -> Path:
    """Return a copy of the checkpoint for a test to damage."""
    return Path(shutil.copytree(original, tmp_path / "copy"))


def check(folder: Path) -> None:
    with Weights(str(folder)) as weights:
        weights.check(read_model(str(folder)).sources, tied=False)


def change(folder: Path, edit) -> None:
    """Edit the tensors of the first file, and update the index."""
    file = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file)
    index = json.loads((folder / INDEX).read_text())
    others = {k: v for k, v in index["weight_map"].items() if v != file.name}
    index["weight_map"] = others | dict.fromkeys(tensors, file.name)
    (folder / INDEX).write_text(json.dumps(index))


def test_a_whole_checkpoint_passes(folder):
    check(folder)


def test_missing_files_are_named(folder):
    gone = sorted(folder.glob("*.safetensors"))[1:3]
    for file in gone:
        file.unlink()
    with pytest.raises(
        UserError, match=rf"lacks 2 of its \d+ files: {gone[0].name}, {gone[1].name}"
    ):
        check(folder)


@pytest.mark.parametrize("left", [0, 5, 200, -1])
def test_a_file_that_was_cut_off_is_found_by_its_header(folder, left):
    file = sorted(folder.glob("*.safetensors"))[2]
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(UserError, match=rf"{file.name} is incomplete or not a safetensors file"):
        check(folder)


def test_tensors_that_are_missing_or_superfluous_are_named(folder):
    change(folder, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(UserError, match=r"lacks model\.embed_tokens\.weight; get its files again"):
        check(folder)
    change(
        folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm": torch.ones(1)})
    )
    change(
        folder, lambda tensors: tensors.update({"model.embed_tokens.weight": torch.ones(120, 64)})
    )
    with pytest.raises(
        UserError, match=r"has model\.layers\.0\.self_attn\.q_norm, which this program"
    ):
        check(folder)


def test_older_checkpoints_store_what_is_computed(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    check(folder)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(120, 32), r"has shape \(120, 32\), but config\.json requires \(120, 64\)"),
        (torch.ones(120, 64, dtype=torch.int8), "is stored as I8; --load-hf takes F64, F32"),
    ],
)
def test_a_tensor_of_another_shape_or_kind_is_refused(folder, tensor, message):
    change(folder, lambda tensors: tensors.update({"model.embed_tokens.weight": tensor}))
    with pytest.raises(UserError, match=message):
        check(folder)


def test_an_index_that_is_wrong_is_refused(folder):
    index = folder / INDEX
    of_tensor = json.loads(index.read_text())["weight_map"]
    swapped = dict(zip(of_tensor, reversed(list(of_tensor.values())), strict=True))
    for text, message in (
        ("{", "is not an index of tensors"),
        ("[]", "is not an index of tensors"),
        (json.dumps({"weight_map": {"a": "../other.safetensors"}}), "outside of its folder"),
        (json.dumps({"weight_map": swapped}), "although model.safetensors.index.json assigns it"),
    ):
        index.write_text(text)
        with pytest.raises(UserError, match=message):
            check(folder)


def test_a_folder_of_pickles_is_refused(folder):
    for file in (*folder.glob("*.safetensors"), folder / INDEX):
        file.unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="such a file can run code"):
        check(folder)


def test_a_piece_is_read_and_no_more(folder):
    name = "model.layers.0.self_attn.o_proj.weight"
    source = Source(name, (64, 128))
    whole = next(
        tensors[name] for f in folder.glob("*.safetensors") if name in (tensors := load_file(f))
    )
    with Weights(str(folder)) as weights:
        assert torch.equal(weights.read(Piece(source, 1, 32, 64, 0)), whole[:, 32:64])
        assert weights.bytes_read == 64 * 32 * 4
        assert torch.equal(weights.read(Piece(source, 0, 1, 4, 0)), whole[1:4])
        assert weights.bytes_read == 64 * 32 * 4 + 3 * 128 * 4


def place(piece: Piece) -> tuple[str, int, int, int]:
    return piece.source.name, piece.start, piece.stop, piece.offset


def test_gate_and_up_are_cut_rank_by_rank():
    layout = rows(Source("gate", (8, 4)), Source("up", (8, 4)))
    assert [place(p) for p in layout.pieces(rank=1, ranks=2, length=8)] == [
        ("gate", 4, 8, 0),
        ("up", 4, 8, 4),
    ]


def test_queries_keys_and_values_alternate_by_group():
    """There are two groups of two heads of width 3; with four ranks, each holds half a group."""
    sources = (Source("q", (12, 4)), Source("k", (6, 4)), Source("v", (6, 4)))
    layout = query_groups(*sources, groups=2)
    assert [place(p) for p in layout.pieces(rank=0, ranks=1, length=24)] == [
        ("q", 0, 6, 0),
        ("k", 0, 3, 6),
        ("v", 0, 3, 9),
        ("q", 6, 12, 12),
        ("k", 3, 6, 18),
        ("v", 3, 6, 21),
    ]
    assert [place(p) for p in layout.pieces(rank=1, ranks=4, length=6)] == [
        ("k", 0, 3, 0),
        ("v", 0, 3, 3),
    ]


def test_padding_has_no_counterpart_and_nothing_else_may_lack_one():
    source = Source("table", (10, 4))
    cut = [vocabulary(source).pieces(rank=rank, ranks=4, length=4) for rank in range(4)]
    assert [[place(p) for p in pieces] for pieces in cut] == [
        [("table", 0, 4, 0)],
        [("table", 4, 8, 0)],
        [("table", 8, 10, 0)],
        [],
    ]
    with pytest.raises(AssertionError, match="10 in the sources, 6 x 2 in the model"):
        rows(source).pieces(rank=0, ranks=2, length=6)


def test_a_target_that_is_taken_or_cannot_be_made_is_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    folders.check_target(str(empty))
    folders.check_target(str(tmp_path / "new" / "deep"))
    (empty / "something").touch()
    with pytest.raises(UserError, match="exists and is not empty; choose another"):
        folders.check_target(str(empty))
    with pytest.raises(UserError, match="exists and is not empty"):
        folders.check_target(str(empty / "something"))
    with pytest.raises(UserError, match="cannot be created"):
        folders.check_target("/proc/weights/out")


def test_a_folder_has_its_name_once_it_is_whole(tmp_path):
    name = str(tmp_path / "out")
    partial = folders.begin(name)
    (partial / "left over").touch()
    partial = folders.begin(name)  # as if an earlier run had been killed here
    assert [path.name for path in partial.iterdir()] == [folders.MARKER]
    assert not Path(name).exists()
    folders.write_config(partial, {"a": 1, "auto_map": {}, "dtype": "float32"}, torch.bfloat16)
    folders.put_in_place(partial, name)
    assert not partial.exists()
    assert [path.name for path in Path(name).iterdir()] == ["config.json"]
    assert json.loads(Path(name, "config.json").read_text()) == {"a": 1, "dtype": "bfloat16"}
    with pytest.raises(RunError, match="was created by another program while this run trained"):
        folders.put_in_place(folders.begin(name), name)


def test_a_folder_of_somebody_else_is_not_removed(tmp_path):
    own = tmp_path / "out.partial"
    own.mkdir()
    (own / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="was not created by this program; move it away or choose"):
        folders.check_target(str(tmp_path / "out"))
    with pytest.raises(RunError, match="was not created by this program"):
        folders.begin(str(tmp_path / "out"))
    assert (own / "thesis.tex").read_text() == "years of work"


def test_the_tokenizer_goes_with_the_weights(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    for path in (source, target):
        path.mkdir()
    for file in ("tokenizer.json", "generation_config.json", "README.md", "model.safetensors"):
        (source / file).write_text(file)
    folders.copy_companions(target, source)
    assert sorted(p.name for p in target.iterdir()) == ["generation_config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("kind", "given", "file", "name"),
    [
        ("SentencePieceTokenizer", "my.model", "my.model", "tokenizer.model"),
        ("SentencePieceTokenizer", "", "tokenizer.model", "tokenizer.model"),
        ("TikTokenizer", "", "qwen.tiktoken", "qwen.tiktoken"),
        ("TikTokenizer", "tokenizer.model", "tokenizer.model", "tokenizer.model"),
    ],
)
def test_a_tokenizer_of_one_file_goes_with_the_weights(tmp_path, kind, given, file, name):
    source, target = tmp_path / "source", tmp_path / "target"
    for path in (source, target):
        path.mkdir()
    (source / file).write_text(file)
    args = Namespace(tokenizer_type=kind, tokenizer_model=str(source / given), load_hf=None)
    folders.copy_companions(target, flags.tokenizer_folder(args), flags.tokenizer_file(args))
    assert [p.name for p in target.iterdir()] == [name]
    assert (target / name).read_text() == file


def test_a_config_says_how_texts_begin_and_end():
    args = Namespace(load_hf=None)
    model = Model(LLAMA, {})
    flags.name_special_tokens(args, model, Namespace(bos_id=1, eos_id=2))
    assert model.config == {"bos_token_id": 1, "eos_token_id": 2}
    flags.name_special_tokens(args, model, Namespace(bos_id=-1))
    assert model.config == {"bos_token_id": None, "eos_token_id": None}
    theirs = Model(LLAMA, {"bos_token_id": 7})
    flags.name_special_tokens(Namespace(load_hf="x"), theirs, Namespace(bos_id=1, eos_id=2))
    assert theirs.config == {"bos_token_id": 7}
