"""Makes the modules of script/ importable, as they are to the scripts there."""

import sys

import pytest

from tests.subprocesses import REPO

if str(REPO / "script") not in sys.path:
    sys.path.insert(0, str(REPO / "script"))


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A tokenizer and data that are there, though not real: for what only looks."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("tok.model", "text_document.bin", "text_document.idx"):
        (folder / name).touch()
    tokenizer, data = folder / "tok.model", folder / "text_document"
    return ["--tokenizer-path", str(tokenizer), "--data-path", str(data)]
