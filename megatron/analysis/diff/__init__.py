"""Compare the tensors of two runs: pair their records, measure differences, and report them."""
