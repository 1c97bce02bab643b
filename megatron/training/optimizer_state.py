"""Three repairs of megatron-core's distributed optimizer where it runs on torch's own Adam.

With Transformer Engine's or apex's Adam none is needed; the wheel's code was written for those.
"""

from collections.abc import Iterator

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
