"""Read and switch off autocast, which would round float32 operands of a matmul."""

import contextlib
from typing import Any

import torch


def autocast_of(device: str) -> tuple[bool, torch.dtype] | None:
    """Return autocast's state and dtype on a device type, or None if the type has no autocast."""
    try:  # torch.compile in torch 2.11 cannot trace torch.amp.is_autocast_available
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    except RuntimeError:
        return None


def no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast is off for devices of the type `device`."""
    state = autocast_of(device)
    if state is not None and state[0]:
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
