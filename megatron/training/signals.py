"""Ctrl-C and SIGTERM: every rank stops on its own, at once and without a traceback.

torchrun passes the signal to all ranks, so the ranks need not agree on anything. A rank that waits
in a collective runs Python's handler only after its peers are gone and the collective has failed.
It then finds the signal pending and stops as well.

The handler raises `Interrupted`. While a tensor is being collected, it raises it at the end of that
step. An exception may get lost in code that C++ calls back (autograd, destructors). The signal is
therefore also recorded, and the training loop checks for it at every micro-batch.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from megatron.collection.deferred_signals import signals_deferred
from megatron.training.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: seconds during which a second signal counts as the first one; torchrun and the program that
#: started it both pass a signal on
_SAME_SIGNAL_SECONDS = 3.0
_received: int | None = None  #: number of the first signal


def raise_if_received() -> None:
    """Raise `Interrupted` if a signal was received and its exception got lost.

    Raises:
        Interrupted: if a signal was received.
    """
    if _received is not None:
        raise Interrupted(_received)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn signals into `Interrupted` within the block; a second one, later, ends the process."""
    global _received
    _received = None
    owner, received_at = os.getpid(), 0.0

    def handle(number: int, frame) -> None:
        nonlocal received_at
        global _received
        if os.getpid() != owner:  # a worker process that was forked from this one
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
    """Raise `error` now, or at the end of a collection step that must not be interrupted."""
    signals_deferred.interrupt(error)
