"""Define the names of the two groups of tensors on which formats can be evaluated.

The operands are the tensors that a format rounds. The results of a matmul are never quantized, but
they show the effect of rounding the operands. This module imports nothing.
"""

OPERANDS, RESULTS = "operands", "results"
JUDGED = (OPERANDS, RESULTS)  #: choices of `--judge`; the first is the default
