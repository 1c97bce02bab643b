import torch


class Float8Tensor(torch.Tensor):
    """A class for megatron-core to import."""
