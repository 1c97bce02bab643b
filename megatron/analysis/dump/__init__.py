"""Read a dump (a folder of saved tensors), and join tensors whose shards lie in several files."""
