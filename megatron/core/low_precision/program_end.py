"""End a program with status 1 if what it requested was not done.

The checks of the models note here what they find: models that are reached or not, models that are
refused, and models whose forward passes call none of their layers. A program may handle the error
of a refusal as its own, or never run the model that it has built. Then it would end with status 0
although the request was not fulfilled, so functions that `atexit` calls examine these notes.
"""

import atexit
import contextlib
import math
import mmap
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.collection import session, session_end
from megatron.collection.exit_status import call_at_exit, error_at_exit
from megatron.collection.settings import enabled_by_environment
from megatron.collection.training_clock import clock
from megatron.core.low_precision import model_roots, run_request
from megatron.fake_quant import policy

OF_ALL_RANKS = "formats of all ranks"  #: check that also concerns a rank that requests nothing

_reached = False  #: True once a model with a layer to quantize or collect has run
_missed: set[str] = set()  #: models that ran and have no layer to quantize or collect
#: Message of the last refusal, keyed by the `id` of the model (0 for the whole program) and the
#: name of the check. The program may have handled the error.
_refused: dict[tuple[int, str], str] = {}
#: Names of models whose forward passes have called none of their layers, by the `id` of the model.
_idle: dict[int, str] = {}
_any_called = False  #: True once a model in training has called a layer to quantize or collect
_trained = False  #: True once a model has begun to train
#: Name of each evaluated model, and whether it has called one of its layers, keyed by `id`.
_evaluations: dict[int, tuple[str, bool]] = {}
_refused_evaluations: dict[tuple[int, str], str] = {}  #: like `_refused`, for evaluations
#: Byte that this process shares with its forks; 1 once any of these processes has run a model. The
#: byte is allocated with the first layer, so that programs of one fork server do not share it.
_ran_in_family: mmap.mmap | None = None
_on_change: Callable[[], None] | None = None  #: see `call_on_change`
_left_to_launcher = False  #: True if a launcher decides how a program that ran no model ends


def note_reach(model: torch.nn.Module, reached: bool) -> None:
    """Note that a model runs, and whether one of its layers is quantized or collected."""
    global _reached
    _check_reach_at_exit()
    _reached |= reached
    if _ran_in_family is not None:
        _ran_in_family[0] = 1
    if not reached:
        _missed.add(type(model).__name__)
    _changed()


def any_reached() -> bool:
    """Return whether a model with a layer to quantize or collect has run."""
    return _reached


@contextlib.contextmanager
def remembered_refusals(models: Sequence[torch.nn.Module], check: str) -> Iterator[None]:
    """Remember a ValueError of the `with` block until the exit, or until the check succeeds.

    Args:
        models: models that the block checks; none if it checks the program.
        check: name of the check; each check has its own refusals.
    """
    keys = [(id(model), check) for model in models] or [(0, check)]
    try:
        yield
    except ValueError as error:
        _refused.update(dict.fromkeys(keys, str(error)))
        _check_reach_at_exit()
        _changed()
        raise
    if any([_refused.pop(key, None) for key in keys]):
        _changed()


def note_call(model: torch.nn.Module) -> None:
    """Note that a model in training has called a layer."""
    global _any_called
    _any_called = True
    _idle.pop(id(model), None)


def note_idle(model: torch.nn.Module) -> bool:
    """Note that a forward pass in training called none of the model's layers.

    Returns:
        False if another forward pass has called a layer, so that nothing is noted.
    """
    if not _any_called:
        _idle[id(model)] = type(model).__name__
    return not _any_called


def note_training() -> None:
    """Note that a model begins to train, so that evaluations do not decide how the program ends."""
    global _trained
    _trained = True


def note_evaluation(model: torch.nn.Module, *, called: bool) -> None:
    """Note that a model was evaluated, and whether it has called a layer."""
    _evaluations[id(model)] = (type(model).__name__, called)


@contextlib.contextmanager
def remembered_in_evaluation(model: torch.nn.Module | None, check: str) -> Iterator[list[str]]:
    """Remember and suppress a ValueError of the `with` block, which checks an evaluated model.

    Args:
        model: model that is evaluated; None for all of them.
        check: name of the check.

    Yields:
        A list that has the message after the block, if there was an error.
    """
    key, messages = (id(model), check), list[str]()
    try:
        yield messages
    except ValueError as error:
        messages.append(str(error))
        _refused_evaluations[key] = str(error)
        _check_reach_at_exit()
    else:
        _refused_evaluations.pop(key, None)


def a_model_ran() -> bool:
    """Return whether a model, or a layer, has run in this process or in a fork of it."""
    fork_ran = _ran_in_family is not None and _ran_in_family[0]
    return bool(_reached or _missed or model_roots.ran_unseen() or fork_ran)


def check_at_exit() -> None:
    """Let the program end with status 1 if formats or tensors are requested and no model runs.

    Called when the first layer is built: a program without layers may be a tool that only inherits
    the environment variables.
    """
    _watch_forks()
    atexit.register(_exit_if_no_model_ran, os.getpid())


def leave_exit_to_launcher() -> None:
    """Let a launcher, or a trainer that may run none of its models, decide how a run ends."""
    global _left_to_launcher
    _left_to_launcher = True
    _watch_forks()


def call_on_change(function: Callable[[], None]) -> None:
    """Set the function to call when a model is noted as run, as refused or as no longer refused."""
    global _on_change
    _on_change = function


def ended_by_error() -> bool:
    """Return whether an exception ends this process, which then has a status other than 0."""
    # Before Python 3.13, a process of multiprocessing ends while its exception is handled.
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return False
    return error is not None or error_at_exit() is not None


def failure() -> str | None:
    """Return an error message if a model was refused or the request was not fulfilled, or None."""
    if ended_by_error():
        return None
    requested = run_request.description()
    if requested is None and (0, OF_ALL_RANKS) not in _refused:
        return None
    if not _reached and _missed:
        return f"{requested} reached no layer of {', '.join(sorted(_missed))}"
    if _refused:
        refusal = next(iter(_refused.values()))
        # Since Python 3.13, a process of multiprocessing no longer has an error when it ends.
        known = sys.version_info < (3, 13) or multiprocessing.parent_process() is None
        return f"the program handled this error and continued: {refusal}" if known else refusal
    if _idle and not _any_called:
        return (
            f"{requested} reached nothing: the forward passes of {', '.join(_idle.values())} "
            "called none of its layers; call them as modules"
        )
    if not _trained and not session.audited() and (message := _failure_of_evaluations()):
        return message
    if enabled_by_environment() and not session.configured() and (_reached or _missed):
        return "TENSOR_SAVE_ENABLED is set, and nothing was collected: no training ran"
    return _recipe_that_begins_later()


def check_end() -> None:
    """End the program with status 1 if its models ran and the request was not fulfilled.

    Python calls this function at its exit; a process that ends in a different way must call it.
    """
    if (message := failure()) is not None:
        session_end.end_with_error(message)


def _failure_of_evaluations() -> str | None:
    """Return an error message if models were evaluated, but not in the requested formats."""
    requested = run_request.description()
    if _refused_evaluations:
        return f"no model was trained, and {next(iter(_refused_evaluations.values()))}"
    if _evaluations and not any(called for _, called in _evaluations.values()):
        names = ", ".join(name for name, _ in _evaluations.values())
        return (
            f"{requested} reached nothing: the forward passes of {names} called none of its "
            "layers; call them as modules"
        )
    recipe, iteration = policy.current().recipe, max(clock.iteration, 1)
    if recipe is None or not _evaluations or session.knows_last_iteration():
        return None
    if not iteration < recipe.first_iteration < math.inf:
        return None
    return (
        f"recipe {recipe.path} sets its first format in iteration {recipe.first_iteration:.0f}, "
        f"and no model was trained: the evaluation had the formats of iteration {iteration}; pass "
        "the number of completed iterations by megatron.core.tensor_saver.configure(iteration=N), "
        "or remove the iterations from the recipe"
    )


def _recipe_that_begins_later() -> str | None:
    """Return an error message if the program has ended before the recipe sets a format.

    A trainer that passes its last iteration to `session.configure` has been checked there. It may
    end before this iteration, and go on in another run.
    """
    recipe = policy.current().recipe
    if recipe is None or session.audited() or session.knows_last_iteration():
        return None
    if not clock.completed or not clock.iteration < recipe.first_iteration < math.inf:
        return None
    return (
        f"recipe {recipe.path} sets its first format in iteration {recipe.first_iteration:.0f}, "
        f"and the run ended at iteration {clock.iteration}; train longer, change the recipe, or, "
        "if another run continues this one, pass args={'train_iters': N} to "
        "megatron.core.tensor_saver.configure"
    )


def _changed() -> None:
    if _on_change is not None:
        _on_change()


def _check_reach_at_exit() -> None:
    call_at_exit(check_end)


def _watch_forks() -> None:
    """Let forks of this process report to it that they have run a model."""
    global _ran_in_family
    if _ran_in_family is None:
        _ran_in_family = mmap.mmap(-1, 1)


def _exit_if_no_model_ran(owner: int) -> None:
    """End the program with status 1 if it built a model, and none ran.

    A trainer that passes the format audit to `configure` reports its own end. A collection that
    was configured reports that no iteration ran.

    Args:
        owner: ID of the process that built the model; its forks may end without running it.
    """
    if _left_to_launcher or os.getpid() != owner:
        return
    if ended_by_error():
        return
    requested = run_request.description()
    if requested is None or a_model_ran() or session.audited() or session.enabled():
        return
    session_end.end_with_error(
        f"{requested} was requested, and the program built a model but ran none; run it, or switch "
        "the format and the collection off"
    )
