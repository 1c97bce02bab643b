"""Let the work in the background wait while a user looks at a new view.

Reading an index and measuring tensors would otherwise take processor time from the server and from
a browser on the same machine. Lower priority alone does not prevent this: Linux divides the time
between terminal sessions before it looks at the niceness of their processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

QUIET = 1.0  #: time that a browser may need to draw a view, in seconds
LONGEST = 5.0  #: maximum time for which a step of the background work waits, in seconds
_SIGNAL = signal.SIGUSR1
_STEP = 0.05


class Priority:
    """The time until which the work in the background waits."""

    def __init__(self) -> None:
        self._until = 0.0
        self._processes: set[int] = set()
        self._lock = threading.Lock()

    def request(self) -> None:
        """Make the background work wait, because a user has requested a view."""
        with self._lock:
            self._until = time.monotonic() + QUIET
            for process in self._processes:
                with contextlib.suppress(OSError):
                    os.kill(process, _SIGNAL)

    def wait(self, stop: threading.Event) -> None:
        """Wait in a background thread until no view is being drawn, at most `LONGEST` seconds."""
        deadline = time.monotonic() + LONGEST
        while not stop.is_set():
            left = min(self._until, deadline) - time.monotonic()
            if left <= 0:
                return
            stop.wait(left)

    def add(self, process: int) -> None:
        """Add a process that `request` pauses; it must have called `obey` or blocked the signal."""
        with self._lock:
            self._processes.add(process)

    def remove_all(self) -> None:
        """Forget all processes, so that `request` no longer signals them."""
        with self._lock:
            self._processes.clear()


def obey() -> None:
    """Make this process wait whenever its server draws a view.

    The process sleeps in the handler of a signal, which runs between two calls of a kernel. It
    would not wake up after SIGSTOP if the server was killed in the meantime.
    """
    until = 0.0

    def pause(*_: object) -> None:
        nonlocal until
        is_waiting = until > 0
        until = time.monotonic() + QUIET
        deadline = time.monotonic() + LONGEST
        while not is_waiting and time.monotonic() < min(until, deadline):
            time.sleep(_STEP)
        until = until if is_waiting else 0.0

    signal.signal(_SIGNAL, pause)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {_SIGNAL})


@contextlib.contextmanager
def blocked_signals() -> Iterator[None]:
    """Block signals in a `with` block, so that a process started there begins with them blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, _SIGNAL})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
