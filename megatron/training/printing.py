"""Log lines on stdout. Several ranks share one stdout, so each line is written in one call, which
keeps the lines of different ranks apart.
"""

import contextlib
import os
import sys
from datetime import datetime
from typing import Any, TextIO

import torch.distributed as dist

from megatron.training.errors import RankError

_write_errors: list[OSError] = []  #: the first error of writing the log


class Log:
    """A wrapper of stdout that records the first write error, so that training continues."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or discard it after the first error."""
        try:
            return self._stream.write(text)
        except OSError as error:
            _give_up(error)
            return len(text)

    def flush(self) -> None:
        """Flush the stream; an error is recorded and not raised."""
        try:
            self._stream.flush()
        except OSError as error:
            _give_up(error)


def _write(message: str) -> None:
    """Write a line. The first error is recorded and printed to stderr, and training continues."""
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
    """Redirect stdout to the null device, so that no later write can fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def finish_log() -> None:
    """Check at the end of a run that the log is complete.

    Raises:
        RankError: if lines are missing for a reason other than a closed pipe.
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
    """Return whether this is the last rank, which knows the loss and prints it."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Print a line on the last rank only, which is in the last pipeline stage."""
    if is_last_rank():
        _write(message)


def stamp() -> str:
    """Return the current time in the format of Megatron-LM's log lines."""
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
