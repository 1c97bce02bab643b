"""Announce the formats of a model that is only evaluated, and check that they are applied.

An evaluation is a forward pass that does not train. A program that trains may also evaluate models,
such as a teacher, which are only announced. If a program trains no model at all, a failed check
ends the program with status 1; see `program_end`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch

from megatron.core.low_precision import model_roots, program_end, recipe_check
from megatron.core.low_precision.announcement import announce, sizes_of_parts
from megatron.core.low_precision.coverage_check import check_coverage, unreached
from megatron.core.low_precision.findings import refuse
from megatron.core.low_precision.first_forward import FirstForward
from megatron.fake_quant import policy

logger = logging.getLogger(__name__)

_evaluated: WeakSet[torch.nn.Module] = WeakSet()  #: models that were checked here
_idle: WeakSet[torch.nn.Module] = WeakSet()  #: models of which no evaluation called a layer


def forget() -> None:
    """Forget which models were checked, so that they are checked with the new formats."""
    _evaluated.clear()
    _idle.clear()


def begin(
    model: torch.nn.Module,
    inputs: Any,
    trained: Sequence[torch.nn.Module],
) -> Callable[[bool], None] | None:
    """Check a model whose evaluation begins, if a format is set and the model is unchecked.

    Args:
        model: outermost module that runs.
        inputs: inputs of the forward pass.
        trained: models that were checked and announced because they train.

    Returns:
        A function to call when the forward pass ends, with True if the pass has failed; None if
        there is nothing to check.
    """
    if not policy.current().changes_matmuls or (model in _evaluated and model not in _idle):
        return None
    if model in _evaluated:
        return _observe(model, inputs)
    layers = set(model_roots.layers_of(model))
    known = {layer for each in (*trained, *_evaluated) for layer in model_roots.layers_of(each)}
    _evaluated.add(model)
    if layers <= known:
        return None
    announce([model], unreached(model), None, evaluation=True)
    with program_end.remembered_in_evaluation(model, "coverage") as refused:
        check_coverage(model, collecting=False)
    if refused:
        logger.warning("the evaluation of %s: %s", type(model).__name__, refused[0])
    if sizes_of_parts() == 1 and not model_roots.layers_without_name():
        with program_end.remembered_in_evaluation(None, "recipe"):
            recipe_check.check(list(_evaluated), None, alone=True)
    return _observe(model, inputs)


def _observe(model: torch.nn.Module, inputs: Any) -> Callable[[bool], None]:
    """Observe an evaluation; if it calls no layer, the next evaluation is observed, too."""
    observer = FirstForward(model, inputs)
    _idle.add(model)

    def end(failed: bool) -> None:
        findings = observer.end()
        if failed:
            return
        program_end.note_evaluation(model, called=findings.any_called)
        if findings.any_called:
            _idle.discard(model)
        with program_end.remembered_in_evaluation(model, "first_forward"):
            refuse(findings)

    return end
