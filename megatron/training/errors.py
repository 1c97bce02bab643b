"""Exceptions that end the program with one line on stderr, without a traceback."""

import os
import signal
import sys

from megatron.bounded_files import printable

USAGE_ERROR = 2  #: exit status if the command line is invalid, the same as in argparse
RUN_ERROR = 1  #: exit status if a run fails after it has started
_LONGEST = 10_000  #: maximum length of a message, in characters; longer messages are shortened


class UserError(ValueError):
    """An error in the command line or the data.

    The message has the form `problem; what to do about it`.
    """

    status = USAGE_ERROR


class RunError(UserError):
    """An error that ends a run after it has started, such as a full disk or a NaN loss."""

    status = RUN_ERROR


class RankError(RunError):
    """A `RunError` that occurs on one rank only; this rank must print it."""


class Interrupted(BaseException):
    """The exception that Ctrl-C and SIGTERM raise.

    It does not derive from `Exception`, so no `except Exception` clause catches it before it
    reaches the entry point.
    """

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)

    def __reduce__(self) -> tuple[type, tuple[int]]:
        """Support pickling, because ranks exchange exceptions while they load a checkpoint."""
        return Interrupted, (int(self.signal),)

    @property
    def status(self) -> int:
        """The exit status of a process killed by this signal, as a shell reports it."""
        return 128 + self.signal.value


def is_first_rank() -> bool:
    """Return whether this process is the first rank, which reports the errors of the run.

    Before torch.distributed is initialized, this is the first process of each machine, because an
    error may affect only one machine.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) == 0
    return torch.distributed.get_rank() == 0


def print_error(message: str, *, every_rank: bool = False) -> None:
    """Write `[ERROR] message` to stderr, either on the first rank only or on every rank.

    Control characters are escaped, because a message may quote a file whose contents imitate log
    lines.
    """
    if every_rank or is_first_rank():
        sys.stderr.write(f"[ERROR] {printable(message, limit=_LONGEST)}\n")
        sys.stderr.flush()
