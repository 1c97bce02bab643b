import torch


class Float8Tensor(torch.Tensor):
    """The name that megatron-core imports."""
