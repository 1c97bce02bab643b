"""Fix three communication functions: one returns a wrong sum, and the others fail with gloo.

The file is overlaid because of these three functions, which the wheel's autograd functions call in
the forward and the backward pass. The seam is their names. `_reduce` sums a copy of a
non-contiguous tensor but returns the tensor itself, unsummed; MLA's gradients are such tensors.
(Since megatron-core 0.19 it returns the sum.)
`_gather_along_first_dim` gathers parts of unequal size, which NCCL accepts and gloo does not. Such
parts occur with both expert and tensor parallelism, because the ranks of an expert's
tensor-parallel group hold different numbers of tokens. `_reduce_scatter_along_first_dim` sums such
parts in the backward pass, which gloo cannot do in torch 2.6. In every other case the wheel's code
runs.
"""

import torch

from megatron.core._overlay import shadowed

_upstream = shadowed(__name__)
_wheels_reduce = _upstream._reduce
_wheels_gather = _upstream._gather_along_first_dim
_wheels_reduce_scatter = _upstream._reduce_scatter_along_first_dim


def _reduce(input_, group):
    """Return the sum of `input_` over `group`, for any memory layout of `input_`."""
    return _wheels_reduce(input_.contiguous(), group)


def _gather_along_first_dim(input_, group, output_split_sizes=None, use_global_buffer=False):
    """Gather all ranks' parts along the first axis; with gloo, pad parts of unequal size."""
    sizes = output_split_sizes
    if sizes is None or len(set(sizes)) == 1 or not _is_gloo(group):
        return _wheels_gather(input_, group, output_split_sizes, use_global_buffer)
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    parts = _wheels_gather(padded, group).split(max(sizes))
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _reduce_scatter_along_first_dim(input_, group, input_split_sizes=None, use_global_buffer=False):
    """Return this rank's part of the sum over `group`; the parts may have unequal sizes."""
    try:
        return _wheels_reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
    except RuntimeError as error:  # raised on all ranks before any of them communicates
        if input_split_sizes is None or "does not support reduce_scatter" not in str(error):
            raise
    whole = _wheels_reduce(input_.clone(memory_format=torch.contiguous_format), group)
    return whole.split(input_split_sizes)[torch.distributed.get_rank(group)].clone()


def _is_gloo(group) -> bool:
    return torch.distributed.get_backend(group) == "gloo"


_upstream._reduce = _reduce
_upstream._gather_along_first_dim = _gather_along_first_dim
_upstream._reduce_scatter_along_first_dim = _reduce_scatter_along_first_dim
