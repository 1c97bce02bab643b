"""The optimizer's state out of a checkpoint.

Three repairs of megatron-core's distributed optimizer where it runs on torch's own Adam (with
Transformer Engine's or apex's none is needed; the wheel's code was written for those), and the
command line's numbers in place of the checkpoint's.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    yield from getattr(optimizer, "chained_optimizers", [optimizer])


def allocate(optimizer: MegatronOptimizer) -> None:
    """Make the state that a checkpoint is to be read into.

    The wheel reads the step count off the existing state before it allocates any.
    """
    for part in _parts(optimizer):
        if isinstance(part, DistributedOptimizer) and not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()
            _keep_step(part)


def _keep_step(part: DistributedOptimizer) -> None:
    """Let the wheel, which copies every entry of a parameter's state, find the step where it looks.

    The checkpoint has the step once and not with each parameter; it is set from there afterwards.
    """
    assign = part._set_main_param_and_optimizer_states

    def assign_with_step(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, position = part.model_param_group_index_map[model_param]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][position]]
        assign(model_param, {k: state[k] for k in ("step",) if k in state} | tensors)

    part._set_main_param_and_optimizer_states = assign_with_step


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give each parameter a step count of its own after loading.

    The wheel hands all of them one tensor, which torch's Adam would advance once a parameter
    instead of once an iteration.
    """
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


#: What a group of parameters has from the command line; the learning rate and the weight decay of
#: an iteration are the scheduler's.
_NUMBERS = ("max_lr", "min_lr", "lr_mult", "wd_mult", "betas", "eps", "momentum")
NUMERIC = (*_NUMBERS, "lr", "weight_decay")  #: all numeric settings of a parameter group


def numbers(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """What the command line says for each group of parameters."""
    return [{k: group[k] for k in _NUMBERS if k in group} for group in optimizer.param_groups]


def set_numbers(optimizer: MegatronOptimizer, found: list[dict[str, Any]]) -> None:
    """Put back what loading has replaced by the checkpoint's: it keeps the order of the groups."""
    for group, values in zip(optimizer.param_groups, found, strict=True):
        group.update(values)
