"""Fused quantization kernels for CPUs and GPUs; `dispatch.py` chooses one for a tensor."""
