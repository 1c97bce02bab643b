"""Names of the two groups of tensors by which formats are judged; imports nothing.

The operands are the tensors that a format rounds. The results leave a matmul and are never
quantized, but they show what the rounding of the operands did.
"""

OPERANDS, RESULTS = "operands", "results"
JUDGED = (OPERANDS, RESULTS)  #: values of `--judge`; the first is the default
