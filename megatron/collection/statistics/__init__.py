"""Measure statistics of every matmul operand during training, without saving the tensors.

With `--tensor-statistics EVERY`, each rank measures the operands of the first micro-batch in every
EVERY-th iteration and writes one row per operand to Parquet files. `measure.py` computes the
statistics, `history.py` collects the rows, and `parquet_files.py` writes them.
"""
