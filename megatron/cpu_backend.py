"""Let megatron-core 0.16.1, which calls torch.cuda everywhere, run with CPU tensors and gloo.

A prototype: `activate()` points the torch.cuda names that megatron-core uses at the CPU. Same idea as the device plug-ins of
other accelerators. The product's version should list each name with its reason, refuse to run where CUDA is available,
and be covered by tests.
"""

import contextlib

import torch
import torch.cuda.random

CPU = torch.device("cpu")


class _Stream:
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
    def __init__(self, *args, **kwargs): ...
    def record(self, *args): ...
    def wait(self, *args): ...
    def synchronize(self): ...
    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class _Generators:
    def __getitem__(self, index):  # indexed by a device here, by an int on CUDA
        return torch.default_generator


def _on_cpu(factory):
    def wrapped(*args, **kwargs):
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return wrapped


def _type(self, dtype=None, *args, **kwargs):
    """Tensor.type(): optimizers compare it with 'torch.cuda.*Tensor'."""
    if dtype is None:
        return _tensor_type(self).replace("torch.", "torch.cuda.")
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return _tensor_type(self, dtype, *args, **kwargs)


_tensor_type = torch.Tensor.type


def _returning(value):
    """A new function at each call: torch._dynamo refuses one object under two torch names."""
    return lambda *args, **kwargs: value


def activate() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.current_stream = lambda *args: _Stream()
    cuda.default_stream = lambda *args: _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.get_device_capability = lambda *args: (0, 0)
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "manual_seed_all",
    ):
        setattr(cuda, name, _returning(None))
    for name in (
        "memory_allocated",
        "max_memory_allocated",
        "memory_reserved",
        "max_memory_reserved",
    ):
        setattr(cuda, name, _returning(0))
    cuda.nvtx.range_push = _returning(None)
    cuda.nvtx.range_pop = _returning(None)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    for module in (cuda, torch.cuda.random):  # cuda re-exports both
        module.get_rng_state = lambda device=None, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None, **kwargs: torch.set_rng_state(state)
    cuda._lazy_call = lambda callback, **kwargs: callback()
    cuda.default_generators = _Generators()
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor", "LongTensor"):
        setattr(cuda, name, getattr(torch, name))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.type = _type
    for name in (
        "tensor",
        "zeros",
        "ones",
        "empty",
        "full",
        "rand",
        "randn",
        "arange",
        "zeros_like",
        "ones_like",
        "empty_like",
    ):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
