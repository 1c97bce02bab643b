"""Make the router and the token dispatchers work without Transformer Engine and on a CPU.

The file is overlaid because the router checks whether `te_general_gemm` is None, but up to
megatron-core 0.16 this name exists only if Transformer Engine is installed. The all-to-all
dispatcher also takes the
sizes of its messages from `maybe_move_tensor_to_cpu`, which converts them to the numbers that torch
requires only if they come from a GPU. The seam is these two names.
"""

import torch

from megatron.core._overlay import shadowed

_upstream = shadowed(__name__)

if not hasattr(_upstream, "te_general_gemm"):
    _upstream.te_general_gemm = te_general_gemm = None


def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
    """Move a tensor to the CPU, and convert it to NumPy if `as_numpy` is True.

    The wheel's version ignores `as_numpy` for a tensor that is already on the CPU.
    """
    moved = _upstream.maybe_move_tensor_to_cpu(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved
