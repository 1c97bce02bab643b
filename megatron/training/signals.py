"""Ctrl-C and SIGTERM: every rank leaves by itself, at once and without a traceback.

torchrun passes the signal to all ranks, so that nothing has to be agreed on. A rank that waits in a
collective does not run Python's handler until its peers are gone and the collective fails; then it
finds the signal waiting and leaves as well.

The handler raises `Interrupted`, where a collection of tensors is at work at the end of that. Code
that Python calls back from C++ (autograd, destructors) may lose an exception, so the signal is also
remembered, and the loop asks for it at every micro-batch.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from megatron.collection.deferred_signals import signals_deferred
from megatron.training.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TOGETHER = 3.0  #: seconds: torchrun and what started it both pass a signal on
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
    """Turn the signals into `Interrupted` within the block; a later second one ends the process."""
    global _received
    _received = None
    owner, since = os.getpid(), 0.0

    def handle(number: int, frame) -> None:
        nonlocal since
        global _received
        if os.getpid() != owner:  # a worker, forked from here
            os._exit(128 + number)
        if _received is None:
            _received, since = number, time.monotonic()
            _interrupt(Interrupted(number))
        elif time.monotonic() - since > _TOGETHER:
            os._exit(128 + number)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(error: Interrupted) -> None:
    """Raise `error` now, or at the end of a step of the collection that must be finished."""
    signals_deferred.interrupt(error)
