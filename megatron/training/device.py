"""The device that this process computes on: the current CUDA device, or the CPU if there is none.

This module must be imported before any module of megatron-core; see `megatron.cpu_backend`.
"""

import os
import warnings

import torch

from megatron import cpu_backend

#: warnings of megatron-core about a missing Transformer Engine or apex, which are not needed here,
#: and warnings of megatron-core and torch about defaults of megatron-core
_NOISE = (
    r".*(Apex (is|are) not installed|full scope is deprecated|use DTensor instead|"
    r"`(load_state_dict|torch.distributed.\w+)` is deprecated).*"
)


def prepare() -> None:
    """Choose the device, and make megatron-core run on the CPU if there is no CUDA device."""
    warnings.filterwarnings("ignore", message=_NOISE)
    # megatron-core relies on the launch order to overlap tensor-parallel messages with GEMMs.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not torch.cuda.is_available():
        cpu_backend.activate()


def current() -> torch.device:
    """Return the device of this process's tensors."""
    if cpu_backend.is_active():
        return cpu_backend.CPU
    return torch.device("cuda", torch.cuda.current_device())


def describe() -> str:
    """Return a description of the device for the log."""
    if not cpu_backend.is_active():
        return torch.cuda.get_device_name()
    return (
        f"CPU, {torch.get_num_threads()} thread(s) per rank; no CUDA device was found, so that "
        "megatron.cpu_backend answers megatron-core's torch.cuda calls and torch.compile is off"
    )
