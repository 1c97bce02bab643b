"""Run functions in forks of this process, which has already imported what they need.

The imports of torch and megatron-core take several seconds. A fork does not repeat them, but it
has only one thread, and it cannot use a CUDA device that its parent has initialized.

This module imports only the standard library.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import IO, Any, NoReturn

Mask = set[int | signal.Signals]  #: signals that are blocked
Handlers = dict[signal.Signals, Any]  #: handler of each signal, as `signal.getsignal` returns it

SIGNALS = (signal.SIGINT, signal.SIGTERM)
GRACE = 15.0  #: seconds between asking a fork to end and killing it


def run_in_fork(program: Callable[[], int], output: IO[bytes]) -> int:
    """Call `program` in a fork of this process, and return its exit status.

    The exit status is the function's result, the code of `SystemExit`, 130 after Ctrl-C, 1 after
    any other exception, or minus the number of the signal that killed the fork. If Ctrl-C or
    SIGTERM ends the wait, the fork is ended first.

    Args:
        program: function to call.
        output: file that receives the fork's standard output and standard error.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Python swallows an exception that a signal handler raises during a fork. Blocking the signals
    # is not enough, because another thread may receive them, so the handlers only record them. In
    # the fork, Python forgets signals that arrive early, so they stay blocked there until the
    # handlers are restored.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    arrived: list[int] = []
    handlers: Handlers = {}
    try:
        for number in SIGNALS:
            handlers[number] = signal.signal(number, lambda number, frame: arrived.append(number))
        pid = os.fork()
    except BaseException:
        _restore(handlers, [])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        raise
    if pid == 0:
        _become(program, output, handlers, mask)
    try:
        _restore(handlers, arrived)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except BaseException:
        _end(pid)
        raise


def _restore(handlers: Handlers, arrived: list[int]) -> None:
    """Restore signal handlers, and send this process the signals that arrived in the meantime."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)
    for late in arrived:
        signal.raise_signal(late)


def _become(
    program: Callable[[], int], output: IO[bytes], handlers: Handlers, mask: Mask
) -> NoReturn:
    """Call `program` in this forked process, and exit with the status that it returns."""
    status = 1
    try:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        _restore(handlers, [])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = program()
    except SystemExit as end:  # A handler of SIGTERM may raise it.
        if end.code is None or isinstance(end.code, int):
            status = end.code or 0
        else:
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end(pid: int) -> None:
    """Ask a fork to end, kill it if it does not, and wait for it."""
    # The fork may have ended, and may have been waited for, just before a signal arrived.
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        for number, seconds in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 5.0)):
            os.kill(pid, number)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    return
                time.sleep(0.05)
