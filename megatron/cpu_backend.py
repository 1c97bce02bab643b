"""Let megatron-core 0.16.1 run where there is no CUDA device: CPU tensors, gloo, no other change.

megatron-core names `torch.cuda` everywhere: as its device, for streams and random states, and in
`device="cuda"`. `activate()` gives each of those names a meaning on the CPU, the way an out-of-tree
accelerator does: the current device is the CPU, its one stream is the program's own order, its
random generator is torch's default one. `NAMES` lists every name that is replaced, with the reason;
what works without CUDA as it is (memory figures, `empty_cache`) is left alone, and so is everything
where CUDA is available.

What it gives up. The names stay replaced until the process ends, so a program that wants to ask "is
there a GPU?" must ask `torch.cuda.is_available()`. `Tensor.type()` of a CPU tensor says
`torch.cuda.FloatTensor`, because the wheel's optimizers accept nothing else. Times between events
are 0.0: nothing here measures a device.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.cuda.random

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
DYNAMO = "TORCHDYNAMO_DISABLE"  #: the wheel's fused functions go through torch.compile, which
#: takes longer to start on a CPU than a small model takes to train; set it to 0 to compile anyway
SEED_TRACKER = "megatron.core.tensor_parallel.random"  #: warns whenever a seeded region draws from
#: the CPU's generator; here that generator is the device's, so that it would warn once a layer
_tensor_type = torch.Tensor.type
_active = False


class _Stream:
    """The only stream of a CPU: work is done when the call returns, so that waiting is a no-op."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs): ...
    def wait_stream(self, *args): ...
    def wait_event(self, *args): ...
    def synchronize(self): ...
    def record_event(self, *args):
        return _Event()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


class _Event:
    """A point in that stream: always reached."""

    def __init__(self, *args, **kwargs): ...
    def record(self, *args): ...
    def wait(self, *args): ...
    def synchronize(self): ...
    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class _Generators:
    """Stands for the tuple of a generator a device; asked for with whatever `current_device`
    returned.
    """

    def __getitem__(self, index):
        return torch.default_generator


def _returning(value: Any) -> Callable:
    """A new function at each call: torch._dynamo refuses one object under two torch names."""
    return lambda *args, **kwargs: value


def _type(self, dtype=None, *args, **kwargs):
    if dtype is None:
        return _tensor_type(self).replace("torch.", "torch.cuda.")
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return _tensor_type(self, dtype, *args, **kwargs)


def _on_cpu(factory: Callable) -> Callable:
    def wrapped(*args, **kwargs):
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)  # for faster copies to a device that is not there
        return factory(*args, **kwargs)

    return wrapped


@dataclass(frozen=True)
class Name:
    """One name under `torch` that is replaced, by what, and why megatron-core needs it."""

    path: str
    value: Any
    reason: str


def _names() -> list[Name]:
    get_rng, set_rng = torch.get_rng_state, torch.set_rng_state
    device = [
        Name("cuda.current_device", lambda: CPU, "given as `device=` to every buffer"),
        Name("cuda.synchronize", _returning(None), "timers and p2p; a CPU call has finished"),
        Name("Tensor.cuda", lambda self, *a, **k: self, "batches, buckets and scales are moved"),
        Name("nn.Module.cuda", lambda self, *a, **k: self, "models are moved after they are built"),
        Name("Tensor.type", _type, "optimizers compare it with 'torch.cuda.*Tensor'"),
    ]
    tensors = [
        Name(f"cuda.{kind}", getattr(torch, kind), "optimizers compare types with it")
        for kind in ("FloatTensor", "HalfTensor", "BFloat16Tensor")
    ]
    factories = [
        Name(name, _on_cpu(getattr(torch, name)), 'called with a literal device="cuda", or pinned')
        for name in ("tensor", "zeros", "ones", "empty")
    ]
    streams = [
        Name("cuda.Stream", _Stream, "overlap of communication"),
        Name("cuda.Event", _Event, "overlap of communication"),
        Name("cuda.stream", lambda s: contextlib.nullcontext(), "gradient buckets"),
        Name("cuda.current_stream", lambda *a: _Stream(), "gradient buckets, experts"),
        Name("cuda.default_stream", lambda *a: _Stream(), "gradient buckets"),
    ]
    random = [
        Name(
            "cuda.manual_seed",
            lambda seed: torch.default_generator.manual_seed(int(seed)),
            "seeds of the tensor-parallel regions",
        ),
        Name("cuda.manual_seed_all", _returning(None), "torch.manual_seed would queue it forever"),
        *(
            Name(f"{module}.get_rng_state", lambda device=None, **k: get_rng(), reason)
            for module, reason in _RNG_MODULES
        ),
        *(
            Name(f"{module}.set_rng_state", lambda state, device=None, **k: set_rng(state), reason)
            for module, reason in _RNG_MODULES
        ),
        Name("cuda._lazy_call", lambda call, **k: call(), "the seed tracker queues its work in it"),
        Name("cuda.default_generators", _Generators(), "the seed tracker, indexed by device"),
    ]
    return device + tensors + factories + streams + random


_RNG_MODULES = (
    ("cuda", "the seed tracker forks the state; recomputation restores it"),
    ("cuda.random", "the same functions under their second name"),
)
NAMES: tuple[Name, ...] = tuple(_names())  #: every name that `activate` replaces


def _is_no_shared_generator_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in str(record.msg)


def activate() -> bool:
    """Point the torch names that megatron-core uses at the CPU. True if this call did it.

    Call it before anything of megatron-core is imported: its fused functions are compiled (or not)
    at import.

    Raises:
        RuntimeError: megatron-core was imported before and holds torch's own names; or CUDA is
            available, and a process that mixed both would silently compute on the wrong device.
    """
    global _active
    if _active:
        return False
    if torch.cuda.is_available():
        raise RuntimeError(
            "the CPU backend replaces torch.cuda, but a CUDA device is available here; "
            "set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    if SEED_TRACKER in sys.modules:
        raise RuntimeError(
            f"{SEED_TRACKER} was imported before the CPU backend was activated and holds torch's "
            "own names: every tensor-parallel rank would start from the same weights; import "
            "megatron.cpu_backend and call activate() first"
        )
    for name in NAMES:
        *parents, leaf = name.path.split(".")
        owner = torch
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, leaf, name.value)
    logging.getLogger(SEED_TRACKER).addFilter(_is_no_shared_generator_warning)
    os.environ.setdefault(DYNAMO, "1")
    if "torch._dynamo" in sys.modules:  # too late for the variable
        sys.modules["torch._dynamo"].config.disable = os.environ[DYNAMO] == "1"
    _active = True
    logger.info("no CUDA device: megatron-core runs on the CPU (%d torch names)", len(NAMES))
    return True


def is_active() -> bool:
    """Whether `activate` has replaced the names in this process."""
    return _active
