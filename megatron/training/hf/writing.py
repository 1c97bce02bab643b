"""Write the weights of all ranks to a Hugging Face checkpoint.

A variable named `source` refers to a tensor of the checkpoint. The first rank assembles these
tensors one by one from the parts that the ranks hold, and writes each file once all tensors of the
file are complete. The first rank needs memory for one file and one tensor; every other rank needs
memory for its part of one tensor. The tensors are assigned to numbered files in advance, based on
their shapes. After each file, all ranks are told whether an error occurred.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from tqdm import tqdm

from megatron.collection.module_identity import natural_order
from megatron.core import parallel_state
from megatron.training import device
from megatron.training.arguments.configs import params_dtype
from megatron.training.arguments.validation import RunConfig
from megatron.training.collective_errors import first_rank_does
from megatron.training.errors import RunError
from megatron.training.hf import flags, folders
from megatron.training.hf.architectures import Model
from megatron.training.hf.layouts import Piece, Source
from megatron.training.hf.loading import parts
from megatron.training.hf.reading import SINGLE
from megatron.training.printing import print_rank_0

FILE_BYTES = 2 * 2**30  #: maximum size of a file, in bytes, unless a single tensor is larger

ShardRange = tuple[int, int, int]  #: (dimension, start, stop) of a part of a checkpoint tensor


def check_export(run: RunConfig) -> None:
    """Check, before training, that `--save-hf` can be written. Must be called on all ranks.

    Raises:
        UserError: on all ranks, if the folder cannot be written.
    """
    if run.args.save_hf is not None:
        first_rank_does(lambda: folders.check_target(run.args.save_hf))


@torch.no_grad()
def save_weights(run: RunConfig, chunks: list[torch.nn.Module]) -> None:
    """Write the weights to `--save-hf`. Must be called on all ranks.

    Raises:
        RunError: on all ranks, if a file cannot be written.
    """
    args, dtype = run.args, params_dtype(run.args)
    print_rank_0(f"saving weights to {args.save_hf}")
    partial: list[Path] = []

    def begin() -> None:
        with _write_errors(args.save_hf):
            partial.append(folders.begin(args.save_hf))

    def finish() -> None:
        with _write_errors(args.save_hf):
            folders.copy_companions(
                partial[0], flags.tokenizer_folder(args), flags.tokenizer_file(args)
            )
            folders.write_config(partial[0], run.hf.config, dtype)
            folders.put_in_place(partial[0], args.save_hf)

    first_rank_does(begin)
    export = _Export(run.hf, chunks, dtype)
    for number, sources in enumerate(export.files):
        tensors = {source.name: export.gather(source) for source in sources}

        def write(number=number, tensors=tensors) -> None:
            with _write_errors(args.save_hf):
                save_file(tensors, partial[0] / export.file_name(number), {"format": "pt"})

        first_rank_does(write)
    if len(export.files) > 1:
        first_rank_does(lambda: export.write_index(partial[0], args.save_hf))
    first_rank_does(finish)
    print_rank_0(f"successfully saved weights to {args.save_hf}")


@contextmanager
def _write_errors(folder: str) -> Iterator[None]:
    """Raise a `RunError` if writing the weights fails in the `with` block."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"the weights {folder} could not be written: {error}; make room or choose another "
            "--save-hf, then resume with --load"
        ) from error


@dataclass
class _LocalParts:
    """The parts of one checkpoint tensor that this rank holds."""

    parts: list[tuple[torch.Tensor, Piece]] = field(default_factory=list)

    @property
    def ranges(self) -> list[ShardRange]:
        return [(p.dim, p.start, p.stop) for _, p in self.parts]

    def message(self) -> torch.Tensor:
        """Return this rank's parts of the checkpoint tensor, flattened and concatenated."""
        views = [t.narrow(p.dim, p.offset, p.stop - p.start) for t, p in self.parts]
        return torch.cat([view.reshape(-1) for view in views])


class _Export:
    """The export of a model, for which the first rank gathers one checkpoint tensor at a time."""

    def __init__(self, model: Model, chunks: list[torch.nn.Module], dtype: torch.dtype):
        self.dtype = dtype
        sources = sorted(model.sources.values(), key=lambda source: natural_order(source.name))
        self.files = _cut(sources, dtype.itemsize)
        self._local = _local_parts(model, chunks)
        ranges = {name: local.ranges for name, local in self._local.items()}
        self._ranges_of_ranks: list[dict[str, list[ShardRange]]] = [
            {} for _ in range(dist.get_world_size())
        ]
        dist.all_gather_object(self._ranges_of_ranks, ranges)
        self._bar = tqdm(
            total=len(sources), desc="saving", unit="tensor", disable=None if _is_first() else True
        )

    def gather(self, source: Source) -> torch.Tensor | None:
        """Return a whole checkpoint tensor on the first rank and None on the others.

        Must be called on all ranks.
        """
        whole = torch.empty(source.shape, dtype=self.dtype) if _is_first() else None
        for rank, ranges in enumerate(self._ranges_of_ranks):
            if source.name in ranges:
                self._collect(source, rank, whole)
        self._bar.update()
        return whole

    def _collect(self, source: Source, rank: int, whole: torch.Tensor | None) -> None:
        """Copy one rank's parts of a checkpoint tensor into the whole tensor on the first rank."""
        ranges = self._ranges_of_ranks[rank][source.name]
        here, message = dist.get_rank(), None
        if here == rank:
            message = self._local[source.name].message()
            assert message.dtype == self.dtype, f"{source.name} is {message.dtype}"
            if rank != 0:
                dist.send(message.view(torch.uint8), dst=0)
        elif here == 0:
            elements = sum(prod(_shape(source, span)) for span in ranges)
            message = torch.empty(elements, dtype=self.dtype, device=device.current())
            dist.recv(message.view(torch.uint8), src=rank)
        if whole is not None:
            _put(message.cpu(), whole, [(span, _shape(source, span)) for span in ranges])

    def file_name(self, number: int) -> str:
        """Return the name of the safetensors file with index `number`, counted from 0."""
        if len(self.files) == 1:
            return SINGLE
        return f"model-{number + 1:05d}-of-{len(self.files):05d}.safetensors"

    def write_index(self, partial: Path, folder: str) -> None:
        """Write the checkpoint's index, which maps each tensor to its file."""
        names = {s.name: self.file_name(n) for n, file in enumerate(self.files) for s in file}
        total = sum(prod(s.shape) * self.dtype.itemsize for file in self.files for s in file)
        with _write_errors(folder):
            folders.write_index(partial, names, total)


def _is_first() -> bool:
    return dist.get_rank() == 0


def _cut(sources: list[Source], itemsize: int) -> list[list[Source]]:
    """Distribute checkpoint tensors over files, each of at most `FILE_BYTES` bytes or one tensor.

    Only a tensor that is larger than `FILE_BYTES` results in a larger file.
    """
    files: list[list[Source]] = [[]]
    room = FILE_BYTES
    for source in sources:
        size = prod(source.shape) * itemsize
        if files[-1] and size > room:
            files.append([])
            room = FILE_BYTES
        files[-1].append(source)
        room -= size
    return files


def _local_parts(model: Model, chunks: list[torch.nn.Module]) -> dict[str, _LocalParts]:
    """Return the tensor parts that this rank contributes to the export, by checkpoint tensor.

    If several ranks hold equal copies of a part, only one of them contributes it.
    """
    tied = bool(model.config.get("tie_word_embeddings"))
    local: dict[str, _LocalParts] = {}
    for name, parameter, layout, pieces in parts(chunks, model.tensors):
        copy_of_embedding = tied and name == "output_layer.weight"
        if not copy_of_embedding and _contributes(name, split=layout.split):
            for piece in pieces:
                entry = local.setdefault(piece.source.name, _LocalParts())
                entry.parts.append((parameter.data, piece))
    return local


def _contributes(name: str, *, split: bool) -> bool:
    if ".local_experts." in name:
        return parallel_state.get_expert_data_parallel_rank() == 0
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return False
    return split or parallel_state.get_tensor_model_parallel_rank() == 0


def _shape(source: Source, span: ShardRange) -> tuple[int, ...]:
    """Return the shape of a part of a checkpoint tensor."""
    dim, start, stop = span
    return tuple(stop - start if i == dim else size for i, size in enumerate(source.shape))


def _put(
    message: torch.Tensor, whole: torch.Tensor, parts: list[tuple[ShardRange, tuple[int, ...]]]
) -> None:
    """Copy the tensor parts in a rank's message to their positions in the whole tensor."""
    sizes = [prod(shape) for _, shape in parts]
    for part, ((dim, start, stop), shape) in zip(message.split(sizes), parts, strict=True):
        whole.narrow(dim, start, stop - start).copy_(part.view(shape))
