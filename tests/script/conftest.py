"""Makes the modules of script/ importable, as they are to the scripts there."""

import shlex
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


@pytest.fixture
def corpus(tmp_path):
    """A tokenizer and data that are there, though not real: for what only looks."""
    (tmp_path / "tok.model").write_bytes(b"")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"text_document{suffix}").write_bytes(b"")
    return tmp_path / "tok.model", tmp_path / "text_document"


@pytest.fixture
def plain_environment(monkeypatch):
    """Nothing that says where and how many; the current folder is the tree's root."""
    for name in ("NPROC", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "DRY_RUN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LAB_PYTHON", sys.executable)
    monkeypatch.chdir(REPO)


@pytest.fixture
def dry(capsys, plain_environment):
    """The words of a dry run, and what was said."""

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
    """The message of a command line that is refused."""

    import train_config

    def call(*words, program=None, status=2):
        assert (program or train_config).main([*words]) == status
        out, err = capsys.readouterr()
        assert out == ""
        [line] = [each for each in err.splitlines() if each.startswith("[ERROR] ")]
        return line.removeprefix("[ERROR] ")

    return call
