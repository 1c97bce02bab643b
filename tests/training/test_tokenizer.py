"""megatron/training/tokenizer.py: the wheel's tokenizers, from files made here."""

import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron.training.tokenizer import build_tokenizer, guess_tokenizer_type
from tests.subprocesses import REPO, run

TEXT = "def f(x):\n    return {x!r}  # naïve, 漢字 🙂\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with each kind of tokenizer, and one that has both, as Llama 2's has."""
    root = tmp_path_factory.mktemp("tokenizers")
    train = (
        "import sys; sys.path.insert(0, 'script/data'); import default_corpus, pathlib;"
        f"pathlib.Path(r'{root}/tokenizer.model').write_bytes("
        "default_corpus.train_tokenizer(list(default_corpus.topics().values())))"
    )
    result = run([sys.executable, "-c", train], cwd=REPO)
    assert result.returncode == 0, result.stderr
    made = {name: root / name for name in ("sentencepiece", "hugging_face", "both", "no_eos")}
    for folder in made.values():
        folder.mkdir()
    for name in ("sentencepiece", "both"):
        (made[name] / "tokenizer.model").write_bytes((root / "tokenizer.model").read_bytes())

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT], trainer)
    for name in ("hugging_face", "both"):
        fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
        fast.save_pretrained(made[name])
    PreTrainedTokenizerFast(tokenizer_object=bpe).save_pretrained(made["no_eos"])
    return made


def test_the_path_says_the_type(folders):
    assert guess_tokenizer_type(folders["sentencepiece"]) == "SentencePieceTokenizer"
    file = folders["sentencepiece"] / "tokenizer.model"
    assert guess_tokenizer_type(file) == "SentencePieceTokenizer"
    assert guess_tokenizer_type(folders["hugging_face"]) == "HuggingFaceTokenizer"
    assert guess_tokenizer_type(folders["both"]) == "HuggingFaceTokenizer"


@pytest.mark.parametrize(
    ("kind", "name", "eod"),
    [
        ("SentencePieceTokenizer", "sentencepiece", 2),
        ("SentencePieceTokenizer", "both", 2),
        ("HuggingFaceTokenizer", "hugging_face", 1),
        (None, "hugging_face", 1),
        (None, "sentencepiece", 2),
        (None, "no_eos", None),
    ],
)
def test_text_comes_back_exactly(folders, kind, name, eod):
    tokenizer = build_tokenizer(kind, folders[name])
    ids = tokenizer.tokenize(TEXT)
    assert tokenizer.detokenize(ids) == TEXT
    assert len(ids) > 10
    assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.eod == eod
    assert eod not in ids, "neither end nor beginning is added"
    assert tokenizer.tokenize("") == []


def test_special_ids_of_the_default_tokenizer(folders):
    tokenizer = build_tokenizer("SentencePieceTokenizer", folders["sentencepiece"])
    assert (tokenizer.unk, tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, 2, 3)
    assert tokenizer.vocab_size == 2048


def test_the_null_tokenizer_reads_numbers():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=50)
    assert tokenizer.tokenize("1 2 49") == [1, 2, 49]
    assert (tokenizer.vocab_size, tokenizer.eod) == (51, 50)


def test_megatron_core_can_identify_them(folders):
    """GPTDataset names its cached index by unique_identifiers: two tokenizers must differ."""
    first = build_tokenizer(None, folders["sentencepiece"]).unique_identifiers
    second = build_tokenizer(None, folders["hugging_face"]).unique_identifiers
    assert first != second


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("GPT2BPETokenizer", "x", r"unknown tokenizer type 'GPT2BPETokenizer'; choose one of Sent"),
        (None, None, "unknown tokenizer type None; choose one of"),
        ("SentencePieceTokenizer", None, "give --tokenizer-model"),
        ("NullTokenizer", None, "give --vocab-size"),
        (None, "missing", "missing does not exist; give a SentencePiece .model file"),
        (None, "empty", "holds no tokenizer; it needs one of tokenizer.json"),
        ("HuggingFaceTokenizer", "missing", "holds no Hugging Face tokenizer"),
        ("SentencePieceTokenizer", "empty", r"tokenizer.model does not exist; a SentencePiece"),
        ("SentencePieceTokenizer", "text.model", "text.model is not a SentencePiece model; if it"),
        ("HuggingFaceTokenizer", "broken", "cannot read the tokenizer"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, kind, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.model").write_text("not a model")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=message):
        build_tokenizer(kind, None if name is None else tmp_path / name)
