"""Interface between the tensor collector and the layers, schedules and trainers of megatron-core.

Collection works with any trainer built on megatron-core, because our layers and our schedule call
these functions. Our own trainers call `configure` with their flags and `close` at the end. With any
other trainer, the environment switches collection on: TENSOR_SAVE_ENABLED=true, and
TENSOR_SAVE_DIR for the folder. A training loop that does not use the pipeline schedules states its
iterations with `training_iteration`.

The collection itself is `megatron.collection`, which does not need megatron-core. This module adds
what only megatron-core knows: the coordinates of this rank and the modules of the model.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron.collection import session
from megatron.collection.rank_checks import NamedTensors
from megatron.collection.run_card import rank_coordinates
from megatron.collection.session import (
    abandon_iteration,
    capture,
    configured,
    current,
    enabled,
    finished,
    observe,
    save_tensor,
    set_sample_idx,
    statistics,
)
from megatron.collection.session_end import close, flush, flush_statistics, settle
from megatron.collection.settings import enabled_by_environment
from megatron.collection.training_clock import clock
from megatron.core import parallel_state
from megatron.core.low_precision import explicit_iteration, model_roots, same_formats
from megatron.core.low_precision.quantized_module import Collected
from megatron.fake_quant import policy

__all__ = [
    "abandon_iteration",
    "begin_iteration",
    "begin_run",
    "capture",
    "check_reached",
    "close",
    "configure",
    "configure_later",
    "configured",
    "coordinates",
    "current",
    "enabled",
    "enabled_by_environment",
    "end_iteration",
    "finished",
    "flush",
    "flush_statistics",
    "observe",
    "save_tensor",
    "set_sample_idx",
    "settle",
    "statistics",
    "training_iteration",
]

_GROUPS = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
}


def coordinates() -> dict[str, int]:
    """Return the rank of this process in each parallel group, and the sizes of the groups."""
    if not parallel_state.model_parallel_is_initialized():
        return rank_coordinates()
    return rank_coordinates(
        {
            axis: (
                getattr(parallel_state, f"get_{name}_rank")(),
                getattr(parallel_state, f"get_{name}_world_size")(),
            )
            for axis, name in _GROUPS.items()
        }
    )


def configure(
    args: dict[str, Any] | None = None, *, model: Sequence[torch.nn.Module] = (), **options: Any
) -> None:
    """Configure which tensors this run collects.

    If the process groups exist, this function must be called on all ranks.

    Args:
        args: arguments of the run, for the run card; `num_layers` limits `collect_layers`, and
            `train_iters` limits the iterations.
        model: pipeline stages of this rank. If given, their layers are named after them, and a
            selection of modules that the model does not have is refused here; otherwise both
            happen when training starts.
        options: further arguments of `megatron.collection.session.configure`.

    Raises:
        ValueError: if a setting is wrong; raised on all ranks if any rank finds such a setting.
    """
    # these modules import this one
    from megatron.core.low_precision import reach_check, transformer_engine

    model_roots.forget_names()
    collects = any(options.get(name) for name in ("save_tensors", "plan", "tensor_statistics"))
    for chunk in model:
        if collects or enabled_by_environment():
            transformer_engine.attach(chunk)
        reach_check.name_model(chunk)
    modules = _modules(model) if model else None
    if (recipe := policy.current().recipe) is not None:
        recipe.check_in_run((args or {}).get("train_iters"))
    session.configure(args, modules=modules, coordinates=coordinates(), **options)
    model_roots.watch()


#: Function that returns the keyword arguments of `configure`; None if nothing is left to configure.
_later: Callable[[], dict[str, Any]] | None = None
#: Function to call at the end of each iteration, before the optimizer's step; None if not set.
_after_iteration: Callable[[], None] | None = None


def configure_later(
    arguments: Callable[[], dict[str, Any]], *, after_iteration: Callable[[], None] | None = None
) -> None:
    """Let `begin_run` call `configure` with the keyword arguments that `arguments` returns.

    A launcher uses this function, because only the trainer knows the arguments of the run and the
    number of completed iterations.

    Args:
        arguments: function that returns the keyword arguments.
        after_iteration: function to call at the end of each iteration, before the optimizer's step.
    """
    global _after_iteration, _later
    _later, _after_iteration = arguments, after_iteration


def begin_run(model: Sequence[torch.nn.Module]) -> None:
    """Call `configure` as `configure_later` requested; called before the first iteration.

    Must be called on all ranks.

    Args:
        model: pipeline stages of this rank.

    Raises:
        ValueError: if a setting is wrong, or if tensors are requested although the trainer has
            called `configure` itself.
    """
    global _later
    if _later is None:
        return
    arguments, _later = _later(), None
    if not session.configured():
        configure(**arguments, model=model)
    elif (
        arguments["save_tensors"] or arguments["plan"] or arguments["tensor_statistics"] is not None
    ):
        raise ValueError(
            "the script calls megatron.core.tensor_saver.configure itself; run it without the "
            "flags of the collection before the script"
        )


def begin_iteration(number: int | None = None) -> None:
    """Start a training iteration, after calling `configure` if no trainer has done so.

    Args:
        number: number of the iteration; None for the one after the previous one.
    """
    if not session.configured():
        configure()
    session.begin_iteration(number)


def end_iteration() -> None:
    """End a training iteration, after its forward and backward passes."""
    session.end_iteration()
    if _after_iteration is not None:
        _after_iteration()


@contextlib.contextmanager
def training_iteration(number: int) -> Iterator[None]:
    """Mark a training iteration of a loop that does not use the pipeline schedules.

    The collection, recipes with iterations, stochastic rounding and delayed scaling need the number
    of the iteration. In the schedules of megatron-core, this function is not needed. The block
    contains the forward and backward passes of all micro-batches of one iteration:

        for n in range(1, iterations + 1):
            with training_iteration(n):
                for batch in micro_batches:
                    loss(model(batch)).backward()
            optimizer.step()

    Each call of the model is one micro-batch. A call under `torch.no_grad()` is an evaluation,
    which is not collected. With several ranks, all ranks must enter the block. A block that ended
    with an exception may be repeated with the same number.

    Args:
        number: number of the iteration, counted from 1 and increasing. A run that resumes after
            iteration 1000 continues with 1001.

    Raises:
        ValueError: if the number does not increase, or the block is inside another one.
    """
    if explicit_iteration.active():
        raise ValueError("training_iteration is inside another one; end that one first")
    from megatron.core.low_precision import model_entry, reach_check  # they import this module

    if clock.seed is None:  # the first iteration of the process
        same_formats.check_same_formats()
    begin_run(())
    if isinstance(number, bool) or not isinstance(number, int) or number <= clock.iteration:
        raise ValueError(
            f"training_iteration({number!r}) follows iteration {clock.iteration}; give integers "
            "that increase from 1, and put all micro-batches of an iteration in one block"
        )
    model_entry.check_unchanged(number)
    before = clock.iteration
    begin_iteration(number)
    iteration = explicit_iteration.ExplicitIteration(number)
    model_roots.watch()
    try:
        yield
    except BaseException:
        abandon_iteration(before)
        model_entry.abandon_passes()
        raise
    finally:
        iteration.end()
    reach_check.check_recipe_and_selection(at_end=True)
    end_iteration()


def check_reached(model: Sequence[torch.nn.Module], *, alone: bool = False) -> None:
    """Raise ValueError if the selection names a module or tensor that the model does not have.

    If the run collects tensors, this function must be called on all ranks.

    Args:
        model: pipeline stages of this rank.
        alone: whether this rank has the whole model and does not wait for the other ranks.

    Raises:
        ValueError: if the selection names such a module or tensor; raised on all ranks.
    """
    if session.enabled():
        session.check_reached(_modules(model), alone=alone)


def _modules(model: Sequence[torch.nn.Module]) -> list[NamedTensors]:
    return [
        (module.identity, module.tensor_names())
        for chunk in model
        for module in chunk.modules()
        if isinstance(module, Collected) and module.identity is not None
    ]
