"""Describe what is missing if a run has collected less than was requested."""

from megatron.collection.collector import Collector
from megatron.collection.statistics.history import TensorStatistics
from megatron.collection.training_clock import clock

RING_WITHOUT_LOSSES = (
    "a ring of iterations (--collect-ring) needs the loss of each iteration; call "
    "megatron.core.tensor_saver.observe(loss, grad_norm) after each iteration, or leave "
    "--collect-ring out"
)


def nothing_collected(
    collector: Collector | None, statistics: TensorStatistics | None, *, has_losses: bool
) -> str | None:
    """Return an error message if a run has collected or measured nothing although it should have.

    Otherwise, return None. A run that waits for an event (a ring buffer or a flag file) may end
    without any tensors, because the event may not occur.

    Args:
        collector: collector of this rank; None if the run collects no tensors.
        statistics: statistics of this rank; None if the run measures none.
        has_losses: whether the trainer has passed a loss to `session.observe`.
    """
    if clock.completed == 0:
        return (
            "nothing was collected: no training iteration ran in megatron-core's pipeline "
            "schedules or in `with megatron.core.tensor_saver.training_iteration(n):`"
        )
    if collector is not None and collector.has_ring and not has_losses:
        return RING_WITHOUT_LOSSES
    if statistics is not None and not (statistics.measured or statistics.failure):
        return (
            f"nothing was measured in {clock.completed} iteration(s) up to {clock.iteration}: "
            f"--tensor-statistics {statistics.settings.every} measures the iterations that are "
            "multiples of this number"
        )
    if collector is None or collector.may_be_empty:
        return None
    outcome = collector.outcome()
    if outcome["tensors"]:
        return None
    if (cause := outcome["error"] or outcome["limit"]) is not None:
        return f"nothing was collected: {cause}"
    return (
        f"nothing was collected in {clock.completed} iteration(s) up to {clock.iteration}: none of "
        "them was selected, or none ran a selected module"
    )


def lacking_iterations(collector: Collector, before: int) -> str | None:
    """Return an error message if a run has collected fewer iterations than requested, or None.

    A run that resumes another within the requested iterations shares them with the earlier run.

    Args:
        collector: collector of this rank.
        before: number of iterations completed before this run.
    """
    if collector.has_ring or collector.settings.flag_file:
        return None
    wanted, collected = collector.settings.control_iter, collector.collected
    selected = collector.settings.selection.iterations
    earlier = selected.until(before).count() or 0 if selected.count() is None else 0
    if collected + (earlier if earlier < wanted else 0) >= wanted:
        return None
    return (
        f"{wanted} iteration(s) were to be collected (--control-iter, --collect-iterations), but "
        f"the run had collected {collected} when it ended at iteration {clock.iteration}"
    )
