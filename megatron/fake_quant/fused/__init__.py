"""Fused quantization kernels; `dispatch.py` chooses one for a tensor."""
