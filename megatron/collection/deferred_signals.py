"""Lets a signal's exception wait while a collection is at something that it must not tear apart.

A handler may raise between any two steps of the main thread, and so between a lock that is taken
and the block that gives it back: the writer threads would then wait for ever, and a run that was
asked to end would sit there until its patience with the disk is over.
"""

from types import TracebackType


class _DeferredSignals:
    """A block that can stand inside of itself; of one thread, the one that runs handlers."""

    def __init__(self) -> None:
        self._depth = 0
        self._late: BaseException | None = None

    def interrupt(self, error: BaseException) -> None:
        """Of a signal's handler: raise `error`, now or at the end of the block."""
        if self._depth == 0:
            raise error
        self._late = error

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and self._late is not None:
            late, self._late = self._late, None
            raise late


signals_deferred = _DeferredSignals()
