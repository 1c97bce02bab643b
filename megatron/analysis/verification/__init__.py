"""Verify a dump: check its files and completeness, and recompute its matmuls."""
