"""Make checkpoints of the optimizer state load correctly with torch's Adam and SGD.

megatron-core's distributed optimizer was written for the Adam implementations of Transformer Engine
and Apex. With Adam from torch, it needs the three corrections in this module. megatron-core cannot
load the state of SGD at all without a function of this module. The module also restores the command
line's hyperparameters, which loading replaces.
"""

from collections.abc import Iterator
from typing import Any

import torch

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer


def _parts(optimizer: MegatronOptimizer) -> Iterator[MegatronOptimizer]:
    yield from getattr(optimizer, "chained_optimizers", [optimizer])


def allocate(optimizer: MegatronOptimizer) -> None:
    """Allocate the optimizer state into which a checkpoint is loaded.

    This is needed because megatron-core reads the step count before it allocates the state, and
    because it has no function that allocates the state of SGD.
    """
    for part in _parts(optimizer):
        if part.init_state_fn is None:
            part.init_state_fn = _allocate_momentum
        if isinstance(part, DistributedOptimizer) and not part.optimizer.state:
            part._init_optimizer_states_with_dummy_values()
            _keep_step(part)


def complete(optimizer: MegatronOptimizer) -> None:
    """Allocate missing state of torch's optimizers before a checkpoint is saved.

    An optimizer has no state before its first step. With fp16, the first step occurs once the loss
    scale is small enough. megatron-core cannot load a checkpoint without the state.
    """
    for part in _parts(optimizer):
        inner = part.optimizer
        if inner is None or inner.state:
            continue
        if isinstance(inner, torch.optim.SGD):
            _allocate_momentum(inner)
        elif isinstance(inner, (torch.optim.Adam, torch.optim.AdamW)):
            for parameter in (p for group in inner.param_groups for p in group["params"]):
                zeros = {k: torch.zeros_like(parameter) for k in ("exp_avg", "exp_avg_sq")}
                inner.state[parameter] = {"step": torch.tensor(0.0), **zeros}


def _allocate_momentum(optimizer: torch.optim.Optimizer, config: Any = None) -> None:
    """Allocate the state of torch's SGD, which has no state without momentum."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _keep_step(part: DistributedOptimizer) -> None:
    """Patch `part` so that loading a parameter's tensors keeps the parameter's step count.

    megatron-core expects each parameter's state to be complete, but a checkpoint stores the step
    count only once. The loaded step count is set later.
    """
    assign = part._set_main_param_and_optimizer_states

    def assign_with_step(model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
        group, position = part.model_param_group_index_map[model_param]
        state = part.optimizer.state[part.optimizer.param_groups[group]["params"][position]]
        assign(model_param, {k: state[k] for k in ("step",) if k in state} | tensors)

    part._set_main_param_and_optimizer_states = assign_with_step


def separate_steps(optimizer: MegatronOptimizer) -> None:
    """Replace the shared step count with a separate copy for each parameter, after loading.

    megatron-core assigns the same tensor to all parameters. In each iteration, torch's Adam would
    then increment this tensor once per parameter instead of once.
    """
    for part in _parts(optimizer):
        for state in part.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()


#: settings by which every release of megatron-core tells the parameter groups of a checkpoint apart
_KIND = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
#: further settings by which megatron-core 0.19 and later tell the groups apart
_SCHEDULE = ("max_lr", "min_lr", "start_wd", "end_wd")


def match_groups(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Copy the schedule of each parameter group from a checkpoint, before the state is loaded.

    If, for example, the learning rate differed, megatron-core 0.19 and later would not find the
    group in the checkpoint. Loading replaces these settings in any case, and `set_numbers` restores
    them.

    Args:
        optimizer: the optimizer of this run.
        state: the optimizer's state in the checkpoint, as `optimizer.load_state_dict` takes it.
    """
    for part, part_state in _states(optimizer, state):
        saved_groups = part_state["param_groups"]
        for group in part.param_groups:
            same = [saved for saved in saved_groups if _kind(saved) == _kind(group)]
            if len(same) == 1:
                group.update({key: same[0][key] for key in _SCHEDULE if key in same[0]})


def add_step(optimizer: MegatronOptimizer, state: dict[Any, Any]) -> None:
    """Add a step count of zero to a checkpoint's state without one, before the state is loaded.

    megatron-core does not store a count of zero, and torch's Adam needs one.
    """
    for part, part_state in _states(optimizer, state):
        adam = isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))
        if adam and not isinstance(part, DistributedOptimizer) and part_state["state"]:
            part_state["state"].setdefault("common_step", torch.tensor(0.0))


def _states(
    optimizer: MegatronOptimizer, state: dict[Any, Any]
) -> Iterator[tuple[MegatronOptimizer, dict[Any, Any]]]:
    """Yield each part of an optimizer with the part's state, as torch's optimizer stores it."""
    parts = list(_parts(optimizer))
    states = [state] if len(parts) == 1 else [state[key] for key in sorted(state)]
    for part, part_state in zip(parts, states, strict=True):
        yield part, part_state.get("optimizer", part_state)


def _kind(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(key) for key in _KIND)


#: names of the numeric settings of a parameter group that are set from the command line; the
#: scheduler sets the learning rate and the weight decay in each iteration
_NUMBERS = ("max_lr", "min_lr", "lr_mult", "wd_mult", "betas", "eps", "momentum")
NUMERIC = (*_NUMBERS, "lr", "weight_decay")  #: all numeric settings of a parameter group


def numbers(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Return, for each parameter group, the numeric settings that come from the command line."""
    return [{k: group[k] for k in _NUMBERS if k in group} for group in optimizer.param_groups]


def set_numbers(optimizer: MegatronOptimizer, settings: list[dict[str, Any]]) -> None:
    """Restore the settings that `numbers` returned, after loading a checkpoint has replaced them.

    Loading does not change the order of the groups.
    """
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(values)
