"""Run readers on dumps in bounded memory, and write their reports and memory use as JSON.

python tests/analysis/dump/hostile_worker.py RESULT DUMP...
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("agg")

# The commands would import these modules later. Imported here, they do not count as memory used.
import megatron.analysis.drawing
import megatron.analysis.report.content
import megatron.analysis.verification.verify  # noqa: F401
from megatron.analysis.__main__ import main
from megatron.analysis.dump.tensor_files import UnreadableTensorError
from megatron.analysis.store import TensorStore

MEMORY = 3 << 30  #: bytes of address space, in addition to those in use before the first reader
SECONDS = 240  #: seconds until the process ends itself and prints where it hangs


def by_store(dump: Path, output: Path) -> int:
    """Load every tensor of the dump, and report unreadable ones."""
    store = TensorStore(dump)
    for problem in store.problems:
        print(problem)
    for path in store.missing["path"]:
        print(repr(path), "is missing")
    for record in store.records.itertuples():
        try:
            store.load(record)
        except UnreadableTensorError as error:
            print(error)
        else:
            print("loaded", repr(record.path))
    return 0


def command(*words: str) -> Callable[[Path, Path], int]:
    """Return a reader that runs `python -m megatron.analysis`; `{}` is its output folder."""

    def run(dump: Path, output: Path) -> int:
        name, *options = words
        return main([name, str(dump), *(word.format(output) for word in options)])

    return run


READERS = {
    "store": by_store,
    "verify": command("verify"),
    "stats": command("stats", "--formats", "mxfp8", "--workers", "1", "--output", "{}/stats.csv"),
    "quick": command("quick", "--output-dir", "{}", "--workers", "1"),
    "report": command("report", "--output-dir", "{}", "--workers", "1", "--formats", "mxfp8"),
}


def told(read: Callable[[Path, Path], int], dump: Path, output: Path) -> dict[str, object]:
    """Run one reader and return its report; a traceback in its output counts as a failure."""
    output.mkdir(parents=True)
    out, err = io.StringIO(), io.StringIO()
    begun = time.monotonic()
    status = -1
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = read(dump, output)
        except BaseException:  # readers must report a bad file, so even SystemExit is wrong
            traceback.print_exc()
    seconds = time.monotonic() - begun
    return {"status": status, "out": out.getvalue(), "err": err.getvalue(), "seconds": seconds}


def run(result: Path, dumps: list[Path]) -> None:
    """Run every reader on every dump."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found = {}
    for dump in dumps:
        for name, read in READERS.items():
            output = result.parent / "drawn" / dump.name / name
            found[f"{dump.name}/{name}"] = told(read, dump, output)
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    run(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
