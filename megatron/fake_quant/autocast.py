"""Switch off autocast, which would round float32 operands of a matmul."""

import contextlib
from typing import Any

import torch


def no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which autocast is off for devices of the type `device`."""
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()
