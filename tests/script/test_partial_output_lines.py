"""A run interrupted at any executed line of script/data/partial_output.py can be resumed."""

import sys

import pytest

from tests.script.preprocess_runs import call, make_inputs, result
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "script/data"))

import partial_output
import readers

WATCHED = {"add", "_check_use", "commit", "publish", "write_index", "blocks", "copy"}


class Interrupter:
    """A trace function that raises at the given line event, like a signal handler."""

    def __init__(self, at: int | None) -> None:
        self.at, self.seen, self.where = at, 0, ""

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(str(REPO / "script/data")) or (
            code.co_name not in WATCHED
        ):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def traced(folder, prefix: str, at: int | None, *options: str) -> tuple[int, Interrupter]:
    interrupter, before = Interrupter(at), sys.gettrace()
    sys.settrace(interrupter)
    try:
        return call(folder, prefix, *options), interrupter
    finally:
        sys.settrace(before)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Write two input files of a few batches with one bad line each, and return their folder."""
    folder = tmp_path_factory.mktemp("inputs")
    make_inputs(folder, files=2, documents=10)
    return folder


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["commits", "no-commits"])
def test_a_run_interrupted_at_any_line_goes_on(inputs, monkeypatch, seconds):
    monkeypatch.setattr(readers, "BATCH_BYTES", 700)
    monkeypatch.setattr(partial_output, "COMMIT_SECONDS", seconds)
    whole, cut = f"whole{seconds}", f"cut{seconds}"
    assert call(inputs, whole) == 0  # imports modules now, because tracing their import is slow
    status, interrupter = traced(inputs, whole, None, "--overwrite")
    assert status == 0
    wanted = result(inputs, whole)
    assert interrupter.seen > 100
    for at in range(1, interrupter.seen + 1):
        status, stopped = traced(inputs, cut, at)
        assert status == 130, stopped.where
        published = (inputs / f"{cut}_text_document.idx").exists()
        if (inputs / f"{cut}.partial").exists() or not published:  # otherwise it had finished
            assert call(inputs, cut) == 0, stopped.where
        assert result(inputs, cut) == wanted, stopped.where
        for path in inputs.glob(f"{cut}_*"):
            path.unlink()
