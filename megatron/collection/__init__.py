"""Collect the tensors that enter and leave every matmul, from the selection to the disk.

The package needs torch, the record (`megatron.tensor_record`) and the formats, but not
megatron-core. Start reading with `collector.py`, which decides for one rank what is collected and
passes it to `background_writer.py`.
"""
