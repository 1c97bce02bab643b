"""Selection of the device: the current CUDA device, or the CPU if there is no CUDA device.

`prepare` must be called before any module of megatron-core is imported; see
`megatron.cpu_backend`.
"""

import logging
import os
import warnings

import torch

from megatron import cpu_backend

#: pattern of the warnings to suppress. They concern Apex, which is not needed here, and parts of
#: megatron-core that the user cannot change: its use of deprecated functions and options, the
#: import of a model class in its optimizer, and the calls with which it reads a checkpoint
_NOISE = (
    r".*(Apex (is|are) not installed|full scope is deprecated|use DTensor instead|"
    r"MimoModelConfig is experimental|If you are using transformer_engine|"
    r"using the device under current context|argument order of load has been changed|"
    r"assuming the intent is to load in a single process|"
    r"`(load_state_dict|torch.distributed.\w+)` is deprecated).*"
)


#: Messages of megatron-core 0.17 and later to suppress, by logger. They recommend alternatives that
#: a user of this program cannot choose: a model class, a library for asynchronous saves, a layout
#: of the gradients, and a name of a function.
_NOTICES = {
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_",
    "megatron.core.models.gpt._upstream_gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.dist_checkpointing.serialization": "megatron.core.dist_checkpointing.serial",
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
}


def _is_no_notice(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(tuple(_NOTICES.values()))


def prepare() -> None:
    """Set up this process for CUDA, or activate the CPU backend if CUDA is unavailable."""
    warnings.filterwarnings("ignore", message=_NOISE)
    for name in _NOTICES:
        logging.getLogger(name).addFilter(_is_no_notice)
    # megatron-core overlaps tensor-parallel communication with GEMMs. For this, kernels must run in
    # the order in which they were launched.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not torch.cuda.is_available():
        cpu_backend.activate()


def current() -> torch.device:
    """Return the device on which this process creates its tensors."""
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
