"""Read a dump: its files, their metadata, and tensors reassembled from their shards."""
