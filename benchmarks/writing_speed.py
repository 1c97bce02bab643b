"""Measure the tensor collector's writing speed without training, and compare it with raw writes.

All times end when `sync` returns, that is, when the data is on the disk.

    ours    tensors of a layer, copied and written by the tensor collector as in training
    raw     one file of the same size, written through the system's page cache
    direct  one file of the same size, written without the page cache, as the collection does if
            the file system supports it
"""

import argparse
import contextlib
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch

import training_worker as training

ROUNDS = 5
PIECE = 8 << 20  #: size of each raw write, in bytes; the size of a raw file is a multiple of it


def measure(options: argparse.Namespace, tensor_saver: ModuleType) -> dict[str, list[float]]:
    """Return the writing speeds of the collector and of each kind of raw write in every round.

    Speeds are in bytes per second. "direct" is missing if the file system does not support it.

    Args:
        options: the options `disk_mib` (MiB to write per round), `folder`, `host_gib` (limit of
            the collection's host memory) and the sizes of the model.
        tensor_saver: the module `tensor_saver` of the collection.
    """
    tensors = of_a_layer(options)
    layers = -(-(options.disk_mib << 20) // sum(tensor.nbytes for tensor in tensors))
    total = layers * sum(tensor.nbytes for tensor in tensors)
    ways: dict[str, Callable[[Path], None]] = {
        "raw": lambda folder: write(folder, total, 0),
        "ours": lambda folder: collect(folder, tensors, layers, options.host_gib, tensor_saver),
    }
    if hasattr(os, "O_DIRECT"):  # macOS lacks this flag.
        ways["direct"] = lambda folder: write(folder, total, os.O_DIRECT)
    rates: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            os.sync()
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                started = time.perf_counter()
                with contextlib.suppress(OSError) if name == "direct" else contextlib.nullcontext():
                    way(Path(folder))
                    os.sync()
                    rates.setdefault(name, []).append(total / (time.perf_counter() - started))
    return rates


def of_a_layer(options: argparse.Namespace) -> list[torch.Tensor]:
    """Return random tensors with shapes like those of the GEMM operands of one layer."""
    hidden, tokens = options.hidden_size, options.seq_length * training.SEQUENCES
    like = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    shapes = [(tokens, hidden), (4 * hidden, hidden), (tokens, 8 * hidden), (hidden, 4 * hidden)]
    return [torch.randn(shape).to(like) for shape in shapes]


def write(folder: Path, total: int, flags: int) -> None:
    """Write at least `total` bytes to a file; `flags` are additional flags of `os.open`.

    Raises:
        OSError: if the file system does not support the flags.
    """
    with mmap.mmap(-1, PIECE) as piece:  # page-aligned buffer, as O_DIRECT requires
        piece.write(os.urandom(PIECE))
        file = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | flags)
        try:
            for _ in range(-(-total // PIECE)):
                os.write(file, piece)
        finally:
            os.close(file)


def collect(
    folder: Path,
    tensors: list[torch.Tensor],
    layers: int,
    host_gib: float,
    tensor_saver: ModuleType,
) -> None:
    """Write `tensors` through the tensor collector, once per layer, in a single micro-batch."""
    from megatron.collection.module_identity import ModuleIdentity
    from megatron.collection.training_clock import MicroBatch, clock

    tensor_saver.configure(
        {},
        save_tensors=True,
        save_dir=str(folder),
        control_iter=0,
        collect_keep_free_gib=0.0,
        collect_max_host_gib=host_gib,
    )
    tensor_saver.begin_iteration()
    clock.micro_batch = MicroBatch(clock.iteration, 0)
    for layer in range(layers):
        capture = tensor_saver.capture(ModuleIdentity(f"layer{layer}", 0), "linear")
        for tensor in tensors:
            capture.save("input", tensor, dims="t h")
    tensor_saver.flush()
    tensor_saver.end_iteration()
    tensor_saver.close()
    assert len(list(folder.glob("*.pt"))) == layers * len(tensors), "tensors are missing"
