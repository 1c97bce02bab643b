"""Make the modules of script/ importable, as they are for the scripts in that folder."""

import shlex
import struct
import sys
from pathlib import Path

import pytest

from tests.script.setup_tree import install_pip
from tests.subprocesses import REPO

for folder in ("script/collect", "script"):
    if str(REPO / folder) not in sys.path:
        sys.path.insert(0, str(REPO / folder))

#: Index file of megatron-core: magic, version 1, code 8 (uint16), one sequence, two document
#: bounds. The sequence has eight tokens and begins at byte 0; the document spans sequences 0 to 1.
INDEX = b"MMIDIDX\0\0" + struct.pack("<QBQQ iq qq", 1, 8, 1, 2, 8, 0, 0, 1)


def write_corpus(folder: Path) -> tuple[Path, Path]:
    """Write an empty tokenizer file and a valid data set of one document with eight tokens."""
    (folder / "tok.model").touch()
    (folder / "text_document.bin").write_bytes(struct.pack("<8H", *range(8)))
    (folder / "text_document.idx").write_bytes(INDEX)
    return folder / "tok.model", folder / "text_document"


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Return options with an empty tokenizer file and valid data."""
    tokenizer, data = write_corpus(tmp_path_factory.mktemp("files"))
    return ["--tokenizer-path", str(tokenizer), "--data-path", str(data)]


@pytest.fixture(scope="session")
def linked_pip(made_once):
    """Return a site-packages folder with pip, to which virtual environments of tests link."""
    (packages,) = made_once("pip", install_pip).glob("lib/python3*/site-packages")
    return packages


@pytest.fixture
def corpus(tmp_path):
    """Return an empty tokenizer file and the prefix of valid data."""
    return write_corpus(tmp_path)


@pytest.fixture
def plain_environment(monkeypatch):
    """Unset the variables for processes and machines, and enter the root of the repository."""
    for name in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "DRY_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LAB_PYTHON", sys.executable)
    monkeypatch.chdir(REPO)


@pytest.fixture
def dry(capsys, plain_environment):
    """Return a function that makes a dry run and returns its command's words and its messages."""

    import train_config
    from configs import options

    def call(*words, program=None):
        ours, flags = options.split_flags(words)
        status = (program or train_config).main([*ours, "--dry-run", "--", *flags])
        out, err = capsys.readouterr()
        assert status == 0, err
        return shlex.split(out), err

    return call


@pytest.fixture
def refused(capsys, plain_environment):
    """Return a function that runs a wrong command line and returns its error message."""

    import train_config

    def call(*words, program=None, status=2):
        assert (program or train_config).main([*words]) == status
        out, err = capsys.readouterr()
        assert out == ""
        [line] = [each for each in err.splitlines() if each.startswith("[ERROR] ")]
        return line.removeprefix("[ERROR] ")

    return call
