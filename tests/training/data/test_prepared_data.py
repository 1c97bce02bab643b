"""Small corpora in the formats of Wikipedia and Dolma can be trained on and collected from."""

import gzip
import json
import sys

import pytest

from megatron.analysis.store import TensorStore
from tests.subprocesses import REPO
from tests.training.runs import COMMON, DEEPSEEK, MODEL, train

sys.path.insert(0, str(REPO / "script/data"))

import default_corpus
import prepare

COLLECT = ("--custom-quant-type", "mxfp8", "--save-tensors", "--control-iter", "1")


def own_tokenizer(model: tuple[str, ...]) -> tuple[str, ...]:
    """Return the model's options without the NullTokenizer of the tests' common options."""
    at = COMMON.index("--tokenizer-type")
    assert model[at : at + 4] == COMMON[at : at + 4]
    return (*model[:at], *model[at + 4 :], "--train-iters", "2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make both corpora from Python's documentation, and a tokenizer for them."""
    folder = tmp_path_factory.mktemp("prepared")
    pages = default_corpus.topics()
    (folder / "tokenizer.model").write_bytes(default_corpus.train_tokenizer(list(pages.values())))
    for name in ("wikipedia/in", "dolma/in/books"):
        (folder / name).mkdir(parents=True)
    articles = (f" \n = {name} = \n \n {page} \n" for name, page in pages.items())
    (folder / "wikipedia/in/wiki.train.tokens").write_text("".join(articles))
    rows = [{"id": name, "text": page, "source": "books"} for name, page in pages.items()]
    with gzip.open(folder / "dolma/in/books/books-0000.json.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    for corpus in ("wikipedia", "dolma"):
        where = ["--input", str(folder / corpus / "in"), "--output-prefix", str(folder / corpus)]
        model = ["--tokenizer-model", str(folder / "tokenizer.model"), "--workers", "1"]
        assert prepare.main([corpus, *where, *model]) == 0
    return folder


@pytest.mark.parametrize(
    ("corpus", "model"),
    [("wikipedia", MODEL), ("dolma", DEEPSEEK)],
    ids=["wikipedia-llama", "dolma-deepseek"],
)
def test_it_trains_and_is_collected_from(made, tmp_path, corpus, model):
    data = ("--data-path", made / f"{corpus}_text_document", "--data-cache-path", tmp_path / "c")
    tokenizer = ("--tokenizer-model", made / "tokenizer.model")
    where = ("--tensor-save-dir", tmp_path / "tensors")
    done = train(*data, *tokenizer, *COLLECT, *where, model=own_tokenizer(model))
    assert done.status == 0, done.errors[-3000:]
    assert 7 < done.losses[1] < 8.5, "ln 2048 is 7.6"
    store = TensorStore(tmp_path / "tensors")
    assert {record["quant_type"] for record in store.select().to_dict("records")} == {"mxfp8"}
    assert len(store.select(layer_type="attention")) > 0
    assert len(store.select(layer_type="linear")) > 0
