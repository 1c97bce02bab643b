"""Update the training clock and, with delayed scaling, the amax histories.

The clock holds the iteration, the micro-batch and whether a forward pass is recomputed.

The file is overlaid because only the schedule knows which micro-batch runs. The seams are the three
pipeline schedules, called once per training iteration, and `forward_step` and `backward_step`
(`backward_step_multimodule` for a model of several modules, since megatron-core 0.17), called once
per micro-batch. The schedules find these functions, and `get_forward_backward_func` finds the
schedules, in the globals of their module.

Under 1F1B a backward step belongs to an earlier micro-batch than the last forward step. The
micro-batch is therefore an attribute of the output tensor, which the schedule passes to
`backward_step`.
"""

import contextlib
import functools

from megatron.collection.training_clock import MicroBatch, clock
from megatron.core import tensor_saver
from megatron.core._overlay import shadowed
from megatron.core.low_precision import (
    delayed_scaling,
    explicit_iteration,
    model_entry,
    reach_check,
    recipe_check,
    same_formats,
)
from megatron.fake_quant import policy

_upstream = shadowed(__name__)
_upstream_forward_step = _upstream.forward_step


_training = False  #: True while a schedule trains, with forward and backward passes
_checked = False  #: True once the recipe has been checked against the model
_steps = 0  #: number of forward steps in the current training iteration


def _check_again():
    """Forget that the model was checked, so that it is checked again after the formats change."""
    global _checked
    _checked = False


policy.call_before_change(_check_again)


def _first(tensors):
    """Return the first tensor of an output, which is a tensor, a list, or a dict keyed by module.

    Return None if the output holds no tensor.
    """
    if isinstance(tensors, dict):
        return next((t for t in map(_first, tensors.values()) if t is not None), None)
    return _first(tensors[0]) if isinstance(tensors, list) and tensors else tensors


@functools.wraps(_upstream_forward_step)
def forward_step(forward_step_func, data_iterator, model, *args, current_microbatch=None, **kwargs):
    """Run megatron-core's forward step.

    In training, first set the training clock's micro-batch, and then update the amax histories of
    delayed scaling.
    """
    global _steps
    step = functools.partial(
        _upstream_forward_step, forward_step_func, data_iterator, model, *args, **kwargs
    )
    if not _training:
        return step(current_microbatch=current_microbatch)
    _steps += 1
    clock.micro_batch = micro_batch = MicroBatch(clock.iteration, current_microbatch or 0)
    delayed = delayed_scaling.of_chunk(model)
    if delayed is not None:
        delayed.begin_forward(micro_batch.index)
    output, num_tokens = step(current_microbatch=current_microbatch)
    if _first(output) is not None:
        _first(output)._collected_micro_batch = micro_batch
        _first(output)._delayed_scaling = delayed
    if delayed is not None:
        delayed.end_forward()
    return output, num_tokens


def _observed(backward):
    """Wrap a backward step so that it marks forward passes inside it as recomputation.

    Afterward it updates the amax histories of delayed scaling.
    """

    @functools.wraps(backward)
    def observed(input_tensor, output_tensor, *args, **kwargs):
        before = clock.micro_batch
        delayed = getattr(_first(output_tensor), "_delayed_scaling", None)
        clock.micro_batch = getattr(_first(output_tensor), "_collected_micro_batch", before)
        clock.recomputing = True
        try:
            gradient = backward(input_tensor, output_tensor, *args, **kwargs)
            if delayed is not None:
                delayed.end_backward(clock.micro_batch.index)
            return gradient
        finally:
            clock.micro_batch, clock.recomputing = before, False

    return observed


@contextlib.contextmanager
def _scheduled():
    """Set `clock.scheduled` while a schedule runs, and restore the micro-batch afterward."""
    between, clock.between_passes = clock.between_passes, False
    before, clock.scheduled, clock.micro_batch = clock.micro_batch, True, None
    try:
        yield
    finally:
        clock.scheduled, clock.micro_batch, clock.between_passes = False, before, between


def _counted(schedule):
    """Wrap a pipeline schedule so that training with it updates the training clock."""

    @functools.wraps(schedule)
    def counted(*args, forward_only=False, **kwargs):
        if forward_only:
            with _scheduled():
                return schedule(*args, forward_only=True, **kwargs)
        return _iteration(
            functools.partial(schedule, *args, forward_only=False, **kwargs),
            kwargs["model"],
            kwargs["seq_length"],
        )

    return counted


def _check_schedule_of_recipe():
    recipe = policy.current().recipe
    known = tensor_saver.configured() or explicit_iteration.active()
    if recipe is not None and recipe.changes() and not known:
        raise ValueError(
            f"recipe {recipe.path} depends on the iteration, but this trainer has not set the "
            "current one; call megatron.core.tensor_saver.configure(vars(args), iteration=DONE) "
            "first, with the number of completed iterations, or remove the iterations from the "
            "recipe"
        )


def _iteration(run, model, seq_length):
    global _training, _steps, _checked
    explicit = explicit_iteration.active()  # the trainer counts the iterations itself
    if not _checked:
        chunks = model if isinstance(model, list) else [model] if model is not None else []
        same_formats.check_same_formats()
        tensor_saver.begin_run(chunks)
        _check_schedule_of_recipe()
        if not tensor_saver.configured():
            tensor_saver.configure()
        if chunks:
            reach_check.prepare(chunks, seq_length)
        recipe_check.check(chunks, seq_length)
        tensor_saver.check_reached(chunks)
        clock.seed = explicit_iteration.seed_of_the_run()
        _checked = True
    else:
        model_entry.check_unchanged(clock.iteration + (not explicit))
    before = clock.iteration
    if not explicit:
        tensor_saver.begin_iteration()
    _training, _steps = True, 0
    try:
        with _scheduled():
            result = run()
    except BaseException:
        if not explicit:
            tensor_saver.abandon_iteration(before)
        model_entry.abandon_passes()
        raise
    finally:
        _training = False
    if _steps == 0 and tensor_saver.enabled():
        raise ValueError(
            "this schedule does not call forward_step, so nothing was collected; switch off "
            "--overlap-moe-expert-parallel-comm, or do not save tensors"
        )
    if not explicit:
        tensor_saver.end_iteration()
    return result


backward_step = _observed(_upstream.backward_step)
if hasattr(_upstream, "backward_step_multimodule"):
    _upstream.backward_step_multimodule = _observed(_upstream.backward_step_multimodule)
    backward_step_multimodule = _upstream.backward_step_multimodule
forward_backward_no_pipelining = _counted(_upstream.forward_backward_no_pipelining)
forward_backward_pipelining_with_interleaving = _counted(
    _upstream.forward_backward_pipelining_with_interleaving
)
forward_backward_pipelining_without_interleaving = _counted(
    _upstream.forward_backward_pipelining_without_interleaving
)
for _replaced in (
    forward_step,
    backward_step,
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
):
    setattr(_upstream, _replaced.__name__, _replaced)
