"""Defer exceptions from signal handlers while the collection must not be interrupted.

A signal handler may raise an exception between any two instructions of the main thread, even
between acquiring a lock and entering the block that releases it. The writer threads would then wait
forever, and a run that was asked to stop would hang until the writer's timeout.
"""

from types import TracebackType


class _DeferredSignals:
    """Reentrant context manager that defers exceptions from signal handlers until its block ends.

    Use it in the main thread, which runs all signal handlers.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._late: BaseException | None = None

    def interrupt(self, error: BaseException) -> None:
        """Raise `error` now, or at the end of the outermost active `with` block.

        Signal handlers call this method.
        """
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
