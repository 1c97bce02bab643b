"""Select the inputs and outputs of matmuls, copy them to the host and write them to files.

The package depends on torch, `megatron.tensor_record` and the quantization formats, but not on
megatron-core. Start reading with `collector.py`, which decides what one rank collects and passes
the tensors to `background_writer.py`.

Terms: a record is one collected tensor, that is, its file and metadata. Each rank has an index, a
file with one line per record. A line for anything else, such as a limit that was reached, is an
event. The run card is a JSON file that describes the run. The ring buffer keeps the last iterations
in memory and writes them to disk only after an event in training, such as a loss spike.
"""
