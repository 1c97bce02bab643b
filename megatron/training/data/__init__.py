"""Data sets, tokenizers and training batches."""
