"""Open each case of `tests/hostile_inputs.py` as users do, in bounded time and memory.

For each case, one JSON line with its error and its time is printed.

    python tests/hostile_worker.py FOLDER
"""

import contextlib
import io
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from tests.hostile_inputs import cases
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "script/data"))

import preprocess
from megatron.fake_quant.policy.__main__ import main as policy_command
from megatron.fake_quant.policy.settings import read_settings
from megatron.training.data.index_cache import check_cached_files
from megatron.training.data.indexed_data import check_index
from megatron.training.data.manifest import check_fits
from megatron.training.data.paths import check_prefix
from megatron.training.data.tokenizer import build_tokenizer

SECONDS = 20  #: limit per case, even on a busy machine
MEMORY = 3 << 29  #: bytes of address space beyond what the imports take


def train(path: Path) -> None:
    """Check a prefix as training does: first its header, later the whole index."""
    check_prefix(str(path))
    check_index(str(path))


def manifest(path: Path) -> None:
    check_fits(str(path), build_tokenizer("NullTokenizer", vocab_size=99))


def command(main, *words: str | Path) -> None:
    """Run a command in this process, and raise the error that it printed."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        status = main([str(word) for word in words])
    assert status, "the command succeeded"
    raise ValueError(errors.getvalue().removeprefix("[ERROR] "))


def tokenize(path: Path) -> None:
    output = ("--output-prefix", path.parent / "out", "--tokenizer-type", "NullTokenizer")
    words = ("--input", path, *output, "--vocab-size", "99", "--workers", "1")
    command(preprocess.main, *words)


ENTRIES = {
    "train": train,
    "check": lambda path: command(preprocess.main, "--check", path),
    "manifest": manifest,
    "cache": lambda path: check_cached_files(str(path)),
    "recipe": lambda path: command(policy_command, "--check-recipe", path),
    "settings": read_settings,
    "preprocess": tokenize,
}


def outcome(entry: str, path: Path) -> dict[str, object]:
    """Return the error and its class; `error` is empty if the input was accepted."""
    started = time.monotonic()
    try:
        ENTRIES[entry](path)
        kind, error = "", ""
    except ValueError as problem:  # UserError is one
        kind, error = "ValueError", str(problem)
    except BaseException as problem:  # the user would see a traceback
        kind, error = type(problem).__name__, str(problem)
    return {"kind": kind, "error": error, "seconds": time.monotonic() - started}


def main() -> None:
    folder = Path(sys.argv[1])
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
    for number, case in enumerate(cases()):
        place = folder / str(number)
        place.mkdir()
        path = case.make(place)
        os.chdir(place)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(SECONDS)
        result = outcome(case.entry, path)
        signal.alarm(0)
        executed = (place / "executed").exists()
        print(json.dumps({"name": case.name, "executed": executed, **result}), flush=True)


main()
