"""Verify a dump: its files, its completeness, and its matmuls, recomputed from their operands."""
