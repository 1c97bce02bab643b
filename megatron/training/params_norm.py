"""The norm of all parameters, for the log line."""

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.training import device


def params_norm(model: list[torch.nn.Module]) -> float:
    """L2 norm over all ranks' parameters, each counted once. Collective."""
    dense, experts = (torch.zeros(1, dtype=torch.float64, device=device.current()) for _ in "de")
    for chunk in model:
        for parameter in chunk.parameters():
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter):
                total = dense if getattr(parameter, "allreduce", True) else experts
                total += parameter.detach().double().square().sum()
    dist.all_reduce(dense, group=parallel_state.get_model_parallel_group())
    dist.all_reduce(experts, group=parallel_state.get_expert_tensor_model_pipeline_parallel_group())
    return (dense + experts).sqrt().item()
