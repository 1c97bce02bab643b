"""Handle Ctrl-C and SIGTERM so that every rank stops on its own, without a traceback.

torchrun passes the signal to all ranks, so the ranks need no communication to stop. While a rank
waits in a collective operation, its Python signal handler cannot run. The handler runs as soon as
the collective fails because the other ranks have exited, and then this rank stops as well.

The handler raises `Interrupted`. While the tensor collector copies a tensor or waits for its
writer, the exception is delayed until that step is complete. An exception may be lost in Python
code that is called from C++ (autograd, destructors). The signal is therefore also recorded, and the
training loop checks for it in every micro-batch.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from megatron.collection.deferred_signals import signals_deferred
from megatron.training.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: time in seconds after the first signal during which further signals are ignored; torchrun and
#: the program that started torchrun may both pass on the same signal
_SAME_SIGNAL_SECONDS = 3.0
_received: int | None = None  #: number of the first signal received; None if there was none


def raise_if_received() -> None:
    """Raise `Interrupted` again if a signal was received, in case the first exception was lost.

    Raises:
        Interrupted: if a signal was received.
    """
    if _received is not None:
        raise Interrupted(_received)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` when the process receives Ctrl-C or SIGTERM within the `with` block.

    Another signal more than three seconds later ends the process immediately.
    """
    global _received
    _received = None
    owner, received_at = os.getpid(), 0.0

    def handle(number: int, frame) -> None:
        nonlocal received_at
        global _received
        if os.getpid() != owner:  # this process is a worker, which inherited the handler
            os._exit(128 + number)
        if _received is None:
            _received, received_at = number, time.monotonic()
            _interrupt(Interrupted(number))
        elif time.monotonic() - received_at > _SAME_SIGNAL_SECONDS:
            os._exit(128 + number)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(error: Interrupted) -> None:
    """Raise `error` now, or as soon as the tensor collector can be interrupted."""
    signals_deferred.interrupt(error)
