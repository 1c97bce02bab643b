"""Functions that print log lines to stdout.

Several ranks share stdout. Each line is written in one call, so that lines of different ranks do
not mix.
"""

import contextlib
import os
import sys
from datetime import datetime
from typing import Any, TextIO

import torch.distributed as dist

from megatron.training.errors import RankError

_write_errors: list[OSError] = []  #: first error that occurred while writing the log, if any


class Log:
    """A wrapper around stdout that records the first write error and lets training continue."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text to stdout. After the first write error, all text is discarded."""
        try:
            return self._stream.write(text)
        except OSError as error:
            _give_up(error)
            return len(text)

    def flush(self) -> None:
        """Flush stdout. An error is recorded instead of raised."""
        try:
            self._stream.flush()
        except OSError as error:
            _give_up(error)


def _write(message: str) -> None:
    """Write a line to the log. Errors are not raised; the first one is printed to stderr."""
    log = Log(sys.stdout)
    log.write(message + "\n")
    log.flush()


def _give_up(error: OSError) -> None:
    _redirect_to_null()  # buffered output would fail again
    if not _write_errors:
        _write_errors.append(error)
        with contextlib.suppress(OSError):
            sys.stderr.write(
                f"[WARNING] the log cannot be written ({error.strerror}): training continues "
                "without it\n"
            )
            sys.stderr.flush()


def _redirect_to_null() -> None:
    """Redirect stdout to the null device, so that later writes cannot fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def finish_log() -> None:
    """Check that the log is complete, at the end of a run.

    Raises:
        RankError: if lines could not be written for a reason other than a closed pipe.
    """
    if _write_errors and not isinstance(_write_errors[0], BrokenPipeError):
        raise RankError(
            f"training is complete, but its log is not: {_write_errors[0].strerror}; free disk "
            "space, or send the output to another disk"
        )


def print_rank_0(message: str) -> None:
    """Print a line on the first rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(message)


def is_last_rank() -> bool:
    """Return whether this is the last rank, which has the loss and prints it."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Print a line on the last rank only. This rank belongs to the last pipeline stage."""
    if is_last_rank():
        _write(message)


def stamp() -> str:
    """Return the current time in the format of Megatron-LM's log lines."""
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
