"""Ctrl-C and SIGTERM: every rank leaves by itself, at once and without a traceback.

torchrun passes the signal to all ranks, so that nothing has to be agreed on. A rank that waits in a
collective does not run Python's handler until its peers are gone and the collective fails; then it
finds the signal waiting and leaves as well.

The handler raises `Interrupted`. Code that Python calls back from C++ (autograd, destructors) may
lose an exception, so the signal is also remembered, and the loop asks for it at every micro-batch.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

from megatron.training.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: int | None = None


def raise_if_received() -> None:
    """Leave now if a signal came while its exception could not get through.

    Raises:
        Interrupted: a signal came.
    """
    if _received is not None:
        raise Interrupted(_received)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn the signals into `Interrupted` within the block; a second one ends the process."""
    global _received
    _received = None
    owner = os.getpid()

    def handle(number: int, frame) -> None:
        global _received
        if _received is not None or os.getpid() != owner:  # a worker, forked from here
            os._exit(128 + number)
        _received = number
        raise Interrupted(number)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
