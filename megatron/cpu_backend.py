"""Run megatron-core and trainers built on it without a CUDA device, on the CPU and with gloo.

megatron-core uses `torch.cuda` everywhere: for the current device, streams and random states, and
in `device="cuda"`. `activate()` replaces each of these names by a CPU implementation, as an
out-of-tree accelerator does. The current device is then the CPU, all streams run in program order,
and the random generator is torch's default one. `NAMES` lists every replaced name and the reason.
Where torch multiplies bfloat16 slowly, its kernels are replaced too; see `cpu_matmul.py`.
Functions that work without CUDA (`empty_cache`) are not replaced.

A trainer of another source tree calls more of `torch.cuda`, and many trainers refuse to start
unless `torch.cuda.is_available()`. `activate_for_scripts()` also replaces the names in
`SCRIPT_NAMES`. Code in the folders of the script then sees one CUDA device per local rank. All
other code, such as torch's own, still sees none.

Limitations: the names stay replaced until the process ends, so a program that needs to know whether
there is a GPU must call `torch.cuda.is_available()`. `Tensor.type()` of a CPU tensor returns
`torch.cuda.FloatTensor`, because megatron-core's optimizers accept nothing else. The elapsed time
between two events is always 0.0. Functions that Dynamo compiles ignore a default device such as
meta.
"""

import collections
import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.cuda.random
from torch.jit import _builtins
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _device

from megatron import cpu_matmul

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])  #: version, as in (2, 13)
#: Environment variable that disables torch.compile, which megatron-core uses for fused functions.
#: On a CPU, compiling takes longer than training a small model; set the variable to 0 to compile.
DYNAMO = "TORCHDYNAMO_DISABLE"
#: Module that warns if the CPU's random state changes while a CUDA random state is active. Without
#: CUDA, both are the same state, so the warning would appear once per layer.
SEED_TRACKER = "megatron.core.tensor_parallel.random"
_tensor_type = torch.Tensor.type
_device_context_init = _device.DeviceContext.__init__
_active = False


class _Stream:
    """Stand-in for a CUDA stream on the CPU; all work completes immediately, so nothing waits."""

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
    """Stand-in for a CUDA event on the CPU; it is always complete."""

    def __init__(self, *args, **kwargs): ...
    def record(self, *args): ...
    def wait(self, *args): ...
    def synchronize(self): ...
    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class _DeviceBlock(contextlib.nullcontext):
    """Stand-in for `torch.cuda.device`; a class, because torch also uses it in type checks."""


class _Generators:
    """Stand-in for `torch.cuda.default_generators`; any index returns the CPU's generator."""

    def __getitem__(self, index):
        return torch.default_generator


def _returning(value: Any) -> Callable:
    """Return a new function that returns `value`.

    Each replaced name needs its own function, because torch._dynamo refuses to find one object
    under two torch names.
    """
    return lambda *args, **kwargs: value


def _type(self, dtype=None, *args, **kwargs):
    if dtype is None:
        return _tensor_type(self).replace("torch.", "torch.cuda.")
    if isinstance(dtype, str):
        dtype = dtype.replace("torch.cuda.", "torch.")
    return _tensor_type(self, dtype, *args, **kwargs)


def _init_device_context(self, device) -> None:
    _device_context_init(self, _device_on_cpu(device))


def _on_cpu(factory: Callable) -> Callable:
    def wrapped(*args, **kwargs):
        if "device" in kwargs:
            kwargs["device"] = _device_on_cpu(kwargs["device"], index=True)
        kwargs.pop("pin_memory", None)  # pinning only speeds up copies to a GPU
        return factory(*args, **kwargs)

    return wrapped


@dataclass(frozen=True)
class Name:
    """A name in `torch` to replace, its new value, and why a trainer needs the new value."""

    path: str  #: dotted name without the leading `torch.`
    value: Any
    reason: str


def _names() -> list[Name]:
    get_rng, set_rng = torch.get_rng_state, torch.set_rng_state
    device = [
        Name("cuda.current_device", lambda: CPU, "given as `device=` to every buffer"),
        Name("cuda.synchronize", _returning(None), "timers and p2p; CPU calls are synchronous"),
        Name("Tensor.cuda", lambda self, *a, **k: self, "batches, buckets and scales are moved"),
        Name("nn.Module.cuda", lambda self, *a, **k: self, "models are moved after they are built"),
        Name("Tensor.type", _type, "optimizers compare it with 'torch.cuda.*Tensor'"),
        Name(
            "utils._device.DeviceContext.__init__",
            _init_device_context,
            "`with torch.device('cuda')` and torch.set_default_device('cuda') mean the CPU",
        ),
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
        Name("cuda._lazy_call", lambda call, **k: call(), "the seed tracker queues work with it"),
        Name("cuda.default_generators", _Generators(), "the seed tracker, indexed by device"),
    ]
    sent = {"all_reduce": "tensor", "reduce_scatter_tensor": "input"} if TORCH < (2, 8) else {}
    reason = "gloo computes averages only since torch 2.8"
    averages = [
        Name(f"distributed.{name}", _averaging(getattr(torch.distributed, name), argument), reason)
        for name, argument in sent.items()
    ]
    return device + tensors + factories + streams + random + averages


def _averaging(function: Callable, sent: str) -> Callable:
    """Wrap a collective so that, for averages, it divides each rank's tensor before the sum.

    Args:
        function: function of `torch.distributed`.
        sent: name of the argument with the tensor of this rank; it is divided in place.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def reduced(*args, **kwargs):
        call = signature.bind(*args, **kwargs)
        if call.arguments.get("op") == torch.distributed.ReduceOp.AVG:
            call.arguments["op"] = torch.distributed.ReduceOp.SUM
            ranks = torch.distributed.get_world_size(call.arguments.get("group"))
            call.arguments[sent].div_(ranks)
        return function(*call.args, **call.kwargs)

    return reduced


_RNG_MODULES = (
    ("cuda", "the seed tracker forks the state; recomputation restores it"),
    ("cuda.random", "the same functions under their second name"),
)
NAMES: tuple[Name, ...] = tuple(_names())  #: every name that `activate` replaces


def _device_on_cpu(value: Any, *, index: bool = False) -> Any:
    """Return the CPU if `value` is a string or `torch.device` for CUDA, and `value` otherwise.

    Args:
        value: argument of a function of torch.
        index: whether an integer also stands for the CUDA device with this index.
    """
    if index and isinstance(value, int) and not isinstance(value, bool):
        return CPU
    names_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return CPU if names_cuda else value


def _moving(function: Callable) -> Callable:
    """Wrap `function` so that the CPU replaces every argument that names a CUDA device."""
    takes_device = function.__name__ == "to"  # as its first argument after the tensor or module

    @functools.wraps(function)
    def moved(*args, **kwargs):
        return function(
            *(_device_on_cpu(x, index=takes_device and i == 1) for i, x in enumerate(args)),
            **{key: _device_on_cpu(x, index=key == "device") for key, x in kwargs.items()},
        )

    return moved


def _with_gloo(function: Callable) -> Callable:
    """Wrap a function that creates process groups, so that gloo replaces NCCL."""

    @functools.wraps(function)
    def created(*args, **kwargs):
        args = tuple("gloo" if _names_nccl(value) else value for value in args)
        if _names_nccl(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        kwargs.pop("device_id", None)  # binds the group to a GPU
        return function(*args, **kwargs)

    return created


def _names_nccl(value: Any) -> bool:
    return isinstance(value, str) and "nccl" in value.lower()


#: factory functions that `activate_for_scripts` replaces in addition to those in `NAMES`
_FACTORIES = (
    *("arange", "as_tensor", "asarray", "empty_like", "empty_permuted", "empty_strided", "eye"),
    *("full", "full_like", "linspace", "logspace", "normal", "ones_like", "rand", "rand_like"),
    *("randint", "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor"),
    *("tril_indices", "triu_indices", "zeros_like"),
)
#: functions that move data to a device, or create tensors on one
_MOVING = (
    *("load", "Tensor.to", "nn.Module.to", "nn.Module.to_empty"),
    *("Tensor.new_empty", "Tensor.new_full", "Tensor.new_ones", "Tensor.new_tensor"),
    "Tensor.new_zeros",
)


def _script_names() -> list[Name]:
    device = [
        Name("cuda.set_device", _returning(None), "a trainer selects the device of its local rank"),
        Name("cuda.device", _DeviceBlock, "selects a device for a block"),
        Name("cuda.init", _returning(None), "initializes CUDA before the first tensor"),
        Name("cuda.ipc_collect", _returning(None), "frees memory between phases"),
        Name("cuda.set_stream", _returning(None), "all streams run in program order"),
        Name("cuda.is_current_stream_capturing", _returning(False), "no CUDA graph is captured"),
        Name("cuda.get_device_name", _returning("cpu"), "printed in logs"),
        Name("cuda.get_device_capability", _returning((0, 0)), "no feature of a GPU is available"),
        Name("cuda.get_device_properties", _returning(_PROPERTIES), "its architecture is read"),
        Name("cuda.is_bf16_supported", _returning(True), "else some trainers choose float16"),
        Name("cuda.nvtx.range_push", _returning(None), "marks a range for a profiler"),
        Name("cuda.nvtx.range_pop", _returning(None), "marks a range for a profiler"),
    ]
    memory = [
        Name(f"cuda.{owner}{name}", value(), "memory of a GPU is logged")
        for owner in ("", "memory.")
        for name, value in (
            ("memory_stats", lambda: _returning(collections.Counter())),
            ("memory_summary", lambda: _returning("no memory of a GPU is used")),
            ("mem_get_info", lambda: _returning((0, 0))),
            ("reset_peak_memory_stats", lambda: _returning(None)),
        )
    ]
    memory.append(Name("cuda.device_memory_used", _returning(0), "memory of a GPU is logged"))
    tensors = [
        *(Name(name, _on_cpu(getattr(torch, name)), "called on a GPU") for name in _FACTORIES),
        *(Name(name, _moving(_attribute(name)), "moves data to a GPU") for name in _MOVING),
        Name("Tensor.pin_memory", lambda self, *a, **k: self, "only speeds up copies to a GPU"),
    ]
    reason = "NCCL communicates between GPUs only"
    groups = [
        Name(f"distributed.{owner}{name}", _with_gloo(_attribute(f"distributed.{name}")), reason)
        for owner in ("", "distributed_c10d.")
        for name in ("init_process_group", "new_group")
    ]
    return device + memory + tensors + groups


def _attribute(path: str) -> Any:
    return functools.reduce(getattr, path.split("."), torch)


#: properties of the CPU, under the names of CUDA device properties; no GPU has the compute
#: capability 0.0
_PROPERTIES = SimpleNamespace(
    name="cpu", major=0, minor=0, total_memory=0, multi_processor_count=0, warp_size=32
)
#: every name that `activate_for_scripts` replaces in addition to `NAMES`
SCRIPT_NAMES: tuple[Name, ...] = tuple(_script_names())


def _is_no_shared_generator_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in str(record.msg)


def activate() -> bool:
    """Replace the torch names listed in `NAMES`; return False if they were already replaced.

    Call it before importing megatron-core, which decides at import whether to compile its fused
    functions.

    Raises:
        RuntimeError: if CUDA is available, because a process that mixes CUDA and the CPU backend
            would compute on the wrong device, or if megatron-core has been imported and already
            uses the original names.
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
            f"{SEED_TRACKER} was imported before the CPU backend was activated and uses torch's "
            "original functions: every tensor-parallel rank would start from the same weights; "
            "import megatron.cpu_backend and call activate() first"
        )
    cpu_matmul.replace_kernels()
    # torch applies the default device to the functions in a set, which it creates at the first use.
    # Create the set now. After the replacement, it would contain the new functions instead of
    # torch's own. The new functions call torch's own functions, to which the default device would
    # then not apply.
    _device._device_constructors()
    for mode in _get_current_function_mode_stack():
        if isinstance(mode, _device.DeviceContext):  # a default device that is set already
            mode.device = _device_on_cpu(mode.device)
    _replace(NAMES)
    logging.getLogger(SEED_TRACKER).addFilter(_is_no_shared_generator_warning)
    os.environ.setdefault(DYNAMO, "1")
    if "torch._dynamo" in sys.modules:  # torch has already read the environment variable
        sys.modules["torch._dynamo"].config.disable = os.environ[DYNAMO] == "1"
    _active = True
    logger.info("no CUDA device: megatron-core runs on the CPU (%d torch names)", len(NAMES))
    return True


def _replace(names: Sequence[Name]) -> None:
    for name in names:
        *parents, leaf = name.path.split(".")
        owner = functools.reduce(getattr, parents, torch)
        if (operator := _builtins._find_builtin(getattr(owner, leaf, None))) is not None:
            _builtins._register_builtin(name.value, operator)  # for torch.jit.script
        setattr(owner, leaf, name.value)


def activate_for_scripts(*folders: Path) -> None:
    """Call `activate`, replace `SCRIPT_NAMES`, and report CUDA devices to the code in `folders`.

    In megatron-core, `torch.cuda.is_available()` remains false. `torch.cuda.device_count()` returns
    the number of local ranks there, too, because its process that writes checkpoints divides by
    this number.

    Args:
        folders: folders of the source files for which `torch.cuda.is_available()` is true and
            `torch.cuda.device_count()` is the number of local ranks.
    """
    activate()
    _replace(SCRIPT_NAMES)
    prefixes = tuple(f"{folder}{os.sep}" for folder in folders)

    def is_available() -> bool:
        caller = sys._getframe(1)
        return not _is_in_core(caller) and caller.f_code.co_filename.startswith(prefixes)

    def device_count() -> int:
        caller = sys._getframe(1)
        sees_devices = _is_in_core(caller) or caller.f_code.co_filename.startswith(prefixes)
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if sees_devices else 0

    torch.cuda.is_available, torch.cuda.device_count = is_available, device_count


def _is_in_core(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name == "megatron.core" or name.startswith("megatron.core.")


def is_active() -> bool:
    """Return whether `activate` has replaced the torch names in this process."""
    return _active
