"""Errors that the user can solve. A run that fails with one prints a line and no traceback."""

import os
import signal
import sys

from megatron.bounded_files import printable

USAGE_ERROR = 2  #: exit status after a command line that cannot be run, the same as argparse's
RUN_ERROR = 1  #: exit status of a run that started and failed
_LONGEST = 10_000  #: characters of a message; a longer one is shortened


class UserError(ValueError):
    """An error in the command line or the data. The message reads `problem; what to do`."""

    status = USAGE_ERROR


class RunError(UserError):
    """An error after which a started run cannot continue, such as a full disk or a NaN loss."""

    status = RUN_ERROR


class RankError(RunError):
    """A `RunError` that only this rank knows of, so that this rank must report it."""


class Interrupted(BaseException):
    """The exception of Ctrl-C and SIGTERM.

    It is not an `Exception`, so that no `except Exception` stops it on its way to the entry point.
    """

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)

    def __reduce__(self) -> tuple[type, tuple[int]]:
        """Support pickling, because ranks exchange their exceptions while loading a checkpoint."""
        return Interrupted, (int(self.signal),)

    @property
    def status(self) -> int:
        """The exit status that a shell reports for a process killed by this signal."""
        return 128 + self.signal.value


def is_first_rank() -> bool:
    """Return whether this process reports errors for the run.

    Before torch.distributed is initialized, the first process of each machine does, because an
    error may concern one machine only.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) == 0
    return torch.distributed.get_rank() == 0


def print_error(message: str, *, every_rank: bool = False) -> None:
    """Write `[ERROR] message` to stderr, from the first rank only or from every rank.

    Control characters are escaped, because a message may quote a file that forges log lines.
    """
    if every_rank or is_first_rank():
        sys.stderr.write(f"[ERROR] {printable(message, limit=_LONGEST)}\n")
        sys.stderr.flush()
