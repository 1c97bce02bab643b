"""End the tensor collection: write what is in memory, and report what is missing.

`session` starts the collection and controls it. A trainer calls `settle` on all ranks after a run
without errors, and then `close`. If the trainer does not call `close`, `close_at_exit` ends the
collection when Python exits.
"""

import logging
import os
from typing import NoReturn

from megatron.collection import completeness
from megatron.collection.collectives import from_all_ranks
from megatron.collection.deferred_signals import signals_deferred
from megatron.collection.exit_status import error_at_exit, exit_with_error
from megatron.collection.limits import gib
from megatron.collection.plan import Planner
from megatron.collection.session_state import state

logger = logging.getLogger(__name__)


def flush() -> None:
    """Wait until all collected tensors are on disk or writing has failed."""
    if state.collector is not None:
        state.collector.outcome()
    flush_statistics()


def flush_statistics() -> None:
    """Write all measured statistics and losses to disk."""
    if state.collector is not None:
        with signals_deferred:
            state.collector.flush_losses()
    if state.statistics is not None:
        with signals_deferred:
            state.statistics.flush()


def settle() -> list[str]:
    """Gather the outcome of every rank for the run card, at the end of a run without errors.

    Must be called on all ranks.

    Returns:
        One message per rank that reached a limit.
    """
    if state.statistics is not None:
        failures = from_all_ranks(state.statistics.failure)
        state.statistics.failure = next(filter(None, failures), None)
    if state.collector is None:
        return []
    # Between short waits for the disk, the ranks synchronize, so that one slow disk does not cause
    # a timeout on the other ranks.
    while not all(from_all_ranks(state.collector.settled(state.collector.settings.turn))):
        pass
    state.collector.ranks = from_all_ranks(state.collector.outcome())
    return [
        f"{rank['limit']}; {rank['dropped_tensors']} tensors, "
        f"{gib(rank['dropped_bytes'])}, were dropped"
        for rank in state.collector.ranks
        if rank["limit"]
    ]


def close(aborted: str | None = None, *, interrupted: bool = False) -> str | None:
    """End the collection.

    Args:
        aborted: reason why training ended early, for the run card; None if it ended normally. If a
            reason is given, the ring buffer is written.
        interrupted: whether a signal ended training; the ring buffer is then discarded.

    Returns:
        An error message if the collection has failed on this rank, or on any rank if `settle` has
        been called, or if fewer iterations than requested were collected; None otherwise.
    """
    lacking = None if aborted is not None or interrupted else lacking_iterations()
    if lacking is not None:
        logger.warning("%s", lacking)
    with signals_deferred:
        collector, state.collector = state.collector, None
        history, state.statistics = state.statistics, None
        failures = [None if history is None else history.close()]
        if collector is not None:
            failures.insert(
                0, collector.close(aborted, interrupted=interrupted, lacking=lacking) or lacking
            )
        return "; ".join(filter(None, failures)) or None


def close_at_exit() -> None:
    """End the collection when Python exits, if the training loop has not called `close`.

    If the collection is not complete, the program ends with status 1.
    """
    if os.getpid() != state.owner:  # a forked process has no writer threads
        return
    error = error_at_exit()
    why = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
    if error is None and (nothing := reason_for_nothing()) is not None:
        end_with_error(nothing)
    lacking = None if error is not None else lacking_iterations()
    failure = close(why, interrupted=not isinstance(error, Exception)) or lacking
    if error is None and not state.audited and failure is not None:
        exit_with_error(f"the collection is not complete: {failure}")


def end_with_error(reason: str) -> NoReturn:
    """Mark the collection as failed, and end the program with status 1; called at exit."""
    if state.collector is not None:
        state.collector.give_up(reason)
    close()
    exit_with_error(reason)


def reason_for_nothing() -> str | None:
    """Return the reason why this run has collected nothing; None if this is not an error.

    A trainer that passes the format audit to `configure` reports this itself.
    """
    if (
        state.audited
        or not state.enabled
        or (state.collector is not None and state.collector.abandoned)
    ):
        return None
    return completeness.nothing_collected(
        state.collector, state.statistics, has_losses=bool(state.observed)
    )


def lacking_iterations() -> str | None:
    """Return an error message if fewer iterations than requested were collected; None otherwise."""
    if state.audited or state.collector is None or isinstance(state.collector, Planner):
        return None
    if state.collector.error is not None or state.collector.abandoned:  # another message says more
        return None
    return completeness.lacking_iterations(state.collector, state.completed_before)
