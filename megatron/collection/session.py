"""Collection of this process: one function per event of training, in the order of a run.

A layer calls `capture` at each forward pass. None means that nothing of it is collected now, and
the layer then takes the path of megatron-core; otherwise it passes its tensors to the `Capture`.
The schedule calls `begin_iteration` and `end_iteration`. A trainer calls `configure` with its flags
and `close` at the end. `megatron.core.tensor_saver` is the interface for all of them: it adds
what only megatron-core knows, the coordinates of the rank and the modules of the model.

Tensors are copied at once, so that the file holds what the matmul saw, and written by threads. A
write that fails stops the collection, reports it once and lets training continue. The run card then
has the status `failed`, and `close` returns the message, with which our trainer exits non-zero.
"""

import atexit
import logging
import os
import secrets
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from megatron.collection.capture import Capture
from megatron.collection.collectives import from_all_ranks, from_first_rank, together
from megatron.collection.collector import Collector
from megatron.collection.deferred_signals import signals_deferred
from megatron.collection.limits import gib
from megatron.collection.loss_spikes import Levels
from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.plan import Planner
from megatron.collection.record_writer import check_writable
from megatron.collection.selection import Selection
from megatron.collection.settings import Settings, enabled_by_environment, read_settings
from megatron.collection.training_clock import clock

logger = logging.getLogger(__name__)

UNNAMED = ModuleIdentity("", -1)  #: of a layer that stands in no model
NamedTensors: TypeAlias = tuple[ModuleIdentity, Collection[str]]  #: a module, its tensors' names

_saver: Collector | None = None
_configured = False
_owner = 0  #: the process that collects
_observed = 0  #: completed iterations whose numbers the trainer has told


def configure(
    args: dict[str, Any] | None = None,
    *,
    save_tensors: bool = False,
    save_dir: str | None = None,
    control_iter: int | None = None,
    iteration: int = 0,
    quantization: list[dict[str, Any]] | None = None,
    modules: Sequence[NamedTensors] | None = None,
    coordinates: Mapping[str, int] | None = None,
    plan: bool = False,
    levels: Levels | None = None,
    **flags: Any,
) -> None:
    """Fix what this run collects; collective over all ranks once the process groups exist.

    Args:
        args: the run's arguments, for the run card; `num_layers` bounds `collect_layers` and
            `train_iters` the iterations.
        save_tensors: or TENSOR_SAVE_ENABLED=true.
        save_dir: used as it is; else TENSOR_SAVE_DIR, else
            `enhanced_tensor_logs/<quantization type>`.
        control_iter: iterations to collect, 0 for no end; 1, or all of `collect_iterations`.
        iteration: iterations done before this run (it resumes a checkpoint).
        quantization: what each matmul goes through, for the run card.
        modules: the modules of this rank and the tensors that each has, so that a selection of
            modules that no rank has is refused here; None checks this when training starts.
        coordinates: the ranks in all parallel groups and the sizes of the groups, as
            `run_card.rank_coordinates` returns them; None describes a run without such groups.
        plan: write nothing, and count what would have been; see `collection_plan`.
        levels: usual losses and gradient norms before `iteration`, from `Anomalies.levels`.
        flags: `collect_layers` and so on, see `Selection.parse`, `Limits.parse`,
            `RingSettings.parse` and `FlagFile.parse`.

    Raises:
        ValueError: a mistake of the user, raised on all ranks whichever rank found it.
    """
    global _saver, _configured, _observed, _owner
    close()
    _configured, _observed = True, 0
    clock.reset(iteration)
    args = {} if args is None else args

    def settings() -> Settings | None:
        if not (plan or save_tensors or enabled_by_environment()):
            return None
        found = read_settings(
            args,
            save_dir=save_dir,
            control_iter=control_iter,
            iteration=iteration,
            flags=flags,
        )
        if not plan:
            check_writable(found.directory)
        return found

    wanted = together(settings)
    _check_alike(wanted is not None)
    if wanted is None:
        return
    _owner = os.getpid()
    atexit.register(close_at_exit)
    if from_all_ranks(modules is not None)[0]:
        _check_reached(wanted.selection, modules or ())
    run_id = from_first_rank(f"{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(3)}")
    if plan:
        _saver = Planner(wanted, run_id, coordinates=coordinates)
        return
    with signals_deferred:  # else a run card could be left that nobody closes
        _saver = together(
            lambda: Collector.start(
                wanted,
                run_id,
                args,
                coordinates=coordinates,
                levels=levels,
                quantization=quantization,
            )
        )
    if _saver.is_first:
        logger.info("saving tensors to %s (run %s)", wanted.directory, run_id)


def _check_alike(enabled: bool) -> None:
    answers = from_all_ranks(enabled)
    if len(set(answers)) > 1:
        ranks = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer)
        raise ValueError(
            f"saving tensors is switched on on rank(s) {ranks} of {len(answers)} only; give "
            "--save-tensors, or set TENSOR_SAVE_ENABLED alike on every machine"
        )


def configured() -> bool:
    """Whether a trainer has called `configure`."""
    return _configured


def begin_iteration() -> None:
    """Start a training iteration; the schedule calls it."""
    clock.iteration += 1
    if _saver is not None:
        if _saver.has_ring and clock.completed > _observed:
            raise ValueError(
                "a ring of iterations (collect_ring) waits for this trainer to say what an "
                "iteration came to; call megatron.core.tensor_saver.observe(loss, grad_norm) after "
                "each, or leave collect_ring out"
            )
        with signals_deferred:
            _saver.begin_iteration()


def end_iteration() -> None:
    """The schedule has finished a training iteration."""
    clock.completed += 1
    clock.micro_batch = None
    if _saver is not None:
        _saver.end_iteration()


def observe(loss: float | None, grad_norm: float | None) -> str | None:
    """The trainer says what an iteration came to; a ring of iterations is kept if that is unusual.

    Args:
        loss: the same on every rank, as is `grad_norm`; None: not known.
        grad_norm: None also where it is of no meaning, as in an iteration that a loss scaler skips.

    Returns:
        A line on what happened, if the ring was to be kept; on every rank, or on none.
    """
    global _observed
    _observed = clock.completed
    with signals_deferred:
        return None if _saver is None else _saver.observe(loss, grad_norm)


def flush() -> None:
    """Wait until everything collected is on disk, or the writing has failed."""
    if _saver is not None:
        _saver.outcome()


def set_sample_idx(sample_idx: int) -> None:
    """The trainer says which sample the micro-batch under way begins with; else it is null."""
    if clock.micro_batch is not None:
        clock.micro_batch.sample_idx = sample_idx


def capture(identity: ModuleIdentity | None, layer_type: str) -> Capture | None:
    """A layer's way in: None if nothing of it is collected now."""
    identity = identity or UNNAMED
    if _saver is None or not _saver.wants(identity, layer_type):
        return None
    return Capture(_saver, identity, layer_type)


def save_tensor(
    tensor: torch.Tensor, tensor_name: str, *, layer_type: str, dims: str, **how: Any
) -> None:
    """Save one tensor from code outside of our layers, if something is being collected now.

    Args:
        tensor: what to save.
        tensor_name: one of `megatron.tensor_record.TENSOR_NAMES[layer_type]`.
        layer_type: attention or linear.
        dims: see `Capture.save`, as for the further arguments.
        how: `identity`, the layer's `ModuleIdentity`, and the keywords of `Capture.save`.
    """
    if (found := capture(how.pop("identity", None), layer_type)) is not None:
        found.save(tensor_name, tensor, dims=dims, **how)


def enabled() -> bool:
    """Whether this run collects at all."""
    return _saver is not None


def current() -> Collector | None:
    """This rank's collection, if the run collects."""
    return _saver


def finished() -> str | None:
    """Why training can stop, once as many iterations as `control_iter` says are collected; the same
    on every rank.
    """
    if _saver is None or not _saver.complete:
        return None
    return f"the tensors of {_saver.collected} iteration(s) are collected (--control-iter)"


def check_reached(modules: Sequence[NamedTensors]) -> None:
    """Refuse a selection that names what the model does not have; collective where the run
    collects.

    Args:
        modules: the modules of this rank, and the names of the tensors that each has.

    Raises:
        ValueError: on all ranks alike.
    """
    if _saver is not None:
        _check_reached(_saver.settings.selection, modules)


def _check_reached(selection: Selection, modules: Sequence[NamedTensors]) -> None:
    selection.check_reached(each for part in from_all_ranks(list(modules)) for each in part)


def settle() -> list[str]:
    """Gather how every rank fared, for the run card; collective, at the end of a run that went well
    where the run collects.

    Returns:
        A line for each rank that reached a limit.
    """
    if _saver is None:
        return []
    # In turns: no rank waits in a collective for as long as another's disk may take.
    while not all(from_all_ranks(_saver.settled(_saver.settings.turn))):
        pass
    _saver.ranks = from_all_ranks(_saver.outcome())
    return [
        f"{rank['limit']}; dropped were {rank['dropped_tensors']} tensors, "
        f"{gib(rank['dropped_bytes'])}"
        for rank in _saver.ranks
        if rank["limit"]
    ]


def close(aborted: str | None = None, *, interrupted: bool = False) -> str | None:
    """End the collection; returns what went wrong with it on this rank, after `settle` on any of
    them, or None.

    Args:
        aborted: why the training ended before its time, for the run card; a ring is written then.
        interrupted: it was told to end: there is nothing in the ring to look at.
    """
    global _saver
    with signals_deferred:
        saver, _saver = _saver, None
        return None if saver is None else saver.close(aborted, interrupted=interrupted)


def close_at_exit() -> None:
    """Of a trainer that never closes: whatever waits is written before Python ends."""
    if os.getpid() != _owner:  # a process forked from here, without the writer's threads
        return
    error = getattr(sys, "last_value", None)  # what Python has just printed the traceback of
    why = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
    close(why, interrupted=not isinstance(error, Exception))
