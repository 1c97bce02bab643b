"""Run a command, and watch and reliably stop the whole tree of processes that it starts.

A process group is not enough: torchrun starts each of its workers in a session of its own, and a
process whose parent dies gets another parent. On Linux this process therefore becomes the reaper of
its descendants: an orphan becomes its child, and a walk down from here finds the whole tree.
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
_POLL = 0.05  #: seconds between two checks while waiting for processes to end
_BUSY = 20  #: longest time that processes may stay busy, in grace periods


@dataclass(frozen=True)
class _Row:
    """One process of the system's process table."""

    parent: int
    dead: bool  #: true for a zombie, of which only the exit status is left
    started: str  #: start time, which tells two processes apart that had the same number in turn


class ProcessTree:
    """A command in a session of its own; `stop` ends it with all its descendants."""

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
            output: the file for its standard output and standard error; None to share those of
                this process.
            environment: its environment variables.
            drivers: processes that wait for the command; see `lost_driver`.
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
            # If this process is killed and cannot clean up, the kernel asks the command to end.
            preexec_fn=None
            if libc is None
            else lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )

    def wait(self, seconds: float) -> int | None:
        """Return the command's exit status, or None if it still runs after `seconds`."""
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
        """Return the processes of the tree that are alive."""
        table = self._look()
        return [pid for pid, started in self._seen.items() if _lives(table, pid, started)]

    def stop(
        self,
        grace: float,
        at_once: Callable[[], bool] = bool,
        busy: Callable[[], bool] = bool,
    ) -> list[int]:
        """Ask every process to end, and kill those that do not.

        Args:
            grace: seconds between the request and the kill.
            at_once: returns whether to kill without further waiting.
            busy: returns whether the processes do something that is worth waiting for, such as
                writing tensors. The grace period then starts again, at most `_BUSY` times.

        Returns:
            The processes that survive even that: stuck in the kernel, or owned by another user.
        """
        for number, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, 5.0)):
            signaled: set[int] = set()
            end = time.monotonic() + seconds
            last = end + (_BUSY - 1) * seconds
            while members := self.members():
                for pid in members:
                    if pid not in signaled or number == signal.SIGKILL:
                        with contextlib.suppress(ProcessLookupError, PermissionError):
                            os.kill(pid, number)
                        signaled.add(pid)
                if number == signal.SIGTERM and busy():
                    end = min(time.monotonic() + seconds, last)
                if time.monotonic() >= end or (number == signal.SIGTERM and at_once()):
                    break
                time.sleep(_POLL)
            if not members:
                return []
        return members

    def _look(self) -> dict[int, _Row]:
        """Read the process table, reap dead orphans, and remember which processes are ours."""
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
    """Return all processes by number, read from /proc if it exists and from `ps` otherwise."""
    if not (_PROC / "self" / "stat").exists():
        return _ask_ps()
    table = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            # A process can end between the listing and the reading.
            with contextlib.suppress(OSError, IndexError):
                # The name in parentheses may contain spaces and parentheses.
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
    """Return the C library if it has Linux's prctl; None otherwise."""
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
