"""Tests that data/tokenizer.py builds megatron-core's tokenizers from files of every kind."""

import base64
import shutil
import sys

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron.training.data.tiktoken_tokenizer import LONGEST_PIECE, LONGEST_RUN, pieces
from megatron.training.data.tokenizer import (
    PROBE,
    batch_encoder,
    build_tokenizer,
    fingerprint,
    guess_tokenizer_type,
)
from tests import forks
from tests.subprocesses import REPO, environment, run

KINDS = ("sentencepiece", "hugging_face", "both", "no_eos", "tiktoken", "qwen")
TEXT = "def f(x):\n    return {x!r}  # naïve, 漢字 🙂\n"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Make a folder for each kind of tokenizer, and one with two kinds, like that of Llama 2."""
    root = tmp_path_factory.mktemp("tokenizers")
    train = (
        "import sys; sys.path.insert(0, 'script/data'); import default_corpus, pathlib;"
        f"pathlib.Path(r'{root}/tokenizer.model').write_bytes("
        "default_corpus.train_tokenizer(list(default_corpus.topics().values())))"
    )
    result = run([sys.executable, "-c", train], cwd=REPO)
    assert result.returncode == 0, result.stderr
    made = {name: root / name for name in KINDS}
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
    write_tiktoken(made["tiktoken"] / "tokenizer.model", merges=60)
    write_tiktoken(made["qwen"] / "qwen.tiktoken", merges=61)
    return made


def write_tiktoken(path, merges: int) -> None:
    """Write a tiktoken file of all bytes in order, then words of TEXT and their prefixes."""
    tokens = [bytes([number]) for number in range(256)]
    for word in TEXT.replace("(", " ").encode().split() * 9:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens and len(tokens) < 256 + merges:
                tokens.append(word[:end])
    for number in range(256 + merges - len(tokens)):
        tokens.append(b"ab" + bytes([65 + number]))
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    path.write_text("\n".join(lines) + "\n")


def test_transformers_waits_for_a_tokenizer_of_its_own(folders):
    """Importing transformers would delay every start of training by two seconds."""
    code = (
        "import sys\n"
        "from megatron.training.data.tokenizer import build_tokenizer\n"
        "pieces, _ = (build_tokenizer(None, path) for path in sys.argv[1:3])\n"
        "build_tokenizer('NullTokenizer', vocab_size=9)\n"
        "assert 'transformers' not in sys.modules\n"
        "bpe = build_tokenizer(None, sys.argv[3])\n"
        "assert 'transformers' in sys.modules\n"
        "print(bpe.detokenize(bpe.tokenize('def f')))\n"
        "said = [{'role': 'user', 'content': 'naive'}]\n"
        "template = '{{ messages[0].content }}'\n"
        "print(pieces.apply_chat_template(said, template, tokenize=False))\n"
    )
    kinds = (folders["sentencepiece"], folders["tiktoken"], folders["hugging_face"])
    result = forks.run("-c", code, *kinds, env=environment(PYTHONPATH=REPO))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "def f\nnaive\n"


def test_the_path_says_the_type(folders):
    assert guess_tokenizer_type(folders["sentencepiece"]) == "SentencePieceTokenizer"
    file = folders["sentencepiece"] / "tokenizer.model"
    assert guess_tokenizer_type(file) == "SentencePieceTokenizer"
    assert guess_tokenizer_type(folders["hugging_face"]) == "HuggingFaceTokenizer"
    assert guess_tokenizer_type(folders["both"]) == "HuggingFaceTokenizer"
    for path in (folders["tiktoken"], folders["tiktoken"] / "tokenizer.model", folders["qwen"]):
        assert guess_tokenizer_type(path) == "TikTokenizer"


@pytest.mark.parametrize(
    ("kind", "name", "eod"),
    [
        ("SentencePieceTokenizer", "sentencepiece", 2),
        ("SentencePieceTokenizer", "both", 2),
        ("HuggingFaceTokenizer", "hugging_face", 1),
        (None, "hugging_face", 1),
        (None, "sentencepiece", 2),
        (None, "no_eos", None),
        (None, "tiktoken", 316 + 1),
        ("TikTokenizer", "qwen", 317 + 1),
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
    """GPTDataset names its cached index after unique_identifiers, so two tokenizers must differ."""
    first = build_tokenizer(None, folders["sentencepiece"]).unique_identifiers
    second = build_tokenizer(None, folders["hugging_face"]).unique_identifiers
    assert first != second


TEXTS = [TEXT, PROBE, "", " ", "</s> <|end_of_text|>", TEXT * 50, "a  b\n\n\n\tc", "\u2028"]


@pytest.mark.parametrize("name", KINDS)
def test_many_texts_get_the_ids_that_each_gets(folders, name):
    tokenizer = build_tokenizer(None, folders[name])
    assert batch_encoder(tokenizer)(TEXTS) == [tokenizer.tokenize(text) for text in TEXTS]


def test_many_texts_get_the_ids_that_each_gets_where_the_file_says_otherwise(folders, tmp_path):
    """The file requests truncation and padding, and that text never becomes special tokens."""
    tokenizer = Tokenizer.from_file(str(folders["hugging_face"] / "tokenizer.json"))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=9)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", split_special_tokens=True
    )
    fast.save_pretrained(tmp_path)
    built = build_tokenizer(None, tmp_path)
    found = batch_encoder(build_tokenizer(None, tmp_path))(TEXTS)
    assert found == [built.tokenize(text) for text in TEXTS]
    assert 1 not in found[4], "</s> in a text"


def test_a_tiktoken_file_gives_the_ids_of_its_hugging_face_conversion(folders, tmp_path):
    """The reference is the converter of transformers with Llama 3's pattern."""
    pytest.importorskip("tiktoken", minversion="0.12", reason="older releases need blobfile")
    from transformers.convert_slow_tokenizer import TikTokenConverter

    from megatron.training.data.tiktoken_tokenizer import _LLAMA3

    file = folders["tiktoken"] / "tokenizer.model"
    reference = TikTokenConverter(vocab_file=str(file), pattern=_LLAMA3).converted()
    tokenizer = build_tokenizer("TikTokenizer", file)
    for text in (TEXT, PROBE, "I'LL 1234567 xx  \n\n y", "naïve"):
        assert tokenizer.tokenize(text) == reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.detokenize(tokenizer.tokenize(text)) == text
    assert tokenizer.vocab_size == 316 + 256
    names = {i: name for i, name in tokenizer.inv_vocab.items() if i >= 316}
    offsets = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 9: "eot_id"}
    offsets |= {2: "reserved_special_token_0", 11: "reserved_special_token_3"}
    offsets[255] = "reserved_special_token_247"
    assert all(names[316 + i] == f"<|{name}|>" for i, name in offsets.items())
    assert len(set(names.values())) == 256
    assert (tokenizer.bos, tokenizer.eod, tokenizer.pad) == (316, 317, 320)
    assert 317 not in tokenizer.tokenize("<|end_of_text|>"), "text does not make special tokens"


def runs(text: str) -> list[str]:
    """Split long runs by a second method, character by character."""
    parts, length, last = [""], 0, None
    for character in text:
        length = length + 1 if character.isspace() == last else 1
        last = character.isspace()
        if length > LONGEST_RUN:
            parts.append("")
            length = 1
        parts[-1] += character
    return parts


@pytest.mark.parametrize(
    "text",
    [
        "short",
        " " * LONGEST_RUN + "x" * LONGEST_RUN,
        " " * (LONGEST_RUN + 1),
        "ab " + "x" * (2 * LONGEST_RUN + 1) + "\u2028\t" * LONGEST_RUN + "end",
        "x" * LONGEST_PIECE,
    ],
    ids=["short", "at the limit", "behind it", "mixed", "a whole piece"],
)
def test_long_runs_are_cut(text):
    assert list(pieces(text)) == runs(text)


def test_long_text_is_cut_first():
    """After a cut, the length of a run is counted from the cut."""
    text = "y " * 199_990 + "z" * 20_020 + " end"
    assert list(pieces(text)) == [text[:LONGEST_PIECE], text[LONGEST_PIECE:]]
    assert list(pieces("")) == []


def test_a_million_blanks(folders):
    """The library panics on the whole text, so it is split; the tokens still decode to the text."""
    tokenizer = build_tokenizer(None, folders["tiktoken"])
    for text in (" " * 1_000_000, "\n" * 100_001, "q" * 100_001):
        ids = tokenizer.tokenize("a" + text + "b")
        assert tokenizer.detokenize(ids) == "a" + text + "b"
    short = "a" + " " * 1000
    assert tokenizer.tokenize(short) == tokenizer._tokenizer.tokenizer.encode_ordinary(short)


def test_the_families_are_those_of_the_tiktoken_package(monkeypatch):
    """The package would download the merge ranks; all other settings are compared."""
    from tiktoken_ext import openai_public

    from megatron.training.data.tiktoken_tokenizer import FAMILIES

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *_, **__: {})
    for ranks, family in FAMILIES.items():
        theirs = getattr(openai_public, family.name)()
        assert family.pattern == theirs["pat_str"]
        assert family.special_tokens == theirs["special_tokens"]
        if "explicit_n_vocab" in theirs:
            assert theirs["explicit_n_vocab"] == ranks + 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"IQ== 0\nIg== x\n", "line 2 is not 'base64 rank'"),
        (b"IQ== 0\n??? 1\n", "line 2 is not 'base64 rank'"),
        (b"IQ== 0\n", "the byte 0 has no rank"),
        (b"AA== 0\n" * 2, "the byte 1 has no rank"),
        (
            "".join(f"{base64.b64encode(bytes([i])).decode()} 1\n" for i in range(256)).encode(),
            "two tokens have the same rank",
        ),
    ],
)
def test_a_damaged_tiktoken_file(tmp_path, content, message):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"tokenizer.model is not in tiktoken's format \({message}"
    ):
        build_tokenizer(None, tmp_path)


def test_a_fingerprint_is_of_what_a_tokenizer_does(folders, tmp_path):
    prints = {name: fingerprint(build_tokenizer(None, folders[name])) for name in KINDS}
    assert prints["both"] == prints["hugging_face"]
    assert len(set(prints.values())) == len(KINDS) - 1
    shutil.copytree(folders["hugging_face"], tmp_path / "copy")
    path = tmp_path / "copy/tokenizer.json"
    text = path.read_text()
    path.write_text(" " + text)
    assert fingerprint(build_tokenizer(None, tmp_path / "copy")) == prints["hugging_face"]
    path.write_text(text.replace('"add_prefix_space": false', '"add_prefix_space": true'))
    assert path.read_text() != text
    assert fingerprint(build_tokenizer(None, tmp_path / "copy")) != prints["hugging_face"]
    first, second = (build_tokenizer("NullTokenizer", vocab_size=size) for size in (9, 10))
    assert fingerprint(first) != fingerprint(second)


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("GPT2BPETokenizer", "x", r"unknown tokenizer type 'GPT2BPETokenizer'; choose one of Sent"),
        (None, None, "no tokenizer is given; give --tokenizer-model"),
        (None, "broken/other.json", r"other.json would not be read: Hugging Face's .* of a folder"),
        ("HuggingFaceTokenizer", "text.model", "text.model would not be read"),
        (None, "two", r"two holds 2 .tiktoken files \(a.tiktoken, b.tiktoken\); name one of them"),
        (
            "TikTokenizer",
            "two",
            r"two holds 2 .tiktoken files \(a.tiktoken, b.tiktoken\); name one",
        ),
        ("SentencePieceTokenizer", None, "give --tokenizer-model"),
        ("NullTokenizer", None, "give --vocab-size"),
        (None, "missing", "missing does not exist; give a SentencePiece .model file"),
        (None, "empty", "holds no tokenizer; it needs one of tokenizer.json"),
        ("HuggingFaceTokenizer", "missing", "holds no Hugging Face tokenizer"),
        ("SentencePieceTokenizer", "empty", r"tokenizer.model does not exist; a SentencePiece"),
        ("SentencePieceTokenizer", "text.model", "text.model is not a SentencePiece model; if it"),
        ("TikTokenizer", "empty", "empty has no file in tiktoken's format; a TikTokenizer needs"),
        ("TikTokenizer", "text.model", "text.model is not in tiktoken's format"),
        ("HuggingFaceTokenizer", "broken", "cannot read the tokenizer"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, kind, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.model").write_text("not a model")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/tokenizer.json").write_text("{")
    (tmp_path / "broken/other.json").write_text("{}")
    (tmp_path / "two").mkdir()
    (tmp_path / "two/a.tiktoken").touch()
    (tmp_path / "two/b.tiktoken").touch()
    with pytest.raises(ValueError, match=message):
        build_tokenizer(kind, None if name is None else tmp_path / name)
