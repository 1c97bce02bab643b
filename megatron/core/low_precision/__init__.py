"""Quantize megatron-core's local layers, and check to which matmuls a format applies."""
