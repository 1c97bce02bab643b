"""Reading of a dump: its files, their metadata, and tensors assembled from their shards."""
