"""Collect the inputs and outputs of every matmul, from their selection to the files on disk.

The package depends on torch, `megatron.tensor_record` and the quantization formats, but not on
megatron-core. Start reading with `collector.py`, which decides what one rank collects and passes
the tensors to `background_writer.py`.
"""
