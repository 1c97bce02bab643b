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
from typing import Any

import torch

from megatron.collection import completeness
from megatron.collection.capture import Capture, NoSink
from megatron.collection.collectives import from_all_ranks, from_first_rank, together
from megatron.collection.collector import Collector
from megatron.collection.deferred_signals import signals_deferred
from megatron.collection.exit_status import call_at_exit
from megatron.collection.flags import Reader, by_reader
from megatron.collection.foreign_tensors import check_arguments, check_groups
from megatron.collection.loss_spikes import Levels
from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.plan import Planner
from megatron.collection.rank_checks import NamedTensors, check_folders, check_selection_exists
from megatron.collection.record_writer import check_writable
from megatron.collection.run_card import rank_coordinates
from megatron.collection.session_end import close, close_at_exit
from megatron.collection.session_state import state
from megatron.collection.settings import Settings, enabled_by_environment, read_settings
from megatron.collection.statistics.history import StatisticsSettings, TensorStatistics
from megatron.collection.training_clock import MicroBatch, clock, need_clock
from megatron.fake_quant import policy
from megatron.tensor_record import operation_of

logger = logging.getLogger(__name__)

UNNAMED = ModuleIdentity("", -1)  #: identity of a layer that is not part of a model


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
    close()
    args = {} if args is None else args
    state.reset(
        completed_before=iteration,
        audited=quantization is not None,
        knows_end=bool(args.get("train_iters")),
    )
    clock.reset(iteration)

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
    state.owner = os.getpid()
    call_at_exit(close_at_exit)
    run_id = from_first_rank(f"{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(3)}")
    if history is not None and not plan:
        place = dict(coordinates or rank_coordinates())
        state.statistics = together(lambda: TensorStatistics(history, run_id, place, iteration))
    if settings is None:
        return
    if from_all_ranks(modules is not None)[0]:
        check_selection_exists(settings.selection, modules or ())
    if plan:
        state.collector = Planner(settings, run_id, coordinates=coordinates)
        return
    with signals_deferred:  # a signal must not leave the run card unfinished
        state.collector = together(
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
    if state.collector.is_first:
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
    return state.configured


def audited() -> bool:
    """Return whether the trainer has printed the format audit and passed it to `configure`."""
    return state.audited


def knows_last_iteration() -> bool:
    """Return whether the trainer has passed its last iteration, `train_iters`, to `configure`."""
    return state.knows_end


def add_to_card(name: str, value: list[Any] | dict[str, Any]) -> None:
    """Add `value` to the list or dictionary `name` of the run card, which is written later."""
    if state.collector is not None:
        state.collector.add_to_card(name, value)


def set_audit(quantization: list[dict[str, Any]]) -> None:
    """Set the format audit in the run card, if the trainer has not passed it to `configure`."""
    if state.collector is not None and not state.audited:
        state.collector.set_audit(quantization)


def begin_iteration(number: int | None = None) -> None:
    """Register the start of a training iteration, in a schedule or in `training_iteration`.

    Args:
        number: number of the iteration, as in the log; None for the one after the previous one.
    """
    clock.iteration = clock.iteration + 1 if number is None else number
    clock.micro_batches = 0
    if state.collector is not None:
        if state.collector.has_ring and clock.completed > state.observed:
            raise ValueError(completeness.RING_WITHOUT_LOSSES)
        with signals_deferred:
            state.collector.begin_iteration()
    if state.statistics is not None:
        state.statistics.latest = []


def end_iteration() -> None:
    """Register the end of a training iteration, in a schedule or in `training_iteration`."""
    clock.completed += 1
    clock.micro_batch = None
    if state.collector is not None:
        state.collector.end_iteration()
    if state.statistics is not None:
        with signals_deferred:
            state.statistics.end_iteration()


def abandon_iteration(number: int) -> None:
    """Undo the start of an iteration that ended with an exception.

    A trainer that handles the exception may repeat the iteration. Tensors of the failed attempt may
    be on disk, so the collection then ends with an error. The statistics of the failed attempt are
    discarded.

    Args:
        number: number of the iteration before the failed one.
    """
    failed, clock.iteration = clock.iteration, number
    if state.collector is not None:
        state.collector.abandon_iteration(failed)
    if state.statistics is not None:
        state.statistics.abandon_iteration()


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
    state.observed = clock.completed
    with signals_deferred:
        if state.statistics is not None:
            state.statistics.observe(loss, grad_norm)
        return None if state.collector is None else state.collector.observe(loss, grad_norm)


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
    if found is not None and state.collector is not None and clock.micro_batch is not None:
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
    measured = state.statistics is not None and state.statistics.wants()
    options: dict[str, Any] = {"implementation": implementation}
    if measured:
        options["statistics"] = state.statistics
    if state.collector is not None and state.collector.wants(identity, layer_type):
        return Capture(state.collector, identity, layer_type, **options)
    if not measured or state.statistics is None:
        return None
    return Capture(NoSink(state.statistics.coordinates), identity, layer_type, **options)


def _note_call(micro_batch: MicroBatch, identity: ModuleIdentity, layer_type: str) -> None:
    """Warn once if a layer runs more than once in a micro-batch."""
    if clock.recomputing:
        return
    if (identity, layer_type) in micro_batch.collected and identity.name and not state.warned:
        state.warned = True
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
    if state.collector is not None:
        check_groups(dims, state.collector.coordinates)
    if (layer := _capture(identity, layer_type)) is not None:
        fields = {"operation": operation_of(tensor_name)} | fields
        layer.save(tensor_name, tensor, dims=dims, **fields)


def enabled() -> bool:
    """Return whether this run collects tensors or measures their statistics."""
    return state.enabled


def collects_now() -> bool:
    """Return whether this iteration is collected or the current micro-batch is measured."""
    if state.statistics is not None and state.statistics.wants():
        return True
    return state.collector is not None and state.collector.collects(clock.iteration)


def includes(identity: ModuleIdentity, layer_type: str) -> bool:
    """Return whether this run collects tensors of a module, or measures their statistics."""
    if state.statistics is not None:
        return True
    return state.collector is not None and state.collector.settings.selection.wants(
        identity, layer_type
    )


def statistics() -> TensorStatistics | None:
    """Return the statistics of this rank; None without `--tensor-statistics`."""
    return state.statistics


def current() -> Collector | None:
    """Return the collector of this rank; None if the run collects nothing."""
    return state.collector


def finished() -> str | None:
    """Return a message if `control_iter` iterations have been collected, so training can stop.

    Otherwise return None. The result is the same on every rank.
    """
    if state.collector is None or not state.collector.complete:
        return None
    return f"the tensors of {state.collector.collected} iteration(s) are collected (--control-iter)"


def check_reached(modules: Sequence[NamedTensors], *, alone: bool = False) -> None:
    """Raise an error if the selection names a module or tensor that the model does not have.

    Must be called on all ranks, unless `alone` is true.
    Args:
        modules: modules of this rank, each with the names of its tensors.
        alone: whether this rank has the whole model and does not wait for the other ranks.

    Raises:
        ValueError: if no rank has a selected module or tensor; raised on all ranks.
    """
    if state.collector is not None and alone:
        state.collector.settings.selection.check_reached(modules)
    elif state.collector is not None:
        check_selection_exists(state.collector.settings.selection, modules)
