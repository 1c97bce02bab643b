"""Ctrl-C and SIGTERM: every rank leaves by itself, at once and without a traceback.

torchrun passes the signal to all ranks, so that nothing has to be agreed on. A rank that waits in a
collective does not run Python's handler until its peers are gone and the collective fails; then it
finds the signal waiting and leaves as well.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

from megatron.training.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn the signals into `Interrupted` within the block; a second signal ends the process on the
    spot.
    """
    owner = os.getpid()
    received = False

    def handle(number: int, frame) -> None:
        nonlocal received
        if received or os.getpid() != owner:  # a data or checkpoint worker, forked from here
            os._exit(128 + number)
        received = True
        raise Interrupted(number)

    previous = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
