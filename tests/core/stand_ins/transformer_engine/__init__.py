"""A stand-in for Transformer Engine, which needs CUDA.

Its modules have the constructors and return values of Transformer Engine 1.11, as far as
megatron-core uses them, and compute on a CPU. As in a real FP8 kernel, the operands of a matmul are
rounded within the module.
"""

from transformer_engine import common, pytorch

__version__ = "1.11.0"
__all__ = ["common", "pytorch"]
