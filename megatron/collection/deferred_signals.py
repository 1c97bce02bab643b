"""Defer the exception of a signal handler while the collection runs code that must not be
interrupted.

A handler may raise between any two steps of the main thread, and so between the acquisition of a
lock and the block that releases it. The writer threads would then wait forever, and a run that was
asked to end would hang until the timeout of the writer.
"""

from types import TracebackType


class _DeferredSignals:
    """A reentrant `with` block for the main thread, which runs all signal handlers."""

    def __init__(self) -> None:
        self._depth = 0
        self._late: BaseException | None = None

    def interrupt(self, error: BaseException) -> None:
        """Raise `error` now or at the end of the block; called by a signal handler."""
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
