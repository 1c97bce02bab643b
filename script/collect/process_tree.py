"""Run a command, watch it, and reliably stop all processes that it starts.

A process group is not enough: torchrun starts each of its workers in a separate session, and a
process whose parent dies gets a new parent. On Linux, this process therefore becomes the subreaper
of its descendants: orphans become its children, so that all descendants can be found from here. On
other systems, every process that was ever seen in the tree is remembered. This module uses only
the standard library, and supports Linux and macOS.
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
_POLL = 0.05  #: time in seconds between two checks while waiting for processes to end
_BUSY = 20  #: maximum time to wait for busy processes, as a multiple of the grace period


@dataclass(frozen=True)
class _Row:
    """One process, as listed in the system's process table."""

    parent: int
    dead: bool  #: True for a zombie: a process that has ended and only keeps its exit status
    started: str  #: start time, which distinguishes two processes that had the same process ID


class ProcessTree:
    """Command that runs in its own session; `stop` ends the command and all its descendants."""

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
            command: the program to run and its arguments.
            output: file for the standard output and standard error of the command. None means that
                the command uses the same streams as this process.
            environment: environment variables of the command.
            drivers: process IDs of the scripts that wait for the command; see `lost_driver`.
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
            # If this process is killed and cannot clean up, the kernel terminates the command.
            preexec_fn=None
            if libc is None
            else lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0),
        )

    def wait(self, seconds: float) -> int | None:
        """Return the command's exit status, or None if it is still running after `seconds`."""
        self._look()
        try:
            return self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None

    def lost_driver(self) -> int | None:
        """Return the process ID of a driver script that has ended, or None if all still run.

        The result comes from the process table that was read last, for instance by `wait`.
        """
        lost = (p for p, started in self._drivers.items() if not _lives(self._table, p, started))
        return next(lost, None)

    def members(self) -> list[int]:
        """Return the process IDs of all running processes in the tree."""
        table = self._look()
        return [pid for pid, started in self._seen.items() if _lives(table, pid, started)]

    def stop(
        self,
        grace: float,
        at_once: Callable[[], bool] = bool,
        busy: Callable[[], bool] = bool,
    ) -> list[int]:
        """Ask every process of the tree to end, and kill those that do not end in time.

        Args:
            grace: time in seconds between the request to end and the kill.
            at_once: function that returns True if the processes must be killed without waiting.
            busy: function that returns True if the processes are doing something worth waiting
                for, such as writing tensors. The grace period then starts again, but the total
                time is at most `_BUSY` grace periods.

        Returns:
            The IDs of processes that could not be killed, because they are stuck in the kernel or
            belong to another user.
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
        """Read the process table, reap dead orphans, and remember the processes of the tree."""
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
    """Return all processes of the system, with their process IDs as keys.

    They are read from /proc if it exists, and from the output of `ps` otherwise.
    """
    if not (_PROC / "self" / "stat").exists():
        return _ask_ps()
    table = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            # A process can end between the listing of /proc and the reading of its file.
            with contextlib.suppress(OSError, IndexError):
                # The process name is in parentheses, and may itself contain spaces and parentheses.
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
    """Return the C library, for its function `prctl`; None on systems other than Linux."""
    return ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
