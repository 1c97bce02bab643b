"""Run unit tests of a Megatron-LM checkout, and write the outcome of each test.

    unit_test_worker.py RESULTS PATH...

`tests/overlay/nvidia_unit_tests.py` starts this program in the root of the checkout. Each test file
runs in a separate fork, because some files set up process groups when they are imported.
A test that ends its process or takes too long counts as `killed`, and the tests after it run in a
new fork. RESULTS gets one line per file; files that it already lists are not run again.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

SECONDS = 120  #: time limit of a test
MOST_KILLED = 3  #: number of killed tests after which a file's other tests are not run
REASON = 300  #: maximum length of an error message, in characters
OPTIONS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=")
#: modules that most tests import; they are imported once, before the forks
PRELOADED = (
    "megatron.core.models.gpt",
    "megatron.training.arguments",
    "megatron.training.training",
)
IMPORT, END = "import", "end"  #: names that are reported besides those of the tests


class Reporter:
    """A pytest plugin that writes the outcome of each test to a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def send(self, *words: str) -> None:
        """Send the name of a test, its outcome, and the reason of a failure."""
        os.write(self.pipe, json.dumps(words).encode() + b"\n")

    def pytest_collection_finish(self) -> None:
        conftest = sys.modules.get("tests.unit_tests.conftest")
        if conftest is not None:  # conftest.py downloads data sets
            conftest.download_and_extract_asset = _refuse_download

    def pytest_collectreport(self, report) -> None:
        if report.failed:
            self.send(IMPORT, "failed", _reason(report))

    def pytest_runtest_logstart(self, nodeid) -> None:
        self.send(nodeid, "killed", "")

    def pytest_runtest_logreport(self, report) -> None:
        """Send the outcome of a test; a failed teardown replaces an earlier outcome."""
        if report.when == "call" or report.outcome != "passed":
            reason = "" if report.outcome == "passed" else _reason(report)
            self.send(report.nodeid, report.outcome, reason)


def run_file(file: str) -> dict[str, list[str]]:
    """Return the outcome of each test of a file, and the reason if it did not pass."""
    outcomes: dict[str, list[str]] = {}
    while END not in outcomes:
        done = [f"--deselect={name}" for name in outcomes]
        outcomes |= dict(_run_fork([*OPTIONS, *done, file]))
        killed = [name for name, (outcome, _) in outcomes.items() if outcome == "killed"]
        if len(killed) >= MOST_KILLED or IMPORT in killed:
            break
    outcomes.pop(END, None)
    return outcomes


def _run_fork(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Run pytest in a fork until it ends, and yield the outcomes of the tests that started."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        os.close(reading)
        try:
            reporter = Reporter(writing)
            pytest.main(words, plugins=[reporter])
            reporter.send(END, "passed", "")
        finally:
            os._exit(0)
    os.close(writing)
    text = b""
    try:
        while select.select([reading], [], [], SECONDS)[0]:
            if not (part := os.read(reading, 1 << 16)):
                break
            text += part
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):  # also ends the processes of the tests
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    lines = [json.loads(line) for line in text.split(b"\n")[:-1]]
    if not lines:
        yield IMPORT, ["killed", ""]
    for name, outcome, reason in lines:
        yield name, [outcome, reason]


def _refuse_download(**_options) -> None:
    raise ImportError("the download of data sets is disabled")


def _reason(report) -> str:
    """Return the message of an error, or of a skipped test."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return text[-REASON:]


def main(results: Path, paths: list[str]) -> None:
    """Run all files that have no outcome yet."""
    lines = results.read_text().splitlines() if results.exists() else []
    finished = {json.loads(line)["file"] for line in lines}
    for name in PRELOADED:
        importlib.import_module(name)
    utils = importlib.import_module("megatron.core.utils")
    if utils.get_te_version() is None:  # the tests compare this version with releases
        utils.get_te_version = lambda: Version("0")
    for path in paths:
        files = sorted(Path(path).rglob("test_*.py")) if Path(path).is_dir() else [Path(path)]
        for file in map(str, files):
            if file not in finished:
                outcomes = run_file(file)
                with results.open("a") as stream:
                    stream.write(json.dumps({"file": file, "outcomes": outcomes}) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the fork that is running
    main(Path(sys.argv[1]), sys.argv[2:])
