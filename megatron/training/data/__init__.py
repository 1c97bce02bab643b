"""Data sets, tokenizers, and the batches that training reads from them."""
