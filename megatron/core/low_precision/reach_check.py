"""Check and announce which modules of a model the requested formats and collection reach.

The check runs before the first training step of each model, under every trainer: the pipeline
schedules call `prepare`, and in other loops the hook of `model_roots` calls `enter`. A model with
no layer to quantize or collect is refused. Modules that are not reached are named in the log and in
the run card. After the first forward pass, the operations that ran are compared with the audit; see
`first_forward`. What the checks find is noted in `program_end`, which decides the exit status.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from megatron.collection import session
from megatron.collection.collectives import from_all_ranks
from megatron.collection.training_clock import clock, need_clock
from megatron.core import tensor_saver
from megatron.core.low_precision import (
    delayed_scaling,
    evaluation_check,
    explicit_iteration,
    first_forward,
    model_roots,
    program_end,
    recipe_check,
    run_request,
    same_formats,
    transformer_engine,
)
from megatron.core.low_precision.announcement import announce, audit_of, sizes_of_parts
from megatron.core.low_precision.coverage_check import check_coverage, unreached
from megatron.core.low_precision.first_forward import Findings, FirstForward
from megatron.core.low_precision.quantized_module import Collected, Quantized
from megatron.fake_quant import policy

logger = logging.getLogger(__name__)

#: Whether a module that has run contains a layer or another module that multiplies matrices.
_multiplies: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
_entered: WeakSet[torch.nn.Module] = WeakSet()  #: modules that the hook has seen
_prepared: WeakSet[torch.nn.Module] = WeakSet()  #: models checked before their first training step
_observed: WeakSet[torch.nn.Module] = WeakSet()  #: models whose first training step has begun
#: Models of a loop without schedules whose recipe and selection of modules are still to be checked,
#: because other layers have no name yet.
_unchecked: WeakSet[torch.nn.Module] = WeakSet()
_checked_together = False  #: whether the ranks have checked this for a model that is divided
#: Hash of the modules that each prepared model had when it was last checked.
_checked_modules: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
#: Value of `policy.changes()` when each model got its amax histories.
_histories: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
#: Number of keys of attention in the first forward pass of each model, for the format audit.
_keys: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()


def _follow_other_formats() -> None:
    """Forget which models were checked, so that they are checked with the new formats."""
    global _checked_together
    for models in (_prepared, _observed, _unchecked, _multiplies, _checked_modules, _keys):
        models.clear()
    _checked_together = False
    evaluation_check.forget()
    model_roots.watch(anew=True)


policy.call_before_change(_follow_other_formats)


def enter(module: torch.nn.Module, inputs: Any) -> None:
    """Check a model before its forward pass; called with the outermost module that runs.

    Raises:
        ValueError: if the model trains and is refused, as by `prepare`, if its `forward` is called
            directly, or if another rank has other formats.
    """
    _entered.add(module)
    policy.check_environment()
    with program_end.remembered_refusals((), program_end.OF_ALL_RANKS):
        same_formats.compare_without_waiting()
    if run_request.description() is None:
        return
    if module in _observed and not model_roots.layers_without_name():
        _after_this_call(module, lambda failed: watch_for_others())
        return
    _check_called(module)
    transformer_engine.attach(module)
    name_model(module)
    if module not in _multiplies:
        _multiplies[module] = bool(model_roots.layers_of(module)) or bool(unreached(module))
        if _multiplies[module]:
            _note_reach(module)
    in_block = clock.micro_batch is not None and bool(model_roots.layers_of(module))
    stated = module.training or in_block
    training = stated and torch.is_grad_enabled() and not clock.evaluating
    if not (training and _multiplies[module]):
        _begin_evaluation(module, inputs)
        return
    if clock.micro_batch is None and run_request.collecting():
        need_clock("the tensor collection", training=True)
    if module not in _prepared:
        prepare([module])
    if model_roots.layers_of(module):
        explicit_iteration.add_root(module, inputs)
    first = module not in _observed
    _observed.add(module)
    observer = FirstForward(module, inputs) if first else None
    _after_this_call(module, partial(_end_first_forward, module, observer))


def _begin_evaluation(module: torch.nn.Module, inputs: Any) -> None:
    """Check a module that does not train, and watch for further models after this call."""
    end = None
    if not session.audited() and model_roots.layers_of(module):
        end = evaluation_check.begin(module, inputs, _prepared, _refuse)

    def after(failed: bool) -> None:
        model_roots.watch()
        if end is not None:
            end(failed)

    _after_this_call(module, after)


def _check_called(module: torch.nn.Module) -> None:
    """Raise ValueError if this module is a part of a model whose `forward` is called directly.

    Torch runs no hooks then, so this module would be taken for a model of its own.
    """
    model = model_roots.calling_forward(module)
    if model is not None and model not in _entered:
        name = type(model).__name__
        with program_end.remembered_refusals([model], "called"):
            raise ValueError(
                f"the program calls {name}.forward(...), so that its layers cannot be named and "
                f"its LM head cannot be told from other layers; call the {name} itself: "
                "model(...)"
            )


def check_compiled_in_place(model: torch.nn.Module) -> None:
    """Raise ValueError if something is requested of a model that was compiled by `model.compile()`.

    Its hooks are compiled, too, so nothing would be checked. `torch.compile(model)` returns a
    module whose hooks run.
    """
    if torch._dynamo.config.disable or run_request.description() is None:
        return
    trains = model.training and torch.is_grad_enabled() and not clock.evaluating
    if not (model_roots.layers_of(model) or (trains and unreached(model))):
        return
    name = type(model).__name__
    with program_end.remembered_refusals([model], "compiled"):
        raise ValueError(
            f"{run_request.description()} cannot be checked in the model {name}, which "
            f"{name}.compile() compiles together with its hooks; write model = "
            "torch.compile(model), or compile the layers inside"
        )


def watch_for_others() -> None:
    """Watch for further models. This project's trainer has none but those with layers to name."""
    if not session.audited() or model_roots.layers_without_name():
        model_roots.watch()


def _after_this_call(module: torch.nn.Module, function: Callable[[bool], None]) -> None:
    """Call `function` once, when the forward pass of `module` that has begun ends or fails."""
    ended = False

    def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        nonlocal ended
        failed = output is None and sys.exc_info()[0] is not None
        if not failed:  # torch iterates over the hooks themselves after a failure
            handle.remove()
        if not ended:
            ended = True
            function(failed)

    handle = module.register_forward_hook(hook, always_call=True)


def name_model(model: torch.nn.Module) -> None:
    """Name the layers of a model, and give it amax histories for new names or other formats."""
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
    """Check models before their first training step, and announce what is reached.

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
        _checked_modules[chunk] = _hash_of_modules(chunk)
    missed = [name for chunk in chunks for name in unreached(chunk)]
    reached = any(map(_note_reach, chunks))
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


def check_unchanged(iteration: int) -> None:
    """Check models with replaced modules again.

    The search for replaced modules takes 2 milliseconds for a GPT of 126 layers (2,151 modules).

    Args:
        iteration: number of the iteration that begins.

    Raises:
        ValueError: if a module inside a transformer layer is no longer reached.
    """
    policy.check_environment()
    if run_request.description() is None:
        return
    for model in list(_prepared):
        if _checked_modules.get(model) == (now := _hash_of_modules(model)):
            continue
        with program_end.remembered_refusals([model], "check_unchanged"):
            transformer_engine.attach(model)
            name_model(model)
            check_coverage(model, collecting=run_request.collecting())
        _checked_modules[model] = now
        _observed.discard(model)  # compare its next forward pass with the audit
        model_roots.watch(anew=True)
        missed = unreached(model)
        session.add_to_card("not_reached", missed)
        logger.warning(
            "modules of the model %s were replaced before iteration %d; not quantized and not "
            "collected: %s",
            type(model).__name__,
            iteration,
            ", ".join(missed) or "none",
        )


def _hash_of_modules(model: torch.nn.Module) -> int:
    """Return a number that changes if a module or its forward pass is replaced or added."""
    identities, waiting, kinds = [], [model], dict[type, int]()
    while waiting:
        module = waiting.pop()
        kind, own = type(module), module.__dict__
        if kind not in kinds:
            methods = (id(getattr(kind, name, None)) for name in ("forward", "_forward_impl"))
            kinds[kind] = hash((id(kind), *methods))
        identities += (id(module), kinds[kind], id(own.get("forward")))
        identities.append(id(own.get("_forward_impl")))
        waiting += [child for child in module._modules.values() if child is not None]
    return hash(tuple(identities))


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


def _note_reach(model: torch.nn.Module) -> bool:
    """Return whether the request reaches a layer of a model, and remember it until the exit."""
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
    """Check the recipe and the selected modules against all models of a loop without schedules.

    Ranks of a loop without schedules may run different models, so no rank waits for the others, but
    all ranks end the first iteration. If this rank has only a part of the model, the check waits
    for this end. In a loop without iterations, it is left out then, and the log says so.

    Args:
        at_end: whether the first iteration has ended, so that no other model is to be expected.

    Raises:
        ValueError: if a rule or a selected module is in no model.
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
                "this rank has only a part of the model, so it is not checked whether every rule "
                "of the recipe and every selected module exists"
            )
        return
    recipe_check.check(models, None, alone=True)
    tensor_saver.check_reached(models, alone=True)


def _end_first_forward(model: torch.nn.Module, observer: FirstForward | None, failed: bool) -> None:
    """Report how the first forward pass of a model differed from the audit.

    Raises:
        ValueError: if a layer ran without the format that the audit lists for it.
    """
    watch_for_others()
    if observer is None or observer.abandoned:
        return
    findings = observer.end()
    if failed:
        return
    if findings.any_called:
        program_end.note_call(model)
    elif model_roots.layers_of(model) and program_end.note_idle(model):
        _observed.discard(model)  # the next forward pass may call one
        model_roots.watch()
    if not session.audited() and sizes_of_parts() == 1:
        _keys[model] = findings.keys
        session.set_audit(audit_of(list(_keys), max(_keys.values()), alone=True))
    try:
        with program_end.remembered_refusals([model], "first_forward"):
            _report(findings)
    except ValueError:  # refuse the next forward pass, too
        _observed.discard(model)
        model_roots.watch()
        raise


def abandon_passes() -> None:
    """Forget the forward passes that have begun: an exception has ended the iteration.

    Torch calls no hooks if a KeyboardInterrupt or SystemExit ends a forward pass.
    """
    for observer in first_forward.abandon():
        _observed.discard(observer.model)
        model_roots.watch(anew=True)


def _report(findings: Findings) -> None:
    """Log the findings and add them to the run card; refuse layers that ran without a format."""
    outside = {
        name: ", ".join(f"{kind} x{count}" for kind, count in operations.items())
        for name, operations in findings.outside.items()
    }
    lines = []
    if findings.not_called:
        lines.append(f"not called: {', '.join(findings.not_called)}")
    for name, operations in outside.items():
        lines.append(f"outside of the audit, in high precision: {name}: {operations}")
    if lines and not session.audited():
        logger.warning("%s", "\n".join(["the first forward pass of the model:", *lines]))
    session.add_to_card("not_called", findings.not_called)
    session.add_to_card("outside_of_the_audit", outside)
    _refuse(findings)


def _refuse(findings: Findings) -> None:
    """Raise ValueError if layers, or attention inside a transformer layer, ran without a format."""
    requested = run_request.description()
    if findings.without_format:
        raise ValueError(
            f"{requested} is in the audit of {', '.join(findings.without_format)}, but other code "
            "has replaced their forward pass and multiplies without it; remove that code, or leave "
            "these modules out of the formats"
        )
    if findings.not_collected:
        raise ValueError(
            f"{requested} includes {', '.join(findings.not_collected)}, but other code has "
            "replaced their forward pass, so that none of their tensors is collected; remove that "
            "code, or leave these modules out of the collection (--collect-modules)"
        )
    formats = policy.current()
    attends = any(
        formats.choices[operation].format is not None or operation in formats.by_recipe
        for operation in ("qk", "pv")
    )
    if findings.foreign_attention and (attends or run_request.collecting()):
        raise ValueError(
            f"{requested} does not reach the attention of {', '.join(findings.foreign_attention)}, "
            "which calls a fused attention kernel; use DotProductAttention of megatron.core, or "
            "quantize the linear layers only (linear_<format>)"
        )
