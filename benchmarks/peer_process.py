"""Run a benchmark's worker in the Python that has the peer packages, and receive its events.

The benchmark calls `run_worker`; its worker calls the other functions. The worker writes one JSON
object (event) per line to its standard output. This module imports only the standard library, so
that a worker can reserve its output before it imports a package that prints text.
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO, TypeVar

import peers_env

REPO = Path(__file__).resolve().parents[1]
LOG_LINES = 20  #: number of lines of the worker's error output that are shown if the worker fails
LONGEST_REASON = 160  #: maximum number of characters of an error in a table

Event = dict[str, Any]
Loaded = TypeVar("Loaded")

_reports: TextIO = sys.stdout


def run_worker(
    command: list[str | Path], environment: Mapping[str, str], show: Callable[[Event], None]
) -> list[Event]:
    """Run a worker process, pass each event that it reports to `show`, and return all events.

    Raises:
        SystemExit: if the process fails; the end of its error output is printed first.
    """
    events = []
    with (
        # Some of the compared packages write files to the current folder.
        tempfile.TemporaryDirectory() as elsewhere,
        tempfile.TemporaryFile("w+") as log,
    ):
        with subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(REPO)} | environment,
            cwd=elsewhere,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as worker:
            for line in worker.stdout or ():
                events.append(json.loads(line))
                show(events[-1])
        if worker.returncode != 0:
            log.seek(0)
            peers_env.say("".join(log.readlines()[-LOG_LINES:]))
            raise SystemExit(
                f"[ERROR] {Path(command[1]).name} ended with status {worker.returncode}; its last "
                "messages are above"
            )
    return events


def start_worker(manual: str | None) -> None:
    """Reserve the worker's standard output for `report`; other output goes to standard error.

    If the command line asks for help, print `manual` instead, and end the process.
    """
    global _reports
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(manual)
        sys.exit()
    _reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")


def report(kind: str, **fields: Any) -> None:
    """Report an event to the process that started this worker."""
    _reports.write(json.dumps({"kind": kind} | fields) + "\n")


def release(distribution: str) -> str | None:
    """Return the installed release of a distribution, or None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def reason(error: Exception) -> str:
    """Return a one-line description of an error, for a table."""
    message = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}".removesuffix(": ")[:LONGEST_REASON]


def load_peers(
    loaders: Mapping[str, tuple[Callable[[], Loaded], str | None]],
) -> dict[str, Loaded]:
    """Import every peer package, and report which are available.

    Args:
        loaders: for each peer, by name, the function that loads it and the name of its
            distribution, which is None if the package is loaded from its source.
    """
    loaded = {}
    for name, (load, distribution) in loaders.items():
        missing, installed = None, "source" if distribution is None else release(distribution)
        try:
            loaded[name] = load()
        except Exception as error:  # An import may raise any error; continue with the next package.
            missing = reason(error)
        report("peer", name=name, release=installed, missing=missing)
    return loaded
