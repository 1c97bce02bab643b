"""Test that prepare_wikipedia.sh and prepare_dolma.sh tokenize published and downloaded data."""

import bz2
import functools
import gzip
import http.server
import json
import sys
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests import forks
from tests.subprocesses import REPO, environment, run

sys.path.insert(0, str(REPO / "script/data"))

import prepare

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "999")
WIKIPEDIA, DOLMA = (REPO / f"script/data/prepare_{name}.sh" for name in ("wikipedia", "dolma"))


def read(prefix: Path) -> list[list[int]]:
    """Return the token ids of the documents without their end mark."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(f"{prefix}_text_document")
    documents = [dataset[i].tolist() for i in range(len(dataset))]
    assert all(ids.pop() == 999 for ids in documents)
    return documents


def call(corpus: str, folder: Path, *options: str) -> int:
    prefix = ["--output-prefix", str(folder / "o/o")]
    return prepare.main([corpus, *prefix, *NULL, "--workers", "1", *options])


def hugging_face_wikipedia(folder: Path) -> None:
    (folder / "20231101.en").mkdir(parents=True)
    for number, texts in enumerate((["1", "2 3"], ["4"])):
        path = folder / f"20231101.en/train-0000{number}-of-00002.parquet"
        rows = {"id": ["x"] * len(texts), "url": texts, "title": texts, "text": texts}
        pq.write_table(pa.table(rows), path)
    (folder / "README.md").write_text("not data")
    (folder / ".gitattributes").write_text("not data")
    (folder / "dataset_info.json").write_text("{}")


def wikiextractor(folder: Path) -> None:
    for name, texts in (("AA/wiki_00", ["1", "2 3"]), ("AB/wiki_00.bz2", ["4"])):
        path = folder / name
        path.parent.mkdir(parents=True)
        rows = [{"id": "7", "url": "u", "title": "T", "text": text} for text in texts]
        content = "\n".join(map(json.dumps, rows)).encode()
        path.write_bytes(bz2.compress(content) if path.suffix else content)


def wikitext(folder: Path) -> None:
    """Write text in the form of wikitext, with numbers in place of words for the NullTokenizer."""
    folder.mkdir()
    (folder / "test.txt").write_text("1\n\n2 3\n\n4\n")


def dolma(folder: Path) -> None:
    documents = {"books/books-0000.json.gz": ["1", "2 3"], "cc/cc-0000.jsonl.zst": ["4"]}
    for name, texts in documents.items():
        path = folder / name
        path.parent.mkdir(parents=True)
        rows = [{"id": "i", "text": t, "source": "s", "metadata": {"a": [1]}} for t in texts]
        content = "\n".join(map(json.dumps, rows)).encode()
        compress = gzip.compress if path.suffix == ".gz" else zstandard.compress
        path.write_bytes(compress(content))


@pytest.mark.parametrize(
    ("corpus", "make"),
    [
        ("wikipedia", hugging_face_wikipedia),
        ("wikipedia", wikiextractor),
        ("wikipedia", wikitext),
        ("dolma", dolma),
    ],
)
def test_folders_as_they_are_shipped(tmp_path, corpus, make):
    make(tmp_path / "in")
    assert call(corpus, tmp_path, "--input", str(tmp_path / "in")) == 0
    assert read(tmp_path / "o/o") == [[1], [2, 3], [4]]


def test_wikitext_is_cut_at_its_titles(tmp_path):
    from readers import read_file

    (tmp_path / "wiki.valid.tokens").write_text(" \n = A = \n \n = = B = = \n \n x \n \n = C = \n")
    options = prepare.command_line().parse_args(["wikipedia", "--input", str(tmp_path), *NULL])
    settings = prepare.complete(options, tmp_path)
    (batch,) = read_file(tmp_path / "wiki.valid.tokens", settings)
    assert [text for _, text in batch] == [b" = A = \n \n = = B = = \n \n x", b" = C ="]


def test_the_defaults_are_the_paths_of_the_training_scripts(tmp_path):
    (tmp_path / "model/llama3.2-1b").mkdir(parents=True)
    for corpus in ("wikipedia", "dolma"):
        options = prepare.command_line().parse_args([corpus, "--input", str(tmp_path)])
        settings = prepare.complete(options, tmp_path)
        wanted = tmp_path / f"dataset/{corpus}_processed/{corpus}_processed_text_document"
        assert settings.prefix("text") == str(wanted)
        assert settings.tokenizer_model == tmp_path / "model/llama3.2-1b"
        assert settings.append_eod


def test_a_missing_tokenizer_is_explained(tmp_path):
    options = prepare.command_line().parse_args(["wikipedia", "--input", str(tmp_path)])
    with pytest.raises(ValueError, match=r"no tokenizer at .*llama3.2-1b; put the one of Llama"):
        prepare.complete(options, tmp_path)


@pytest.mark.parametrize("corpus", ["wikipedia", "dolma"])
@pytest.mark.parametrize("there", [False, True])
def test_a_tokenizer_that_cannot_be_used_is_refused_before_the_download(
    tmp_path, monkeypatch, capsys, corpus, there
):
    """A folder without a tokenizer is refused like a missing one."""
    monkeypatch.setattr(prepare, "download", lambda *a, **k: pytest.fail("downloaded"))
    folder = tmp_path / "tok"
    if there:
        folder.mkdir()
    assert prepare.main([corpus, "--tokenizer-model", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("[ERROR] ")
    assert "no tokenizer" in error
    assert str(folder) in error


def test_a_dry_run_prints_the_command_and_downloads_nothing(tmp_path):
    for words, variables in ((["--dry-run"], {}), ([], {"DRY_RUN": "1"})):
        env = environment(LAB_PYTHON=sys.executable, HF_HUB_OFFLINE="1") | variables
        done = run(["bash", WIKIPEDIA, "--limit-files", "1", *words], cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[-3:] == ["wikipedia", "--limit-files", "1"]
        assert done.stderr == ""


def test_wikipedia_by_the_datasets_library(tmp_path, capsys):
    """A folder replaces the data set on the hub; the library finds its files in the same way."""
    hugging_face_wikipedia(tmp_path / "hub")
    (tmp_path / "hub/README.md").write_text(
        "---\nconfigs:\n- config_name: 20231101.en\n  data_files:\n  - split: train\n"
        "    path: 20231101.en/train-*\n---\n"
    )
    (tmp_path / "hub/dataset_info.json").unlink()
    options = ["--hub-dataset", str(tmp_path / "hub"), "--download-dir", str(tmp_path / "got")]
    assert call("wikipedia", tmp_path, *options) == 0
    assert read(tmp_path / "o/o") == [[1], [2, 3], [4]]
    assert call("wikipedia", tmp_path, *options, "--limit-files", "1", "--overwrite") == 0
    assert read(tmp_path / "o/o") == [[1], [2, 3]]
    assert call("wikipedia", tmp_path, *options, "--hub-part", "20231101.zh") == 1
    error = capsys.readouterr().err
    assert "[ERROR] cannot download" in error
    assert "give their folder in --input" in error


@pytest.fixture
def server(tmp_path):
    """Serve tmp_path/served over HTTP and yield its address."""
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served")
    )
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def test_dolma_is_fetched_from_where_its_list_says(tmp_path, server, capsys):
    dolma(tmp_path / "served/dolma-v1_7")
    names = ("books/books-0000.json.gz", "cc/cc-0000.jsonl.zst")
    (tmp_path / "hub/urls").mkdir(parents=True)
    listed = "\n".join(f"{server}/dolma-v1_7/{name}" for name in names)
    (tmp_path / "hub/urls/v1_7.txt").write_text(listed + f"\n{server}/gone.json.gz\n")
    options = ["--hub-dataset", str(tmp_path / "hub"), "--hub-part", "v1_7"]
    options += ["--download-dir", str(tmp_path / "got")]
    assert call("dolma", tmp_path, *options) == 1
    assert "[ERROR] cannot download" in capsys.readouterr().err
    kept = [tmp_path / "got/dolma-v1_7" / name for name in names]
    assert all(path.is_file() for path in kept), "what came is kept under its own name"
    (tmp_path / "served/dolma-v1_7/books/books-0000.json.gz").unlink()  # not fetched again
    assert call("dolma", tmp_path, *options, "--limit-files", "2") == 0
    assert read(tmp_path / "o/o") == [[1], [2, 3], [4]]


@pytest.mark.parametrize("script", [WIKIPEDIA, DOLMA], ids=lambda path: path.stem)
def test_the_scripts(tmp_path, script):
    """The scripts print help, report a missing network, and tokenize a folder."""
    python = forks.interpreter("libraries")
    env = environment(LAB_PYTHON=python, HF_HUB_OFFLINE="1", HF_HOME=tmp_path / "hf")
    bash = functools.partial(run, cwd=tmp_path, env=env)
    shown = bash(["bash", script, "--help"])
    assert shown.returncode == 0
    actions = prepare.command_line()._actions
    flags = {flag for action in actions for flag in action.option_strings if flag[:2] == "--"}
    assert all(flag in shown.stdout for flag in flags - {"--vocab-size"})
    where = ["--output-prefix", "o/o", *NULL]
    offline = bash(["bash", script, *where])
    assert offline.returncode == 1
    assert "Traceback" not in offline.stderr
    last = offline.stderr.splitlines()[-1]
    assert last.startswith("[ERROR] cannot download ")
    assert "fetch the files elsewhere and give their folder in --input" in last
    (hugging_face_wikipedia if script == WIKIPEDIA else dolma)(tmp_path / "in")
    done = bash(["bash", script, "--input", "in", *where])
    assert done.returncode == 0, done.stderr
    assert "o/o_text_document.bin, .idx: 3 documents, 7 tokens" in done.stdout
    assert bash(["bash", script, "--input", "in", *where]).returncode == 1, "it exists"
