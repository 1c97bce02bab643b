"""Check a model when one of its forward passes begins and ends, under every trainer.

The hook of `model_roots` calls `enter` with the outermost module that runs. Before its first
training step, `reach_check` checks which modules are reached. After its first forward pass, the
operations that ran are compared with the audit; see `first_forward`. Both happen again if modules
are replaced or the formats change.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from megatron.collection import session
from megatron.collection.training_clock import clock, need_clock
from megatron.core.low_precision import (
    evaluation_check,
    explicit_iteration,
    first_forward,
    model_roots,
    program_end,
    reach_check,
    replaced_modules,
    run_request,
    same_formats,
    transformer_engine,
)
from megatron.core.low_precision.announcement import audit_of, sizes_of_parts
from megatron.core.low_precision.coverage_check import check_coverage, unreached
from megatron.core.low_precision.findings import report
from megatron.core.low_precision.first_forward import FirstForward
from megatron.fake_quant import policy

logger = logging.getLogger(__name__)

#: True for a module that has run and contains a layer or another module that multiplies matrices.
_multiplies: WeakKeyDictionary[torch.nn.Module, bool] = WeakKeyDictionary()
_entered: WeakSet[torch.nn.Module] = WeakSet()  #: modules that the hook has seen
_observed: WeakSet[torch.nn.Module] = WeakSet()  #: models whose first training step has begun
#: Number of keys of attention in the first forward pass of each model, for the format audit.
_keys: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()


def _follow_other_formats() -> None:
    """Forget which models were checked, so that they are checked with the new formats."""
    for models in (_observed, _multiplies, _keys):
        models.clear()
    evaluation_check.forget()
    model_roots.watch(anew=True)


policy.call_before_change(_follow_other_formats)


def enter(module: torch.nn.Module, inputs: Any) -> None:
    """Check a model before its forward pass; called with the outermost module that runs.

    Raises:
        ValueError: if the model trains and `prepare` refuses it, if its `forward` is called
            directly, or if another rank has different formats.
    """
    known = module in _entered
    _entered.add(module)
    policy.check_environment()
    with program_end.remembered_refusals((), program_end.OF_ALL_RANKS):
        same_formats.compare_without_waiting()
    if run_request.description() is None:
        return
    trains = module.training and torch.is_grad_enabled()
    known = known and not trains and model_roots.out_of_patience()
    if known or (module in _observed and not model_roots.may_be_new()):
        _after_this_call(module, lambda failed: watch_for_others())
        return
    _check_called(module)
    transformer_engine.attach(module)
    reach_check.name_model(module)
    if module not in _multiplies:
        _multiplies[module] = bool(model_roots.layers_of(module)) or bool(unreached(module))
        if _multiplies[module]:
            reach_check.note_reach(module)
    in_block = clock.micro_batch is not None and bool(model_roots.layers_of(module))
    stated = module.training or in_block
    training = stated and torch.is_grad_enabled() and not clock.evaluating
    if not (training and _multiplies[module]):
        _begin_evaluation(module, inputs)
        return
    if clock.micro_batch is None and run_request.collecting():
        need_clock("the tensor collection", training=True)
    if module not in reach_check.prepared():
        reach_check.prepare([module])
    if model_roots.layers_of(module):
        explicit_iteration.add_root(module, inputs)
    first = module not in _observed
    _observed.add(module)
    observer = FirstForward(module, inputs) if first else None
    _after_this_call(module, partial(_end_first_forward, module, observer))


def _begin_evaluation(module: torch.nn.Module, inputs: Any) -> None:
    """Check a module that is evaluated or multiplies nothing, and then watch for other models."""
    end = None
    if not session.audited() and model_roots.layers_of(module):
        end = evaluation_check.begin(module, inputs, reach_check.prepared())

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
    """Raise ValueError if a model to quantize or collect was compiled by `model.compile()`.

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
    """Watch for further models; with this project's trainer, only if a layer has no name."""
    if not session.audited() or model_roots.layers_without_name():
        model_roots.watch()


def _after_this_call(module: torch.nn.Module, function: Callable[[bool], None]) -> None:
    """Call `function` once, when the current forward pass of `module` ends or fails."""
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
            report(findings)
    except ValueError:  # refuse the next forward pass, too
        _observed.discard(model)
        model_roots.watch()
        raise


def abandon_passes() -> None:
    """Forget the unfinished forward passes of an iteration that ended with an exception.

    Torch calls no hooks if a KeyboardInterrupt or SystemExit ends a forward pass.
    """
    for observer in first_forward.abandon():
        _observed.discard(observer.model)
        model_roots.watch(anew=True)


def check_unchanged(iteration: int) -> None:
    """Check whether modules of the models were replaced, and check such models again.

    Args:
        iteration: number of the iteration that begins.

    Raises:
        ValueError: if a module inside a transformer layer is no longer reached.
    """
    policy.check_environment()
    if run_request.description() is None:
        return
    for model in reach_check.prepared():
        if not replaced_modules.were_replaced(model):
            continue
        with program_end.remembered_refusals([model], "check_unchanged"):
            transformer_engine.attach(model)
            reach_check.name_model(model)
            check_coverage(model, collecting=run_request.collecting())
        replaced_modules.remember(model)
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
