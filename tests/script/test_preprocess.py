"""script/data/preprocess.py works as a user runs it."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.training.data.paths import parse_blend
from tests import forks
from tests.subprocesses import REPO, run

SCRIPT = REPO / "script/data/preprocess.py"
sys.path.insert(0, str(SCRIPT.parent))

import documents  # noqa: E402
import preprocess  # noqa: E402

TEXT = " = Heading = \n\nFirst document,\ntwo lines.\n\n\n \nSecond naïve document.\n"
DOCUMENTS = [" = Heading = ", "First document,\ntwo lines.", "Second naïve document."]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    """Return the path of a small tokenizer that decodes every text exactly."""
    import default_corpus

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(default_corpus.train_tokenizer(list(default_corpus.topics().values())))
    return path


def call(tmp_path: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    return forks.run(SCRIPT, *options, cwd=tmp_path)


def read_documents(prefix: Path) -> list[list[int]]:
    """Return the token ids of each document, read by megatron-core."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert len(dataset.document_indices) == len(dataset) + 1, "each document is one sequence"
    return [np.asarray(dataset[i]).tolist() for i in range(len(dataset))]


def decoded(prefix: Path, tokenizer: Path) -> list[str]:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(str(tokenizer))
    return [model.decode(ids) for ids in read_documents(prefix)]


def check_error(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("[ERROR] "), result.stderr
    for part in parts:
        assert part in last


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "document" in path.name)


def test_text_becomes_documents_that_end_with_eod(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text(TEXT)
    options = ["--input", "in.txt", "--output-prefix", "out/wiki", "--append-eod"]
    result = call(tmp_path, *options, "--tokenizer-model", tokenizer)
    assert result.returncode == 0, result.stderr
    prefix = tmp_path / "out/wiki_text_document"
    documents = read_documents(prefix)
    assert [ids[-1] for ids in documents] == [2, 2, 2]
    assert decoded(prefix, tokenizer) == DOCUMENTS
    tokens = sum(map(len, documents))
    size = sum(len(text.encode()) for text in DOCUMENTS)
    assert f"3 documents, {tokens} tokens (uint16), {size} bytes" in result.stdout
    assert "--data-path out/wiki_text_document" in result.stdout
    assert leftovers(tmp_path / "out") == [
        f"wiki_text_document.{suffix}" for suffix in ("bin", "idx", "json")
    ]
    manifest = json.loads((tmp_path / "out/wiki_text_document.json").read_text())
    assert (manifest["documents"], manifest["tokens"], manifest["text_bytes"]) == (3, tokens, size)
    assert manifest["sources"] == [["in.txt", len(TEXT.encode())]]
    assert manifest["tokenizer"]["vocab_size"] == 2048
    assert not (tmp_path / "out/wiki.partial").exists()


def test_a_path_with_a_blank(tmp_path, tokenizer, capsys):
    """Every path has a blank, and the printed command quotes them."""
    folder = tmp_path / "my files"
    folder.mkdir()
    model = folder / "the tokenizer.model"
    model.write_bytes(tokenizer.read_bytes())
    (folder / "in put.txt").write_text(TEXT)
    arguments = ["--input", str(folder / "in put.txt"), "--output-prefix", str(folder / "out put")]
    arguments += ["--tokenizer-model", str(model), "--workers", "1"]
    assert preprocess.main(arguments) == 0
    prefix = f"{folder}/out put_text_document"
    command = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert command[command.index("--data-path") + 1] == prefix
    assert command[command.index("--tokenizer-path") + 1] == str(model)
    assert parse_blend([prefix]) == ([prefix], None)


def test_the_files_do_not_depend_on_the_number_of_workers(tmp_path, tokenizer):
    """The input has several batches, so the workers finish out of order."""
    with (tmp_path / "in.jsonl").open("w") as file:
        for number in range(6000):
            words = " ".join(str(number * k) for k in range(1 + number * 37 % 90))
            file.write(json.dumps({"text": words}) + "\n")
    contents = []
    for workers in ("1", "3"):
        options = ["--input", "in.jsonl", "--output-prefix", f"w{workers}/a"]
        options += ["--workers", workers, "--tokenizer-model", str(tokenizer)]
        result = call(tmp_path, *options)
        assert result.returncode == 0, result.stderr
        prefix = tmp_path / f"w{workers}/a_text_document"
        contents.append([Path(f"{prefix}{end}").read_bytes() for end in (".bin", ".idx", ".json")])
    assert contents[0] == contents[1]
    assert len(read_documents(tmp_path / "w3/a_text_document")) == 6000


def test_each_json_key_gets_its_files(tmp_path, tokenizer):
    rows = [{"title": "A", "body": "aaa", "n": 1}, {"title": "B", "body": ""}]
    (tmp_path / "in.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    options = ["--input", "in.jsonl", "--output-prefix", "o", "--json-keys", "title", "body"]
    result = call(tmp_path, *options, "--tokenizer-model", tokenizer)
    assert result.returncode == 0, result.stderr
    assert decoded(tmp_path / "o_title_document", tokenizer) == ["A", "B"]
    assert decoded(tmp_path / "o_body_document", tokenizer) == ["aaa"], "an empty text is left out"
    assert "left out 1 empty text under the key 'body'" in result.stdout
    assert "under the key 'title'" not in result.stdout


BAD = b'{"text": "good"}\n{"text": \n[1]\n{"words": "x", "id": 1}\n{"text": 3}\n'
BAD += b'{"text": "\\ud800"}\n{"text": "\xff"}\n' + b"[" * 100000 + b'\n{"text": "last"}'
REASONS = [
    "2: not JSON (Expecting value at column",
    "3: not a JSON object",
    "4: no text under the key 'text' (available keys: 'words', 'id'); name the key in --json-keys",
    "5: the value under the key 'text' is a number, not a string",
    "6: half of a surrogate pair",
    "7: not UTF-8",
    "8: not JSON",
]


def test_bad_lines_are_counted_and_listed_or_stop_it(tmp_path, tokenizer):
    (tmp_path / "in.jsonl").write_bytes(BAD)
    options = ["--input", "in.jsonl", "--output-prefix", "o", "--workers", "2"]
    options += ["--tokenizer-model", str(tokenizer)]
    check_error(call(tmp_path, *options, "--strict"), "in.jsonl:2: not JSON (Expecting value")
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "o.partial").exists(), "nothing was done that could be kept"
    result = call(tmp_path, *options)
    assert result.returncode == 0, result.stderr
    assert "skipped 7 bad lines; they are listed in o_bad_lines.txt" in result.stdout
    listed = (tmp_path / "o_bad_lines.txt").read_text().splitlines()
    assert len(listed) == len(REASONS)
    for line, reason in zip(listed, REASONS, strict=True):
        assert line.startswith(f"in.jsonl:{reason}")
    assert decoded(tmp_path / "o_text_document", tokenizer) == ["good", "last"]
    assert json.loads((tmp_path / "o_text_document.json").read_text())["bad_lines"] == 7


class PanicException(BaseException):
    """A panic like those of libraries in Rust, which are not subclasses of `Exception`."""


@pytest.mark.parametrize("failure", [PanicException, RuntimeError, TypeError, KeyError])
def test_a_tokenizer_that_fails_on_a_text(tmp_path, monkeypatch, capsys, failure):
    """A text on which the tokenizer fails is a bad line; if all texts fail, the run fails."""
    (tmp_path / "in.txt").write_text("1 2\n\n13\n\n3")
    encode = documents.Encoder.__init__
    failing = [lambda text: "13" in text]

    def init(self, settings):
        encode(self, settings)
        inner = self.encode_texts

        def encode_texts(texts):
            if any(failing[0](text) for text in texts):
                raise failure("StackOverflow\nmore")
            return inner(texts)

        self.encode_texts = encode_texts

    monkeypatch.setattr(documents.Encoder, "__init__", init)
    arguments = ["--input", str(tmp_path / "in.txt"), "--output-prefix", str(tmp_path / "o")]
    arguments += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99", "--workers", "1"]
    assert preprocess.main(arguments) == 0
    assert read_documents(tmp_path / "o_text_document") == [[1, 2], [3]]
    listed = (tmp_path / "o_bad_lines.txt").read_text()
    assert f"in.txt:3: the tokenizer fails on it ({failure.__name__}: " in listed
    failing[0] = lambda text: True
    assert preprocess.main([*arguments, "--overwrite"]) == 1
    error = capsys.readouterr().err
    assert "[ERROR] none of the first 3 documents of" in error
    assert f"in.txt:1: the tokenizer fails on it ({failure.__name__}: " in error


def test_an_existing_result_is_kept_unless_told_otherwise(tmp_path, tokenizer):
    (tmp_path / "in.txt").write_text("new")
    (tmp_path / "o_text_document.bin").write_bytes(b"old")
    options = ["--input", "in.txt", "--output-prefix", "o", "--tokenizer-model", str(tokenizer)]
    check_error(call(tmp_path, *options), "o_text_document.bin exists", "--overwrite")
    assert (tmp_path / "o_text_document.bin").read_bytes() == b"old"
    assert call(tmp_path, *options, "--overwrite").returncode == 0
    assert decoded(tmp_path / "o_text_document", tokenizer) == ["new"]


def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    (tmp_path / "in.txt").write_text("7 70000")
    options = ["--input", "in.txt", "--output-prefix", "o", "--tokenizer-type", "NullTokenizer"]
    result = call(tmp_path, *options, "--vocab-size", "100000", "--append-eod")
    assert result.returncode == 0, result.stderr
    assert "(int32)" in result.stdout
    assert read_documents(tmp_path / "o_text_document") == [[7, 70000, 100000]]


JSONL = ["--input-format", "jsonl"]


# Errors are tested in this process, because each would take seconds in a separate process.


def fails(tmp_path, capsys, *options: str) -> str:
    """Run on in.txt, assert that nothing is written, and return the printed error."""
    arguments = ["--input", str(tmp_path / "in.txt"), "--output-prefix", str(tmp_path / "o")]
    assert preprocess.main([*arguments, "--workers", "1", *options]) == 1
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "o.partial").exists()
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "in.txt is not a file or folder; name text, JSONL or Parquet in --input"),
        (b"", ["NULL"], "in.txt is empty; leave it out"),
        (b"x", ["--workers", "0"], "--workers 0 is below 1"),
        (b"x", ["--json-keys", "a", "b"], "is text, which has no keys, but --json-keys names 2"),
        (b"x", ["--tokenizer-model", "/missing"], "the tokenizer /missing does not exist; give"),
        (b"x", ["--tokenizer-type", "Mine"], "unknown tokenizer type 'Mine'; choose one of Sent"),
        (b"x", [], "no tokenizer is given; give --tokenizer-model"),
        (b" \n\n", ["NULL"], "in.txt holds no document; leave it out, or get it again"),
        (b"1\n\n2 x", ["NULL", "--strict"], "in.txt:3: invalid literal for int()"),
        (b"1\n\n11", ["NULL", "--strict"], "in.txt:3: a token id is not within the vocabulary of"),
        (b"1\n\xff", ["NULL"], "in.txt:1: not UTF-8"),
        (b"[1]", ["NULL", *JSONL], "in.txt:1: not a JSON object; give one"),
        (b"{}", ["NULL", *JSONL], "in.txt:1: no text under the key 'text' (available keys: none)"),
        (b'{"id": 1}\n' * 3, ["NULL", *JSONL], "none of the first 3 documents of"),
        (b'{"text": ""}', ["NULL", *JSONL], "no text under the key 'text' in the 1 input files"),
        (b"<doc id=1>", ["NULL"], "in.txt has <doc> elements; run wikiextractor with --json"),
        (b"PAR1 or not", ["NULL", "--input-format", "parquet"], "damaged, or not a Parquet file"),
        (b"\x1f\x8b\x08 not", ["NULL"], "in.txt is damaged or was cut short"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, capsys, text, options, message):
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    if text is not None:
        (tmp_path / "in.txt").write_bytes(text)
    given = [part for option in options for part in (null if option == "NULL" else [option])]
    error = fails(tmp_path, capsys, *given)
    assert error.startswith("[ERROR] ")
    assert message in error


def test_an_output_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "in.txt").write_text("1")
    (tmp_path / "file").touch()
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    error = fails(tmp_path, capsys, "--output-prefix", str(tmp_path / "file/o"), *null)
    assert error.startswith("[ERROR] ")
    assert "check the path" in error


def test_help_imports_nothing_slow(tmp_path):
    code = "import sys, preprocess\ntry: preprocess.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    result = run([sys.executable, "-c", code], cwd=SCRIPT.parent)
    assert result.stdout.endswith("False False\n")
