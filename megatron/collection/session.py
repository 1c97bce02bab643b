"""Control the tensor collection, with one function per event of the training loop.

A trainer calls `configure` with its flags at the beginning and `close` at the end. The pipeline
schedule calls `begin_iteration` and `end_iteration`. A layer calls `capture` in each forward pass.
If the result is None, the layer is not collected and runs megatron-core's code. Otherwise the layer
passes its tensors to the `Capture`. All callers use the interface `megatron.core.tensor_saver`,
which adds what only megatron-core knows: the rank's coordinates and the modules of the model.

Tensors are copied immediately, so that a file contains the values that the matmul used, and threads
write the copies. If a write fails, the collection stops and reports the error once, and training
continues. The run card then has the status `failed`, and `close` returns the error message. This
project's trainer prints the message and exits with a nonzero status.
"""

import logging
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from megatron.collection import completeness
from megatron.collection.capture import Capture, NoSink
from megatron.collection.collectives import from_all_ranks, from_first_rank, together
from megatron.collection.collector import Collector
from megatron.collection.deferred_signals import signals_deferred
from megatron.collection.exit_status import call_at_exit, error_at_exit, exit_with_error
from megatron.collection.flags import Reader, by_reader
from megatron.collection.foreign_tensors import check_arguments, check_groups
from megatron.collection.limits import gib
from megatron.collection.loss_spikes import Levels
from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.plan import Planner
from megatron.collection.rank_checks import NamedTensors, check_folders, check_selection_exists
from megatron.collection.record_writer import check_writable
from megatron.collection.run_card import rank_coordinates
from megatron.collection.settings import Settings, enabled_by_environment, read_settings
from megatron.collection.statistics.history import StatisticsSettings, TensorStatistics
from megatron.collection.training_clock import MicroBatch, clock, need_clock
from megatron.fake_quant import policy
from megatron.tensor_record import operation_of

logger = logging.getLogger(__name__)

UNNAMED = ModuleIdentity("", -1)  #: identity of a layer that is not part of a model
_collector: Collector | None = None  #: collector of this rank; None if the run collects nothing
_statistics: TensorStatistics | None = None  #: statistics of this rank; None if there are none
_configured = False
_audited = False  #: True if the trainer has passed the format audit to `configure`
_owner = 0  #: ID of the process that started the collection
_knows_end = False  #: True if the trainer has passed its last iteration to `configure`
_warned = False  #: True once a layer that runs more than once in a micro-batch was reported
_completed_before = 0  #: number of iterations completed before this run
_observed = 0  #: number of completed iterations at the last call of `observe`


def configure(
    args: dict[str, Any] | None = None,
    *,
    save_tensors: bool = False,
    save_dir: str | None = None,
    control_iter: int | None = None,
    iteration: int = 0,
    quantization: list[dict[str, Any]] | None = None,
    loaded: dict[str, Any] | None = None,
    modules: Sequence[NamedTensors] | None = None,
    coordinates: Mapping[str, int] | None = None,
    plan: bool = False,
    levels: Levels | None = None,
    **flags: Any,
) -> None:
    """Configure what this run collects, and start the collection.

    Must be called on all ranks, after the process groups have been created.

    Args:
        args: arguments of the run, for the run card. `num_layers` limits `collect_layers`, and
            `train_iters` limits the iterations; `padded_vocab_size` sharpens the detection of loss
            spikes in the first iterations.
        save_tensors: whether to collect; TENSOR_SAVE_ENABLED=true has the same effect.
        save_dir: folder of the tensors; the default is TENSOR_SAVE_DIR or, if that variable is not
            set, `enhanced_tensor_logs/<quantization type>`.
        control_iter: number of iterations to collect; 0 for no limit. The default is 0 with a ring
            buffer or a flag file, otherwise the number of iterations in `collect_iterations`, or 1
            without that flag.
        iteration: number of iterations completed before this run, if it resumes a checkpoint.
        quantization: format of each matmul, for the run card.
        loaded: checkpoint from which the run started, for the run card.
        modules: modules of this rank and names of their tensors, to refuse a selection of modules
            that no rank has; None to check the selection when training starts.
        coordinates: rank in each parallel group and size of the group, as
            `run_card.rank_coordinates` returns them; None for a run without parallel groups.
        plan: whether to count the tensors and bytes instead of writing them; see `plan.Planner`.
        levels: recent normal losses and gradient norms before `iteration`, from
            `LossSpikeDetector.levels`.
        flags: other flags of `megatron.collection.flags`, by name.

    Raises:
        ValueError: if any rank finds an invalid setting or cannot write; raised on all ranks.
    """
    global _audited, _collector, _completed_before, _configured, _knows_end, _observed, _owner
    global _statistics, _warned
    close()
    _completed_before = iteration
    _configured, _observed, _audited = True, 0, quantization is not None
    _warned = False
    clock.reset(iteration)
    args = {} if args is None else args
    _knows_end = bool(args.get("train_iters"))

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
    check_folders(None if settings is None else str(settings.directory.absolute()))
    chosen = by_reader(flags)[Reader.STATISTICS]
    chosen |= {"train_iters": args.get("train_iters"), "iteration": iteration}
    history = together(lambda: StatisticsSettings.parse(directory=save_dir, **chosen))
    if settings is None and history is None:
        return
    _owner = os.getpid()
    call_at_exit(close_at_exit)
    run_id = from_first_rank(f"{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(3)}")
    if history is not None and not plan:
        place = dict(coordinates or rank_coordinates())
        _statistics = together(lambda: TensorStatistics(history, run_id, place, iteration))
    if settings is None:
        return
    if from_all_ranks(modules is not None)[0]:
        check_selection_exists(settings.selection, modules or ())
    if plan:
        _collector = Planner(settings, run_id, coordinates=coordinates)
        return
    with signals_deferred:  # a signal must not leave the run card unfinished
        _collector = together(
            lambda: Collector.start(
                settings,
                run_id,
                args,
                coordinates=coordinates,
                levels=levels,
                quantization=quantization,
                loaded=loaded,
            )
        )
    if _collector.is_first:
        logger.info("saving tensors to %s (run %s)", settings.directory, run_id)


def _refuse_other_formats() -> None:
    """Refuse to change the formats during a collection, because its run card states them."""
    if enabled():
        raise ValueError(
            "the formats cannot change while tensors are collected, because the run card states "
            "them; set the formats before the collection, or call "
            "megatron.core.tensor_saver.close() first"
        )


policy.call_before_change(_refuse_other_formats)


def configured() -> bool:
    """Return whether the training loop has called `configure`."""
    return _configured


def audited() -> bool:
    """Return whether the trainer has printed the format audit and passed it to `configure`."""
    return _audited


def knows_last_iteration() -> bool:
    """Return whether the trainer has passed its last iteration, `train_iters`, to `configure`."""
    return _knows_end


def add_to_card(name: str, value: list[Any] | dict[str, Any]) -> None:
    """Add `value` to the list or dictionary `name` of the run card, which is written later."""
    if _collector is not None:
        _collector.add_to_card(name, value)


def set_audit(quantization: list[dict[str, Any]]) -> None:
    """Set the format audit in the run card, if the trainer has not passed it to `configure`."""
    if _collector is not None and not _audited:
        _collector.set_audit(quantization)


def begin_iteration(number: int | None = None) -> None:
    """Register the start of a training iteration, in a schedule or in `training_iteration`.

    Args:
        number: number of the iteration, as in the log; None for the one after the previous one.
    """
    clock.iteration = clock.iteration + 1 if number is None else number
    if _collector is not None:
        if _collector.has_ring and clock.completed > _observed:
            raise ValueError(completeness.RING_WITHOUT_LOSSES)
        with signals_deferred:
            _collector.begin_iteration()
    if _statistics is not None:
        _statistics.latest = []


def end_iteration() -> None:
    """Register the end of a training iteration, in a schedule or in `training_iteration`."""
    clock.completed += 1
    clock.micro_batch = None
    if _collector is not None:
        _collector.end_iteration()
    if _statistics is not None:
        with signals_deferred:
            _statistics.end_iteration()


def abandon_iteration(number: int) -> None:
    """Undo the start of an iteration that ended with an exception.

    A trainer that handles the exception may repeat the iteration. Tensors of the failed attempt may
    be on disk, so the collection then ends with an error. The statistics of the failed attempt are
    discarded.

    Args:
        number: number of the iteration before the failed one.
    """
    failed, clock.iteration = clock.iteration, number
    if _collector is not None:
        _collector.abandon_iteration(failed)
    if _statistics is not None:
        _statistics.abandon_iteration()


def observe(loss: float | None, grad_norm: float | None) -> str | None:
    """Record an iteration's loss and gradient norm; save the ring buffer if either is unusual.

    Args:
        loss: loss of the iteration, the same on every rank; None if it is unknown.
        grad_norm: gradient norm of the iteration, the same on every rank; None if it is unknown or
            meaningless, as in an iteration that the loss scaler skips.

    Returns:
        A one-line message about the event, on every rank; None if the iteration is normal or there
        is no ring buffer.
    """
    global _observed
    _observed = clock.completed
    with signals_deferred:
        if _statistics is not None:
            _statistics.observe(loss, grad_norm)
        return None if _collector is None else _collector.observe(loss, grad_norm)


def flush() -> None:
    """Wait until all collected tensors are on disk or writing has failed."""
    if _collector is not None:
        _collector.outcome()
    flush_statistics()


def flush_statistics() -> None:
    """Write all measured statistics and losses to disk."""
    if _collector is not None:
        with signals_deferred:
            _collector.flush_losses()
    if _statistics is not None:
        with signals_deferred:
            _statistics.flush()


def set_sample_idx(sample_idx: int) -> None:
    """Set the index of the current micro-batch's first sample, for the tensors' metadata.

    Without this call, the index in the records is null.
    """
    if clock.micro_batch is not None:
        clock.micro_batch.sample_idx = sample_idx


def capture(
    identity: ModuleIdentity | None,
    layer_type: str,
    *,
    training: bool = False,
    implementation: str | None = None,
) -> Capture | None:
    """Return a `Capture` for one forward pass of a layer.

    Return None if the pass is neither collected nor measured. The first layer that runs more than
    once in a micro-batch is reported in the log.

    Args:
        identity: name and layer number of the module; None for a tensor outside any module.
        layer_type: "attention" or "linear".
        training: whether the layer is in training mode.
        implementation: field `implementation` of the records; None for the local layers.

    Raises:
        ValueError: if tensors are collected and the layer trains, but nothing counts iterations.
    """
    found = _capture(identity, layer_type, training=training, implementation=implementation)
    if found is not None and _collector is not None and clock.micro_batch is not None:
        _note_call(clock.micro_batch, identity or UNNAMED, layer_type)
    return found


def _capture(
    identity: ModuleIdentity | None,
    layer_type: str,
    *,
    training: bool = False,
    implementation: str | None = None,
) -> Capture | None:
    if clock.micro_batch is None:
        if enabled():
            need_clock("the tensor collection", training=training)
        return None
    identity = identity or UNNAMED
    measured = _statistics is not None and _statistics.wants()
    options: dict[str, Any] = {"implementation": implementation}
    if measured:
        options["statistics"] = _statistics
    if _collector is not None and _collector.wants(identity, layer_type):
        return Capture(_collector, identity, layer_type, **options)
    if not measured or _statistics is None:
        return None
    return Capture(NoSink(_statistics.coordinates), identity, layer_type, **options)


def _note_call(micro_batch: MicroBatch, identity: ModuleIdentity, layer_type: str) -> None:
    """Warn once if a layer runs more than once in a micro-batch."""
    global _warned
    if clock.recomputing:
        return
    if (identity, layer_type) in micro_batch.collected and identity.name and not _warned:
        _warned = True
        logger.warning(
            "the layer %s runs more than once in micro-batch %d of iteration %d; the records of "
            "its calls have the same names, so that verify, study and diff cannot tell them apart",
            identity.name,
            micro_batch.index,
            micro_batch.iteration,
        )
    micro_batch.collected.add((identity, layer_type))


def save_tensor(
    tensor: torch.Tensor,
    tensor_name: str,
    *,
    layer_type: str,
    dims: str,
    identity: ModuleIdentity | None = None,
    **fields: Any,
) -> None:
    """Save one tensor of a module that has no `Capture`, if the tensor is selected.

    Args:
        tensor: tensor to save.
        tensor_name: one of `megatron.tensor_record.TENSOR_NAMES[layer_type]`.
        layer_type: "attention" or "linear".
        dims: letters of the dimensions; see `Capture.save`.
        identity: name and layer number of the module; None for a tensor outside any module.
        fields: other keyword arguments of `Capture.save`.

    Raises:
        TypeError, ValueError: if collection is on and an argument is wrong; see `check_arguments`.
    """
    if not enabled():
        return
    check_arguments(
        tensor, tensor_name, layer_type=layer_type, dims=dims, identity=identity, **fields
    )
    if _collector is not None:
        check_groups(dims, _collector.coordinates)
    if (layer := _capture(identity, layer_type)) is not None:
        fields = {"operation": operation_of(tensor_name)} | fields
        layer.save(tensor_name, tensor, dims=dims, **fields)


def enabled() -> bool:
    """Return whether this run collects tensors or measures their statistics."""
    return _collector is not None or _statistics is not None


def collects_now() -> bool:
    """Return whether this iteration is collected or the current micro-batch is measured."""
    if _statistics is not None and _statistics.wants():
        return True
    return _collector is not None and _collector.collects(clock.iteration)


def includes(identity: ModuleIdentity, layer_type: str) -> bool:
    """Return whether this run collects tensors of a module, or measures their statistics."""
    if _statistics is not None:
        return True
    return _collector is not None and _collector.settings.selection.wants(identity, layer_type)


def statistics() -> TensorStatistics | None:
    """Return the statistics of this rank; None without `--tensor-statistics`."""
    return _statistics


def current() -> Collector | None:
    """Return the collector of this rank; None if the run collects nothing."""
    return _collector


def finished() -> str | None:
    """Return a message if `control_iter` iterations have been collected, so training can stop.

    Otherwise return None. The result is the same on every rank.
    """
    if _collector is None or not _collector.complete:
        return None
    return f"the tensors of {_collector.collected} iteration(s) are collected (--control-iter)"


def check_reached(modules: Sequence[NamedTensors], *, alone: bool = False) -> None:
    """Raise an error if the selection names a module or tensor that the model does not have.

    Must be called on all ranks, unless `alone` is true.
    Args:
        modules: modules of this rank, each with the names of its tensors.
        alone: whether this rank has the whole model and does not wait for the other ranks.

    Raises:
        ValueError: if no rank has a selected module or tensor; raised on all ranks.
    """
    if _collector is not None and alone:
        _collector.settings.selection.check_reached(modules)
    elif _collector is not None:
        check_selection_exists(_collector.settings.selection, modules)


def settle() -> list[str]:
    """Gather the outcome of every rank for the run card, at the end of a run without errors.

    Must be called on all ranks.

    Returns:
        One message per rank that reached a limit.
    """
    if _statistics is not None:
        failures = from_all_ranks(_statistics.failure)
        _statistics.failure = next(filter(None, failures), None)
    if _collector is None:
        return []
    # Between short waits for the disk, the ranks synchronize, so that one slow disk does not cause
    # a timeout on the other ranks.
    while not all(from_all_ranks(_collector.settled(_collector.settings.turn))):
        pass
    _collector.ranks = from_all_ranks(_collector.outcome())
    return [
        f"{rank['limit']}; {rank['dropped_tensors']} tensors, "
        f"{gib(rank['dropped_bytes'])}, were dropped"
        for rank in _collector.ranks
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
    global _collector, _statistics
    lacking = None if aborted is not None or interrupted else lacking_iterations()
    if lacking is not None:
        logger.warning("%s", lacking)
    with signals_deferred:
        collector, _collector = _collector, None
        history, _statistics = _statistics, None
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
    if os.getpid() != _owner:  # a forked process has no writer threads
        return
    error = error_at_exit()
    why = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
    if error is None and (nothing := reason_for_nothing()) is not None:
        end_with_error(nothing)
    lacking = None if error is not None else lacking_iterations()
    failure = close(why, interrupted=not isinstance(error, Exception)) or lacking
    if error is None and not _audited and failure is not None:
        exit_with_error(f"the collection is not complete: {failure}")


def end_with_error(reason: str) -> NoReturn:
    """Mark the collection as failed, and end the program with status 1; called at exit."""
    if _collector is not None:
        _collector.give_up(reason)
    close()
    exit_with_error(reason)


def reason_for_nothing() -> str | None:
    """Return the reason why this run has collected nothing; None if this is not an error.

    A trainer that passes the format audit to `configure` reports this itself.
    """
    if _audited or not enabled() or (_collector is not None and _collector.abandoned):
        return None
    return completeness.nothing_collected(_collector, _statistics, has_losses=bool(_observed))


def lacking_iterations() -> str | None:
    """Return an error message if fewer iterations than requested were collected; None otherwise."""
    if _audited or _collector is None or isinstance(_collector, Planner):
        return None
    if _collector.error is not None or _collector.abandoned:  # another message says more
        return None
    return completeness.lacking_iterations(_collector, _completed_before)
