"""Trainer of another source tree, which replaces this project's `megatron.training`."""

from .global_vars import get_args
from .training import initialize, train

__all__ = ["get_args", "initialize", "train"]
