"""What the router and the token dispatchers share, also without Transformer Engine and on a CPU.

Overlaid because the router asks whether `te_general_gemm` is None, a name that the wheel defines
only where Transformer Engine is installed; and because the all-to-all dispatcher takes the sizes of
what it exchanges from `maybe_move_tensor_to_cpu`, which makes them the numbers that torch demands
only if they come from a GPU. Seam: these two names.
"""

import torch

from megatron.core._overlay import shadowed

_upstream = shadowed(__name__)

if not hasattr(_upstream, "te_general_gemm"):
    _upstream.te_general_gemm = te_general_gemm = None


def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
    """See the wheel's; `as_numpy` also holds for a tensor that is on the CPU already."""
    moved = _upstream.maybe_move_tensor_to_cpu(tensor, as_numpy, record_stream)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved
