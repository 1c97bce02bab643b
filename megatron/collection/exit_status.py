"""Call functions when Python exits, and let them end the program with an error status."""

import atexit
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
from collections.abc import Callable
from typing import NoReturn

_turns: dict[Callable[[], None], object] = {}  #: last registration of each function to call


def call_at_exit(function: Callable[[], None]) -> None:
    """Register a function to be called once when this process ends, before earlier registrations.

    A function that is registered again is called only once, in its new position. A process started
    by multiprocessing calls the function, too. Before Python 3.13, a fork that ends runs only the
    finalizers of multiprocessing; since Python 3.13, it also runs the functions of `atexit`.
    """
    turn = _turns[function] = object()

    def call() -> None:
        if _turns.get(function) is turn:
            del _turns[function]
            function()

    atexit.register(call)
    if multiprocessing.parent_process() is not None:
        multiprocessing.util.Finalize(None, call, exitpriority=0)


def exit_with_error(text: str) -> NoReturn:
    """Print an error and end the program with status 1, from a function called at exit.

    Python ignores exceptions in such functions, so the process ends here. Functions that were
    registered earlier do not run, except those of logging and multiprocessing.
    """
    print(f"[ERROR] {text}", file=sys.stderr)
    logging.shutdown()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def error_at_exit() -> BaseException | None:
    """Return the exception that ends this program, or None.

    In an interactive session, such as a notebook, an exception ends only a cell.
    """
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
