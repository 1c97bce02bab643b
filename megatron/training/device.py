"""Which device this process computes on. Imported before anything of megatron-core; see
`megatron.cpu_backend`.
"""

import os
import warnings

import torch

from megatron import cpu_backend

#: What the wheel says once a module where Transformer Engine or apex are missing, which nothing
#: here needs, and what it and torch say of a default of its own.
_NOISE = (
    r".*(Apex (is|are) not installed|full scope is deprecated|use DTensor instead|"
    r"`(load_state_dict|torch.distributed.\w+)` is deprecated).*"
)


def prepare() -> None:
    """Choose the device; without CUDA, let megatron-core run on the CPU."""
    warnings.filterwarnings("ignore", message=_NOISE)
    # megatron-core overlaps tensor-parallel messages with GEMMs by the order of their launches.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not torch.cuda.is_available():
        cpu_backend.activate()


def current() -> torch.device:
    """The device of this process's tensors."""
    if cpu_backend.is_active():
        return cpu_backend.CPU
    return torch.device("cuda", torch.cuda.current_device())


def describe() -> str:
    """One phrase for the log."""
    if not cpu_backend.is_active():
        return torch.cuda.get_device_name()
    return (
        f"CPU, {torch.get_num_threads()} thread(s) a rank; no CUDA device was found, so that "
        "megatron.cpu_backend answers megatron-core's torch.cuda calls and torch.compile is off"
    )
