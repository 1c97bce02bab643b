"""Fused quantization kernels for CPUs and GPUs; `dispatch.py` chooses the kernel."""
