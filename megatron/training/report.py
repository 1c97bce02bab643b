"""Lines on stdout. Several ranks share one stdout: each line is one write, so that none is cut by
another's.
"""

import sys
from datetime import datetime

import torch.distributed as dist

RULE = "-" * 100


def _write(message: str) -> None:
    sys.stdout.write(message + "\n")
    sys.stdout.flush()


def print_rank_0(message: str) -> None:
    """Print from the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        _write(message)


def is_last_rank() -> bool:
    """Whether this is the rank that knows the loss and prints it."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def print_rank_last(message: str) -> None:
    """Print from the last rank, which is in the last pipeline stage."""
    if is_last_rank():
        _write(message)


def stamp() -> str:
    """The time as Megatron-LM's log lines have it."""
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
