"""Checkpoints: writing, finding, checking and reading them."""
