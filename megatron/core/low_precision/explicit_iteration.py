"""Update the training clock in a training loop that does not use the pipeline schedules.

The schedules know the iteration and the micro-batch. In a user-defined loop, the user states the
iteration; see `megatron.core.tensor_saver.training_iteration`. Each call of the outermost
module of a model is then one micro-batch. Hooks on this module update the clock: before the call,
and when the backward pass reaches the output of the call. Forward passes during the backward pass
are recomputations. With delayed scaling, the hooks also update the amax histories.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from megatron.collection import session
from megatron.collection.module_identity import Identified, ModuleIdentity
from megatron.collection.training_clock import MicroBatch, clock
from megatron.core.low_precision import delayed_scaling, model_roots
from megatron.core.low_precision.delayed_scaling import DelayedScaling

roots: WeakSet[torch.nn.Module] = WeakSet()  #: outermost modules of the models found so far
_current: ExplicitIteration | None = None  #: the current iteration; None outside of any


def active() -> bool:
    """Return whether `training_iteration` is in effect."""
    return _current is not None


def add_root(root: torch.nn.Module, inputs: Any) -> None:
    """Add an outermost module to `roots` if it is new; a call of the module has just begun."""
    if root not in roots:
        roots.add(root)
        _remove_inherited_hooks(root)
        if _current is not None:
            _current.watch(root)
            _current.before(root, inputs)


def _remove_inherited_hooks(root: torch.nn.Module) -> None:
    """Remove the hooks that a copy of an outermost module has inherited from the original."""
    for hooks in (root._forward_pre_hooks, root._forward_hooks):
        for key in [key for key, hook in hooks.items() if hook in (_before, _after)]:
            del hooks[key]
            root._forward_hooks_always_called.pop(key, None)


def seed_of_the_run() -> int:
    """Return the run's seed: the lowest of all ranks, because later stages add an offset to it."""
    seeds = [torch.initial_seed()]
    if torch.distributed.is_initialized():
        seeds *= torch.distributed.get_world_size()
        torch.distributed.all_gather_object(seeds, torch.initial_seed())
    return min(seeds)


def _before(root: torch.nn.Module, inputs: Any) -> None:
    # A copy of an outermost module keeps this hook even after the iteration has ended.
    if _current is not None:
        _current.before(root, inputs)


def _after(root: torch.nn.Module, inputs: Any, output: Any) -> None:
    if _current is not None:
        _current.after(root, inputs, output)


@dataclass
class _Backward:
    """State of the backward pass of one micro-batch."""

    micro_batch: MicroBatch
    delayed: DelayedScaling | None
    running: bool = False  #: True if the backward pass has begun and not ended
    before: MicroBatch | None = None  #: clock's micro-batch before the backward pass


class ExplicitIteration:
    """Training iteration in a loop without pipeline schedules."""

    def __init__(self, number: int) -> None:
        """Begin the iteration `number`."""
        global _current
        if clock.seed is None:
            clock.seed = seed_of_the_run()
        self._number = number
        #: number of calls of each outermost module
        self._calls: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()
        #: micro-batch of the clock before each call that has not ended, outermost call first
        self._before: list[MicroBatch | None] = []
        self._handles: list[Any] = []
        self._collected: dict[int, set[Any]] = {}  #: layers that were collected, by micro-batch
        self._layers: dict[ModuleIdentity, Identified] = {}  #: layers that train, by name
        clock.micro_batch, clock.between_passes = MicroBatch(number, 0), True
        _current = self
        for root in roots:
            self.watch(root)

    def end(self) -> None:
        """End the iteration."""
        global _current
        _current = None
        for handle in self._handles:
            handle.remove()
        clock.micro_batch, clock.recomputing, clock.between_passes = None, False, False

    def watch(self, root: torch.nn.Module) -> None:
        """Let the calls of an outermost module update the clock until the iteration ends."""
        self._handles += [
            root.register_forward_pre_hook(_before),
            root.register_forward_hook(_after, always_call=True),
        ]

    def before(self, root: torch.nn.Module, inputs: Any) -> None:
        """Set the clock to the micro-batch that begins; an evaluation has none."""
        inner = clock.scheduled or bool(self._before)
        # A call during a backward pass recomputes the forward pass, possibly of the whole model.
        inner = inner or torch._C._current_graph_task_id() != -1
        if not inner:
            clock.between_passes = False
        self._before.append(clock.micro_batch)
        if inner:
            return
        if not torch.is_grad_enabled():
            clock.micro_batch = None
            return
        index = self._calls.get(root, 0)
        if index == 0:
            self._check_names(root)
        self._calls[root] = index + 1
        collected = self._collected.setdefault(index, set())
        clock.micro_batch = MicroBatch(self._number, index, collected=collected)
        clock.recomputing = False
        if (delayed := delayed_scaling.of_chunk(root)) is not None:
            delayed.begin_forward(index)

    def _check_names(self, root: torch.nn.Module) -> None:
        """Raise ValueError if this model and another collected one have layers with the same name.

        A copy keeps the names of its layers, and a model that first runs in a later iteration may
        get the names of an earlier one. Their tensors could not be told apart.
        """
        if not session.collects_now():
            return
        for layer in model_roots.layers_of(root):
            if layer.identity and self._layers.setdefault(layer.identity, layer) is not layer:
                raise ValueError(
                    f"two models that train in iteration {self._number}, such as a model and its "
                    f"copy, have a layer {layer.identity.name}, so that their tensors cannot be "
                    "told apart; build each of them by its constructor, and pass both to "
                    "megatron.core.tensor_saver.configure(model=[...])"
                )

    def after(self, root: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Prepare for the backward pass of the micro-batch whose forward pass has ended."""
        if not self._before:  # another hook has refused the call
            return
        before = self._before.pop()
        if self._before or clock.scheduled or torch._C._current_graph_task_id() != -1:
            return
        if (micro_batch := clock.micro_batch) is None:
            clock.micro_batch, clock.between_passes = before, True
            return
        clock.between_passes = True
        delayed = delayed_scaling.of_chunk(root)
        if delayed is not None:
            delayed.end_forward()
        state = _Backward(micro_batch, delayed)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(_begin_backward, state))


def _begin_backward(state: _Backward, _: torch.Tensor) -> None:
    """Set the clock to the micro-batch whose backward pass begins."""
    before = clock.micro_batch
    clock.micro_batch, clock.recomputing = state.micro_batch, True
    if not state.running:
        state.running, state.before = True, before
        torch.autograd.Variable._execution_engine.queue_callback(  # type: ignore[attr-defined]
            partial(_end_backward, state)
        )


def _end_backward(state: _Backward) -> None:
    """Restore the clock after a backward pass, and update the amax histories."""
    state.running = False
    clock.micro_batch, clock.recomputing = state.before, False
    if state.delayed is not None:
        state.delayed.end_backward(state.micro_batch.index)
        state.delayed = None  # another backward pass through this output adds nothing


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
