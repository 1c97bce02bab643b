"""Start the watcher of a collection with a fake training."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
WATCHER = REPO / "script" / "collect/run.py"
TRAINING = Path(__file__).with_name("fake_training.py")
LIMIT = 30.0  #: time limit in seconds; no run here needs more than three


def command(folder: Path, behaviour: str, *options: str, iterations: int = 1) -> list[str]:
    return [
        sys.executable,
        str(WATCHER),
        "--tensor-dir",
        str(folder / "tensors"),
        "--name",
        "mxfp8",
        "--log-dir",
        str(folder / "logs"),
        "--grace",
        "0.5",
        *options,
        "--",
        sys.executable,
        str(TRAINING),
        str(folder / "tensors"),
        behaviour,
        str(iterations),
        str(folder / "pids"),
    ]


def collect(
    folder: Path, behaviour: str, *options: str, **more: int
) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(folder, behaviour, *options, **more), capture_output=True, text=True, timeout=LIMIT
    )


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # a zombie counts as dead
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def started(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "pids").read_text().split()]
