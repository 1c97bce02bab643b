"""Find the outermost module of each model, and let it name the layers of the model.

A layer has no reference to the model that contains it, and a trainer may build any model and call
it in its own loop. Therefore, a global hook of torch runs before the first forward pass of any
module: the module that is called first contains all others. The hook is removed before the modules
inside are called, so that they run without it. It is registered again for the next model of the
program, until nothing new has appeared in `PATIENCE` calls and every layer has a name.

A layer that runs without having been found in this way, such as a layer in a plain Python list,
gets the name of its class and a number.
"""

import functools
import gc
import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from megatron.collection.module_identity import Identified, assign_identities
from megatron.collection.training_clock import clock

#: After this number of calls of outermost modules without a new layer, the hook is registered again
#: only while some layer has no name.
PATIENCE = 1000

_unnamed: WeakSet[Identified] = WeakSet()  #: layers that no outermost module has named yet
#: Layers by name. Only names that were given in the same iteration count as taken, because a model
#: that is no longer used may exist until the program ends.
_names: WeakValueDictionary[str, Identified] = WeakValueDictionary()
_named_at = 0  #: iteration in which the layers of `_names` were named
_hook: Any = None  #: handle of the global hook; None while the hook is removed
_calls = 0  #: number of calls of the hook since a layer was built
_any_built = False  #: True once a layer was built
_ran_unseen = False  #: True if torch.compile traced a module, or a layer ran that no module called


def register(layer: Identified) -> None:
    """Record a newly built layer, so that the outermost module of its model can give it a name."""
    global _any_built, _calls
    if not _any_built:
        from megatron.core.low_precision import program_end  # it imports this module

        _any_built = True
        program_end.check_at_exit()
    expect_name(layer)
    _calls = 0
    watch()


def expect_name(layer: Identified) -> None:
    """Note that a layer has no name yet, so that its model names it in the next forward pass."""
    _unnamed.add(layer)


def watch(*, anew: bool = False) -> None:
    """Register a hook that calls `model_entry.enter` before the next forward pass of any module.

    Args:
        anew: whether to restart the count of calls, because something has changed.
    """
    global _calls, _hook
    if anew:
        _calls = 0
    if _hook is None and (_calls < PATIENCE or _unnamed):
        _hook = register_module_forward_pre_hook(_before_a_forward_pass)


def _before_a_forward_pass(module: torch.nn.Module, inputs: Any) -> None:
    global _calls, _hook, _ran_unseen
    if torch.compiler.is_compiling():
        _ran_unseen = True
        return
    if torch._C._current_graph_task_id() != -1:
        return  # the backward pass recomputes a part of a model
    from megatron.core.low_precision import model_entry  # its imports include this file

    _calls += 1
    _hook.remove()
    _hook = None
    try:
        model_entry.enter(module, inputs)
    except ValueError:  # refuse the next call, too
        watch()
        raise


def calling_forward(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the outermost module that contains this one and whose method `forward` is running.

    Return None if there is no such module.
    """
    found = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        outer = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        graph = isinstance(outer, torch.fx.GraphModule)  # a part of a compiled function
        if isinstance(outer, torch.nn.Module) and outer is not module and not graph:
            found = outer if any(each is module for each in outer.modules()) else found
        frame = frame.f_back
    return found


def ran_unseen() -> bool:
    """Return whether a layer may have run in a model that `model_entry.enter` has not seen."""
    return _ran_unseen


def layers_without_name() -> bool:
    """Return whether a layer was built and is not a part of any model that has run."""
    return bool(_unnamed)


def out_of_patience() -> bool:
    """Return whether the hook is registered again only because a layer has no name yet."""
    return _calls > PATIENCE


def may_be_new() -> bool:
    """Return whether a module that has run before may contain a layer without a name."""
    return bool(_unnamed) and not out_of_patience()


def layers_of(model: torch.nn.Module) -> list[Identified]:
    """Return all layers of a model that can be quantized and collected."""
    return [module for module in model.modules() if isinstance(module, Identified)]


def name_layers(model: torch.nn.Module) -> bool:
    """Name the layers of a model, starting from its outermost module.

    If another model that is used at the same time has layers with the same names, the names begin
    with the class of this model and a number.

    Returns:
        True if a name has changed.
    """
    global _named_at
    if _named_at != clock.iteration:
        forget_names()
        _named_at = clock.iteration
    layers = layers_of(model) if _unnamed else []
    if not any(layer in _unnamed for layer in layers):
        return False
    before = [layer.identity for layer in layers]
    assign_identities(model)
    number = 0
    while _names_taken(layers):
        number += 1
        assign_identities(model, f"{type(model).__name__}_{number}.")
    for layer in layers:
        _unnamed.discard(layer)
        _names[layer.identity.name] = layer
    return before != [layer.identity for layer in layers]


def forget_names() -> None:
    """Let the next model reuse the names of earlier models, as in a new program."""
    _names.clear()


def _names_taken(layers: Iterable[Identified]) -> bool:
    """Return whether other layers that still exist already have the names of these layers."""
    own = {id(layer) for layer in layers}

    def taken() -> bool:
        others = (_names.get(layer.identity.name) for layer in layers)
        return any(other is not None and id(other) not in own for other in others)

    if not taken():
        return False
    gc.collect()  # a model that was deleted may still exist
    return taken()


def name_alone(layer: Identified) -> None:
    """Name a layer that runs outside of every model that was found."""
    global _ran_unseen
    _ran_unseen = True
    if layer in _unnamed:
        name_layers(layer)


_compile = torch.nn.Module.compile


@functools.wraps(_compile)
def _compile_in_place(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Compile a module as torch does, and refuse calls that would hide a model from the hook."""
    _compile(self, *args, **kwargs)
    compiled: Any = self._compiled_call_impl
    if compiled == self._call_impl:  # torch.compile is disabled
        return

    def call(*inputs: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and _hook is not None:  # no other module contains it
            from megatron.core.low_precision import model_entry  # its imports include this file

            model_entry.check_compiled_in_place(self)
        return compiled(*inputs, **options)

    self._compiled_call_impl = call


torch.nn.Module.compile = _compile_in_place  # type: ignore[method-assign]
watch()
