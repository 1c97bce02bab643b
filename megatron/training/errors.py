"""Errors that are the user's to solve, and how a run ends with one: a line, not a traceback."""

import os
import signal
import sys

from megatron.bounded_files import printable

USAGE_ERROR = 2  #: exit status of a command line that cannot be run, as argparse has it
RUN_ERROR = 1  #: exit status of a run that started and failed
_LONGEST = 10_000  #: longest message in characters


class UserError(ValueError):
    """The command line or the data cannot be used. The message reads `what; what to do`."""

    status = USAGE_ERROR


class RunError(UserError):
    """The run started and cannot go on (a loss that is not finite, a disk that is full)."""

    status = RUN_ERROR


class RankError(RunError):
    """A `RunError` that this rank alone has found, so that this rank must report it."""


class Interrupted(BaseException):
    """Ctrl-C or SIGTERM. Not an `Exception`: nothing between the signal and the entry point may
    swallow it.
    """

    def __init__(self, number: int):
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)

    def __reduce__(self) -> tuple[type, tuple[int]]:
        """Support pickle: ranks that load a checkpoint together exchange their exceptions."""
        return Interrupted, (int(self.signal),)

    @property
    def status(self) -> int:
        """The status that a shell reports of a process killed by this signal."""
        return 128 + self.signal.value


def is_first_rank() -> bool:
    """Whether this process speaks for the run. Before torch.distributed is initialized the first
    one of each machine does: what is wrong may be wrong on one machine alone.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized():
        return int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))) == 0
    return torch.distributed.get_rank() == 0


def report(message: str, *, every_rank: bool = False) -> None:
    """Write `[ERROR] message` to stderr, from the rank that speaks for the run only, unless the
    error is this rank's alone.

    Control characters are escaped, because a message may quote a file that forges lines.
    """
    if every_rank or is_first_rank():
        sys.stderr.write(f"[ERROR] {printable(message, limit=_LONGEST)}\n")
        sys.stderr.flush()
