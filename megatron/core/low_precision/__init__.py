"""Quantize the overlay's layers, and check which matmuls a format or a recipe applies to."""
