"""Tests of manifests: training refuses a different tokenizer, but needs no manifest."""

import json
import sys
from pathlib import Path

import pytest

from megatron.training.data.manifest import check_fits, read_manifest
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.errors import UserError
from tests.subprocesses import REPO
from tests.training.runs import COMMON, train

sys.path.insert(0, str(REPO / "script/data"))

import default_corpus
import preprocess

#: Position of the NullTokenizer's options in COMMON, which MODEL omits.
AT = COMMON.index("--tokenizer-type")
MODEL = (*COMMON[:AT], *COMMON[AT + 4 :], "--train-iters", "1", "--global-batch-size", "2")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Make two tokenizers of equal size, a larger one, and data tokenized with the first."""
    folder = tmp_path_factory.mktemp("data")
    pages = list(default_corpus.topics().values())
    for name, texts, size in (
        ("first", pages, 400),
        ("second", pages[:20], 400),
        ("larger", pages, 500),
    ):
        default_corpus.VOCABULARY = size
        (folder / f"{name}.model").write_bytes(default_corpus.train_tokenizer(texts))
    default_corpus.VOCABULARY = 2048
    rows = [json.dumps({"text": page}) for page in pages[:10]]
    (folder / "in.jsonl").write_text("\n".join(rows))
    arguments = ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "o")]
    model = ["--tokenizer-model", str(folder / "first.model"), "--append-eod"]
    assert preprocess.main([*arguments, *model, "--workers", "1"]) == 0
    return folder


def test_the_tokenizer_that_made_the_data_fits(made):
    check_fits(str(made / "o_text_document"), build_tokenizer(None, made / "first.model"))
    manifest = read_manifest(made / "o_text_document")
    assert (manifest.documents, manifest.append_eod, manifest.json_key) == (10, True, "text")
    assert manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("second", "another tokenizer's ids .* as many tokens, but different ones; give the --tok"),
        ("larger", r"a vocabulary of 400 \(sentencepiece\), but the tokenizer .* has 500; give"),
    ],
)
def test_another_tokenizer_is_refused(made, name, message):
    with pytest.raises(UserError, match=message):
        check_fits(str(made / "o_text_document"), build_tokenizer(None, made / f"{name}.model"))


def test_the_null_tokenizer_fits_where_it_is_large_enough(made):
    check_fits(str(made / "o_text_document"), build_tokenizer("NullTokenizer", vocab_size=399))
    said = "vocabulary of 400, but --vocab-size 300 and .* make 301; give --vocab-size 399$"
    with pytest.raises(UserError, match=said):
        check_fits(str(made / "o_text_document"), build_tokenizer("NullTokenizer", vocab_size=300))


def test_data_without_a_manifest_fit_any_tokenizer(made, corpus):
    assert read_manifest(corpus) is None
    check_fits(str(corpus), build_tokenizer(None, made / "larger.model"))


def test_a_file_that_is_no_manifest(tmp_path):
    for content in ("", "[]", '{"schema_version": 1}', '{"schema_version": 2}', "\xff"):
        (tmp_path / "x.json").write_text(content, encoding="latin-1")
        with pytest.raises(UserError, match=r"x.json does not describe a data set .*; make the"):
            read_manifest(tmp_path / "x")


def test_training_refuses_what_does_not_fit(made, tmp_path):
    """Training accepts only the data's tokenizer, and ids within the vocabulary.

    The latter also holds for data without a manifest.
    """
    data, cache = made / "o_text_document", ("--data-cache-path", tmp_path)
    options = ("--data-path", data, *cache, "--tokenizer-model")
    done = train(*options, made / "first.model", model=MODEL)
    assert done.status == 0, done.errors
    done = train(*options, made / "larger.model", model=MODEL)
    assert done.status == 2
    assert "Traceback" not in done.errors
    assert f"the data {data} has a vocabulary of 400" in done.errors

    foreign = tmp_path / "foreign"
    for suffix in (".bin", ".idx"):
        Path(f"{foreign}{suffix}").write_bytes(Path(f"{data}{suffix}").read_bytes())
    null = ("--tokenizer-type", "NullTokenizer", "--vocab-size")
    done = train("--data-path", foreign, *cache, *null, "127", model=MODEL)
    assert done.status == 1
    assert "Traceback" not in done.errors
    assert "but the vocabulary has 128; give the --tokenizer-model" in done.errors
