"""Collection of the tensors that enter and leave every matmul, from the selection to the disk.

It needs torch, the record (`megatron.tensor_record`) and the formats, and nothing of megatron-core.
Start reading with `collector.py`, which decides for one rank what is collected and hands it to
`background_writer.py`."""
