"""Select the inputs and outputs of matmuls, copy them to the host and write them to files.

The package depends on torch, `megatron.tensor_record` and the quantization formats, but not on
megatron-core. Start reading with `collector.py`, which decides what one rank collects and passes
the tensors to `background_writer.py`.
"""
