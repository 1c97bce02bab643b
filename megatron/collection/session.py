"""Run the collection of this process, with one function per event of training, in their order.

A layer calls `capture` in each forward pass. None means that the layer is not collected now, and it
then runs megatron-core's code. Otherwise the layer passes its tensors to the `Capture`. The
schedule calls `begin_iteration` and `end_iteration`. A trainer calls `configure` with its flags and
`close` at the end. `megatron.core.tensor_saver` is the interface for all of them: it adds what
only megatron-core knows, the coordinates of the rank and the modules of the model.

Tensors are copied at once, so that a file holds what the matmul used, and threads write the copies.
A failed write stops the collection, is reported once and lets training continue. The run card then
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

UNNAMED = ModuleIdentity("", -1)  #: identity of a layer outside any model
NamedTensors: TypeAlias = tuple[ModuleIdentity, Collection[str]]  #: module and its tensors' names

_collector: Collector | None = None  #: None if this run collects nothing
_configured = False
_owner = 0  #: id of the process that collects
_observed = 0  #: completed iterations that the trainer has reported to `observe`


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
    """Set what this run collects; collective over all ranks once the process groups exist.

    Args:
        args: arguments of the run, for the run card; `num_layers` bounds `collect_layers`, and
            `train_iters` bounds the iterations.
        save_tensors: whether to collect; TENSOR_SAVE_ENABLED=true has the same effect.
        save_dir: folder of the tensors; the default is TENSOR_SAVE_DIR, or
            `enhanced_tensor_logs/<quantization type>` without it.
        control_iter: iterations to collect; 0 means no end. The default is 1, or all of
            `collect_iterations`.
        iteration: iterations done before this run, which resumes a checkpoint.
        quantization: format of each matmul, for the run card.
        modules: the modules of this rank and their tensors, so that a selection of modules that
            no rank has is refused here; None checks this when training starts.
        coordinates: the ranks in all parallel groups and the sizes of the groups, as
            `run_card.rank_coordinates` returns them; None describes a run without such groups.
        plan: count what would be written instead of writing it; see `plan.Planner`.
        levels: usual losses and gradient norms before `iteration`, from
            `LossSpikeDetector.levels`.
        flags: further flags of `megatron.collection.flags`, by name.

    Raises:
        ValueError: for a mistake of the user, on all ranks if any rank finds one.
    """
    global _collector, _configured, _observed, _owner
    close()
    _configured, _observed = True, 0
    clock.reset(iteration)
    args = {} if args is None else args

    def requested() -> Settings | None:
        if not (plan or save_tensors or enabled_by_environment()):
            return None
        settings = read_settings(
            args,
            save_dir=save_dir,
            control_iter=control_iter,
            iteration=iteration,
            flags=flags,
        )
        if not plan:
            check_writable(settings.directory)
        return settings

    settings = together(requested)
    _check_same_switch(settings is not None)
    if settings is None:
        return
    _owner = os.getpid()
    atexit.register(close_at_exit)
    if from_all_ranks(modules is not None)[0]:
        _check_selection_exists(settings.selection, modules or ())
    run_id = from_first_rank(f"{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(3)}")
    if plan:
        _collector = Planner(settings, run_id, coordinates=coordinates)
        return
    with signals_deferred:  # so that no run card stays open if a signal arrives here
        _collector = together(
            lambda: Collector.start(
                settings,
                run_id,
                args,
                coordinates=coordinates,
                levels=levels,
                quantization=quantization,
            )
        )
    if _collector.is_first:
        logger.info("saving tensors to %s (run %s)", settings.directory, run_id)


def _check_same_switch(enabled: bool) -> None:
    """Refuse a collection that only some of the ranks have switched on."""
    answers = from_all_ranks(enabled)
    if len(set(answers)) > 1:
        ranks = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer)
        raise ValueError(
            f"saving tensors is switched on on rank(s) {ranks} of {len(answers)} only; give "
            "--save-tensors, or set TENSOR_SAVE_ENABLED to the same value on every machine"
        )


def configured() -> bool:
    """Return whether a trainer has called `configure`."""
    return _configured


def begin_iteration() -> None:
    """Start a training iteration; the schedule calls it."""
    clock.iteration += 1
    if _collector is not None:
        if _collector.has_ring and clock.completed > _observed:
            raise ValueError(
                "a ring of iterations (collect_ring) waits for the numbers of each iteration; call "
                "megatron.core.tensor_saver.observe(loss, grad_norm) after each, or leave "
                "collect_ring out"
            )
        with signals_deferred:
            _collector.begin_iteration()


def end_iteration() -> None:
    """Finish a training iteration; the schedule calls it."""
    clock.completed += 1
    clock.micro_batch = None
    if _collector is not None:
        _collector.end_iteration()


def observe(loss: float | None, grad_norm: float | None) -> str | None:
    """Report the numbers of an iteration; an unusual one makes the ring of iterations be written.

    Args:
        loss: the loss, which is the same on every rank; None if it is unknown.
        grad_norm: the gradient norm, which is the same on every rank; None if it is unknown or has
            no meaning, as in an iteration that a loss scaler skips.

    Returns:
        A line about the event, on every rank; None if the iteration is usual.
    """
    global _observed
    _observed = clock.completed
    with signals_deferred:
        return None if _collector is None else _collector.observe(loss, grad_norm)


def flush() -> None:
    """Wait until everything collected is on disk, or the writing has failed."""
    if _collector is not None:
        _collector.outcome()


def set_sample_idx(sample_idx: int) -> None:
    """Record the first sample of the current micro-batch; without this call, records hold null."""
    if clock.micro_batch is not None:
        clock.micro_batch.sample_idx = sample_idx


def capture(identity: ModuleIdentity | None, layer_type: str) -> Capture | None:
    """Return a `Capture` for one forward pass of a layer; None if it is not collected now."""
    identity = identity or UNNAMED
    if _collector is None or not _collector.wants(identity, layer_type):
        return None
    return Capture(_collector, identity, layer_type)


def save_tensor(
    tensor: torch.Tensor,
    tensor_name: str,
    *,
    layer_type: str,
    dims: str,
    identity: ModuleIdentity | None = None,
    **fields: Any,
) -> None:
    """Save one tensor from code outside our layers, if this iteration is collected.

    Args:
        tensor: the tensor to save.
        tensor_name: one of `megatron.tensor_record.TENSOR_NAMES[layer_type]`.
        layer_type: attention or linear.
        dims: names of the dimensions, see `Capture.save`.
        identity: name and layer number of the module; None for a tensor outside any module.
        fields: further keywords of `Capture.save`.
    """
    if (layer := capture(identity, layer_type)) is not None:
        layer.save(tensor_name, tensor, dims=dims, **fields)


def enabled() -> bool:
    """Return whether this run collects tensors."""
    return _collector is not None


def current() -> Collector | None:
    """Return the collector of this rank; None if the run collects nothing."""
    return _collector


def finished() -> str | None:
    """Return why training can stop, once `control_iter` iterations are collected; None before.

    The result is the same on every rank.
    """
    if _collector is None or not _collector.complete:
        return None
    return f"the tensors of {_collector.collected} iteration(s) are collected (--control-iter)"


def check_reached(modules: Sequence[NamedTensors]) -> None:
    """Refuse a selection that names a module or tensor that the model does not have.

    The check is collective over all ranks if the run collects.

    Args:
        modules: the modules of this rank, and the names of the tensors that each has.

    Raises:
        ValueError: if the selection names something else; on all ranks alike.
    """
    if _collector is not None:
        _check_selection_exists(_collector.settings.selection, modules)


def _check_selection_exists(selection: Selection, modules: Sequence[NamedTensors]) -> None:
    selection.check_reached(
        module for of_rank in from_all_ranks(list(modules)) for module in of_rank
    )


def settle() -> list[str]:
    """Gather the outcome of every rank for the run card, at the end of a run without errors.

    The function is collective over all ranks if the run collects.

    Returns:
        One line per rank that reached a limit.
    """
    if _collector is None:
        return []
    # The ranks wait in turns, so that a slow disk of one causes no timeout in another's collective.
    while not all(from_all_ranks(_collector.settled(_collector.settings.turn))):
        pass
    _collector.ranks = from_all_ranks(_collector.outcome())
    return [
        f"{rank['limit']}; dropped were {rank['dropped_tensors']} tensors, "
        f"{gib(rank['dropped_bytes'])}"
        for rank in _collector.ranks
        if rank["limit"]
    ]


def close(aborted: str | None = None, *, interrupted: bool = False) -> str | None:
    """End the collection.

    Args:
        aborted: why training ended early, for the run card; a ring is then written.
        interrupted: whether a signal ended training; a ring is then discarded.

    Returns:
        What went wrong on this rank, or on any rank if `settle` has run; None if nothing did.
    """
    global _collector
    with signals_deferred:
        collector, _collector = _collector, None
        return None if collector is None else collector.close(aborted, interrupted=interrupted)


def close_at_exit() -> None:
    """Write everything that waits before Python ends, for a trainer that never calls `close`."""
    if os.getpid() != _owner:  # a fork of the process that collects has no writer threads
        return
    error = getattr(sys, "last_value", None)  # the exception that ends Python
    why = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
    close(why, interrupted=not isinstance(error, Exception))
