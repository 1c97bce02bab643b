"""A command and everything that it starts, as one thing that can be watched and stopped for
certain.

A process group is not enough: torchrun gives each of its workers a session of its own, and a
process whose parent dies moves away from it. On Linux this process therefore becomes the reaper of
its descendants: an orphan becomes its child, and the tree is found by walking down from here.
Elsewhere every process that was ever seen in the tree is remembered. Standard library only; Linux
and macOS.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_POLL = 0.05  #: seconds between two looks while waiting for processes to end
_BUSY = 20  #: times the grace that processes may be busy


@dataclass(frozen=True)
class _Row:
    """One process of the system's table; `started` tells apart two that had one number in turn."""

    parent: int
    dead: bool  #: a zombie: only its exit status is left
    started: str


class ProcessTree:
    """Starts a command in a session of its own; `stop` ends it with all its descendants."""

    def __init__(
        self,
        command: list[str],
        *,
        output: IO[bytes] | None,
        environment: dict[str, str],
        drivers: Iterable[int] = (),
    ):
        """Start the command.

        Args:
            command: the words of the command.
            output: the file for its standard output and standard error; None: those of this
                process.
            environment: its environment variables.
            drivers: processes that wait for the command's end; see `lost_driver`.
        """
        self._table = _process_table()
        rows = {pid: self._table.get(pid) for pid in drivers}
        self._drivers = {pid: row.started if row else "" for pid, row in rows.items()}
        libc = _prctl()
        if libc is not None:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._seen: dict[int, str] = {}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            # if this process is killed without a chance to clean up, the command is asked to end
            preexec_fn=None
            if libc is None
            else lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )

    def wait(self, seconds: float) -> int | None:
        """The command's exit status, or None if it still runs after `seconds`."""
        self._look()
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None

    def lost_driver(self) -> int | None:
        """Return a driver that was dead at the last check, or None if all were alive."""
        lost = (p for p, started in self._drivers.items() if not _lives(self._table, p, started))
        return next(lost, None)

    def members(self) -> list[int]:
        """The processes of the tree that are alive."""
        table = self._look()
        return [pid for pid, started in self._seen.items() if _lives(table, pid, started)]

    def stop(
        self,
        grace: float,
        at_once: Callable[[], bool] = bool,
        busy: Callable[[], bool] = bool,
    ) -> list[int]:
        """Ask every process to end, end those that are left after `grace` seconds, or when
        `at_once` says so.

        As long as `busy` says that they are at something that is worth the wait, the seconds begin
        anew; not for ever.

        Returns the processes that outlive even that (stuck in the kernel, or of another user).
        """
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            asked: set[int] = set()
            end = time.monotonic() + seconds
            last = end + (_BUSY - 1) * seconds
            while members := self.members():
                for pid in members:
                    if pid not in asked or number == signal.SIGKILL:
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.kill(pid, number)
                        asked.add(pid)
                if number == signal.SIGTERM and busy():
                    end = min(time.monotonic() + seconds, last)
                if time.monotonic() >= end or (number == signal.SIGTERM and at_once()):
                    break
                time.sleep(_POLL)
            if not members:
                return []
        return members

    def _look(self) -> dict[int, _Row]:
        """Read the process table, collect dead orphans, and remember who belongs to the tree."""
        table = _process_table()
        here, family = os.getpid(), {os.getpid()}
        children: dict[int, list[int]] = {}
        for pid, row in table.items():
            children.setdefault(row.parent, []).append(pid)
        unvisited = [
            here,
            *(pid for pid, started in self._seen.items() if _lives(table, pid, started)),
        ]
        while unvisited:
            for pid in children.get(unvisited.pop(), []):
                if pid not in family:
                    family.add(pid)
                    unvisited.append(pid)
        for pid in family - {here}:
            row = table[pid]
            if row.dead and row.parent == here and pid != self.process.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            elif not row.dead:
                self._seen[pid] = row.started
        if self.process.returncode is None:
            self.process.poll()
        self._table = table
        return table


def _lives(table: dict[int, _Row], pid: int, started: str) -> bool:
    row = table.get(pid)
    return row is not None and not row.dead and row.started == started


def _process_table() -> dict[int, _Row]:
    """All processes: from /proc where there is one, else from `ps`."""
    if not (_PROC / "self" / "stat").exists():
        return _ask_ps()
    table = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            # a process can end between the listing and the reading
            with contextlib.suppress(OSError, IndexError):
                # the name in parentheses may hold spaces and parentheses itself
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                table[int(entry.name)] = _Row(int(fields[1]), fields[0] in "ZX", fields[19])
    return table


def _ask_ps() -> dict[int, _Row]:
    command = ["ps", "-A", "-o", "pid=,ppid=,state=,lstart="]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as ps:
        lines = ps.communicate()[0].splitlines()
    rows = (line.split(None, 3) for line in lines)
    table = {int(pid): _Row(int(up), "Z" in state, start) for pid, up, state, start in rows}
    table.pop(ps.pid, None)
    return table


def _prctl() -> ctypes.CDLL | None:
    """The C library where it has Linux's prctl."""
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
