"""End a program with an error status when Python exits."""

import logging
import multiprocessing.util
import os
import sys
from typing import NoReturn


def exit_with_error(text: str) -> NoReturn:
    """Print an error and end the program with status 1, from a function registered with `atexit`.

    Python ignores exceptions in such functions, so the process ends here. Functions that were
    registered earlier do not run, except those of logging and multiprocessing.
    """
    print(f"[ERROR] {text}", file=sys.stderr)
    logging.shutdown()
    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
