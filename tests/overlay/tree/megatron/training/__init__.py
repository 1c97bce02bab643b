"""Trainer of another source tree, in the place of this project's `megatron.training`."""

from .global_vars import get_args
from .training import initialize, train

__all__ = ["get_args", "initialize", "train"]
