"""Prepare the optimizer for its state in a checkpoint, and correct that state after loading.

megatron-core's distributed optimizer was written for the Adam of Transformer Engine and apex. With
torch's own Adam it needs the three corrections here. This module also restores hyperparameters from
the command line that loading has replaced.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    yield from getattr(optimizer, "chained_optimizers", [optimizer])


def allocate(optimizer: MegatronOptimizer) -> None:
    """Allocate the state that a checkpoint is loaded into.

    The wheel reads the step count from the existing state before it allocates any.
    """
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer) and not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()
            _keep_step(part)


def _keep_step(part: DistributedOptimizer) -> None:
    """Add the step to each parameter's loaded tensors: the wheel expects every entry of the state.

    The checkpoint stores the step once instead of per parameter, and it is set from there later.
    """
    assign = part._set_main_param_and_optimizer_states

    def assign_with_step(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, position = part.model_param_group_index_map[model_param]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][position]]
        assign(model_param, {k: state[k] for k in ("step",) if k in state} | tensors)

    part._set_main_param_and_optimizer_states = assign_with_step


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give each parameter a step count of its own after loading.

    The wheel gives all of them the same tensor, which torch's Adam would advance once per parameter
    instead of once per iteration.
    """
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


#: Settings of a parameter group that come from the command line. The scheduler sets the learning
#: rate and the weight decay in each iteration.
_NUMBERS = ("max_lr", "min_lr", "lr_mult", "wd_mult", "betas", "eps", "momentum")
NUMERIC = (*_NUMBERS, "lr", "weight_decay")  #: all numeric settings of a parameter group


def numbers(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Return each parameter group's settings from the command line."""
    return [{k: group[k] for k in _NUMBERS if k in group} for group in optimizer.param_groups]


def set_numbers(optimizer: MegatronOptimizer, settings: list[dict[str, Any]]) -> None:
    """Restore settings that loading has replaced; loading keeps the order of the groups."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
