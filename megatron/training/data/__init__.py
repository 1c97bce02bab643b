"""Data sets, tokenizers, and the batches that are made of them."""
