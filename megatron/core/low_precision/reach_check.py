"""Check and announce which modules of a model the requested formats and collection reach.

The check runs before the first training step of each model, under every trainer: the pipeline
schedules call `prepare`, and `model_entry` does so in other loops. A model with no layer to
quantize or collect is refused. Modules that are not reached are named in the log and in the run
card. What the checks find is noted in `program_end`, which decides the exit status.
"""

import logging
from collections.abc import Sequence
from weakref import WeakKeyDictionary, WeakSet

import torch

from megatron.collection import session
from megatron.collection.collectives import from_all_ranks
from megatron.collection.training_clock import clock
from megatron.core import tensor_saver
from megatron.core.low_precision import (
    delayed_scaling,
    explicit_iteration,
    model_roots,
    program_end,
    recipe_check,
    replaced_modules,
    run_request,
    transformer_engine,
)
from megatron.core.low_precision.announcement import announce, sizes_of_parts
from megatron.core.low_precision.coverage_check import check_coverage, unreached
from megatron.core.low_precision.quantized_module import Collected, Quantized
from megatron.fake_quant import policy

logger = logging.getLogger(__name__)

_prepared: WeakSet[torch.nn.Module] = WeakSet()  #: models checked before their first training step
#: Models of a loop without pipeline schedules, against which the recipe and the selected modules
#: are still to be checked, because other layers have no name yet.
_unchecked: WeakSet[torch.nn.Module] = WeakSet()
_checked_together = False  #: True once all ranks have checked this for a model that is divided
#: Value of `policy.changes()` when each model got its amax histories.
_histories: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()


def _follow_other_formats() -> None:
    """Forget which models were checked, so that they are checked with the new formats."""
    global _checked_together
    _prepared.clear()
    _unchecked.clear()
    _checked_together = False
    replaced_modules.forget()


policy.call_before_change(_follow_other_formats)


def prepared() -> list[torch.nn.Module]:
    """Return the models that were checked before their first training step."""
    return list(_prepared)


def name_model(model: torch.nn.Module) -> None:
    """Name the layers of a model, and give it amax histories for new names or formats."""
    renamed = model_roots.name_layers(model)
    inner = model
    while not hasattr(inner, "delayed_scaling") and hasattr(inner, "module"):
        inner = inner.module
    without, changes = getattr(inner, "delayed_scaling", None) is None, policy.changes()
    if renamed:
        delayed_scaling.attach(inner)
    elif _histories.get(inner, changes) != changes or without:
        delayed_scaling.attach(inner, keep=True)
    _histories[inner] = changes


def prepare(chunks: Sequence[torch.nn.Module], seq_length: int | None = None) -> None:
    """Check models before their first training step, and log the formats of their matmuls.

    Args:
        chunks: pipeline stages of this rank, or the outermost module of a model.
        seq_length: number of tokens in a sequence, given by the pipeline schedules, which call this
            function on all ranks; None in a loop without schedules.

    Raises:
        ValueError: if a module of a transformer layer is not reached, if no layer of any model is
            reached, or if a rule or a selection does not fit the model.
    """
    policy.check_environment()
    with program_end.remembered_refusals(chunks, "prepare"):
        _prepare(chunks, seq_length)


def _prepare(chunks: Sequence[torch.nn.Module], seq_length: int | None) -> None:
    program_end.note_training()
    requested = run_request.description()
    for chunk in chunks:
        if requested is not None:
            transformer_engine.attach(chunk)
        name_model(chunk)
    if requested is None:
        return
    for chunk in chunks:
        check_coverage(chunk, collecting=run_request.collecting())
        _prepared.add(chunk)
        replaced_modules.remember(chunk)
    missed = [name for chunk in chunks for name in unreached(chunk)]
    reached = any(map(note_reach, chunks))
    if seq_length is not None and torch.distributed.is_initialized():
        answers = [(reached, missed)] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(answers, (reached, missed))
        reached = any(of_rank for of_rank, _ in answers)
        missed = list(dict.fromkeys(name for _, of_rank in answers for name in of_rank))
    others = seq_length is None and (program_end.any_reached() or model_roots.layers_without_name())
    if not (reached or others):
        raise ValueError(_refusal(requested, chunks, missed))
    if seq_length is None and not clock.scheduled:
        _unchecked.update(chunks)
        check_recipe_and_selection(at_end=False)
    if not session.audited():
        announce(chunks, missed, seq_length)
    session.add_to_card("not_reached", missed)


def _refusal(requested: str, chunks: Sequence[torch.nn.Module], missed: Sequence[str]) -> str:
    models = " and ".join(type(chunk).__name__ for chunk in chunks)
    layers = [layer for chunk in chunks for layer in model_roots.layers_of(chunk)]
    if layers:
        names = ", ".join(layer.identity.name for layer in layers[:8])
        return (
            f"{requested} reaches no layer of the model {models}: it applies to none of {names}; "
            "change the format or the recipe, or switch it off"
        )
    modules = f"its modules are {', '.join(missed[:8])}" if missed else "it multiplies nothing"
    return (
        f"{requested} reaches no layer of the model {models}: {modules}; build it from "
        "ColumnParallelLinear, RowParallelLinear and DotProductAttention of megatron.core (the "
        "local implementation), or switch the format and the collection off"
    )


def note_reach(model: torch.nn.Module) -> bool:
    """Return whether a layer of a model is quantized or collected; note it for the exit check."""
    layers = [layer for layer in model_roots.layers_of(model) if isinstance(layer, Collected)]
    if policy.current().changes_matmuls:
        quantized = [layer for layer in layers if isinstance(layer, Quantized)]
        reached = any(
            layer.plan_of(op).of_all_times() for layer in quantized for op in layer.operations
        )
    else:
        reached = bool(layers)
    program_end.note_reach(model, reached)
    return reached


def check_recipe_and_selection(*, at_end: bool) -> None:
    """Check the recipe and the selection against all models of a loop without schedules.

    Ranks of a loop without schedules may run different models, so no rank waits for the others, but
    all ranks end the first iteration. If this rank has only a part of the model, the check waits
    for this end. In a loop without iterations, such a rank skips the check and logs a warning.

    Args:
        at_end: whether the first iteration has ended, so that no other model is to be expected.

    Raises:
        ValueError: if a rule applies to no model, or no model has a selected module.
    """
    global _checked_together
    in_parts = sizes_of_parts() > 1
    if in_parts and at_end and not _checked_together:
        _checked_together = True
        models = list(_unchecked)
        _unchecked.clear()
        if any(from_all_ranks(bool(models))):  # the pipeline schedules check their models
            recipe_check.check(models, None)
            tensor_saver.check_reached(models)
        return
    if not _unchecked or (model_roots.layers_without_name() and not at_end):
        return
    if in_parts and explicit_iteration.active():
        return
    models = list(_unchecked)
    _unchecked.clear()
    if in_parts:
        if policy.current().recipe is not None or session.enabled():
            logger.warning(
                "this rank has only a part of the model, so it is not checked whether the model "
                "has a module for every rule of the recipe and every selected module"
            )
        return
    recipe_check.check(models, None, alone=True)
    tensor_saver.check_reached(models, alone=True)
