"""Lines on stdout. Several ranks share one stdout: each line is one write, so that none is cut by
another's.
"""

import contextlib
import os
import sys
from datetime import datetime
from typing import Any, TextIO

import torch.distributed as dist

from megatron.training.errors import RankError

RULE = "-" * 100


_lost: list[OSError] = []  #: the first error of the log


class Log:
    """Standard output for all packages: its first error is recorded and training continues."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text, or drop it after the first error."""
        try:
            return self._stream.write(text)
        except OSError as error:
            _give_up(error)
            return len(text)

    def flush(self) -> None:
        """Flush what was written, or drop it after the first error."""
        try:
            self._stream.flush()
        except OSError as error:
            _give_up(error)


def _write(message: str) -> None:
    """Write a line. The first error is recorded and printed to stderr; training continues."""
    log = Log(sys.stdout)
    log.write(message + "\n")
    log.flush()


def _give_up(error: OSError) -> None:
    _to_nowhere()  # buffered output would fail again
    if not _lost:
        _lost.append(error)
        with contextlib.suppress(OSError):
            sys.stderr.write(
                f"[WARNING] the log cannot be written ({error.strerror}): training continues "
                "without it\n"
            )
            sys.stderr.flush()


def _to_nowhere() -> None:
    """Redirect stdout to the null device, so that no later write can fail."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def finish_log() -> None:
    """Check at the end of a run that the log is complete.

    Raises:
        RankError: if lines are missing for another reason than a closed pipe.
    """
    if _lost and not isinstance(_lost[0], BrokenPipeError):
        raise RankError(
            f"training is complete, but its log is not: {_lost[0].strerror}; make room, or send "
            "the output to another disk"
        )


def print_rank_0(message: str) -> None:
    """Print from the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(message)


def is_last_rank() -> bool:
    """Whether this is the rank that knows the loss and prints it."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Print from the last rank, which is in the last pipeline stage."""
    if is_last_rank():
        _write(message)


def stamp() -> str:
    """The time as Megatron-LM's log lines have it."""
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
