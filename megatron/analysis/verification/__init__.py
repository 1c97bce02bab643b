"""Checks of a dump: files, completeness, and matmuls computed again from their operands."""
