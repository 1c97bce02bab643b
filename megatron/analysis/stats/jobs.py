"""Jobs, each of which reads and measures one part of a tensor.

A job runs on any thread or in a process of a Dask cluster. Its result consists of byte strings,
which can be sent between processes and cached.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.analysis.dump.tensor_files import UnreadableTensorError, read_tensor
from megatron.analysis.stats.errors import FormatErrors
from megatron.analysis.stats.format_groups import FormatGroups, axes_of, group_formats
from megatron.analysis.stats.kernels.pattern_counts import Workspace
from megatron.analysis.stats.kernels.scalar_quantizer import number_of_codes
from megatron.analysis.stats.logical_tensors import Part
from megatron.analysis.stats.serialization import (
    VALUES,
    pack_errors,
    pack_values,
    unpack_errors,
    unpack_values,
)
from megatron.analysis.stats.tensor import measure
from megatron.analysis.stats.values import Values
from megatron.fake_quant.names import get_format

_local = threading.local()
#: Exceptions that NumPy and torch raise for tensors that cannot be measured and are left out.
_IMPOSSIBLE = (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, MemoryError)


@dataclass(frozen=True, slots=True)
class Job:
    """Request to measure the values of a tensor part, and the errors that `formats` cause in it."""

    number: int  #: number of the job, which is returned with its result
    part: Part
    formats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """File that could not be measured, and the reason."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class JobResult:
    """Serialized result of a job, and the files that could not be measured."""

    contents: dict[str, bytes]  #: results, keyed by `VALUES` or format name; empty on failure
    failures: tuple[Failure, ...]  #: unusable files, even if another replica was usable


def measure_job(job: Job) -> JobResult:
    """Read and measure the tensor part of a job."""
    tensor, failures = _load(job.part)
    if tensor is None:
        return JobResult({}, failures)
    try:
        values, all_errors = measure(tensor, job.part.matrix, _format_groups(job), _workspace())
    except _IMPOSSIBLE as error:
        why = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        return JobResult({}, (*failures, Failure(job.part.paths[0], f"cannot be measured ({why})")))
    contents = {VALUES: pack_values(values)}
    for name in job.formats:
        by_axis = {axis: errors for (fmt, axis), errors in all_errors.items() if fmt == name}
        contents[name] = pack_errors(by_axis) if by_axis else b""
    return JobResult(contents, failures)


def measure_jobs(jobs: Sequence[Job]) -> list[tuple[int, JobResult]]:
    """Run several jobs one after another, and return the number and the result of each."""
    return [(job.number, measure_job(job)) for job in jobs]


def unpack_result(
    contents: dict[str, bytes], formats: Sequence[str]
) -> tuple[Values, FormatErrors]:
    """Deserialize the statistics of a tensor part from the contents of a `JobResult`."""
    errors_of_formats: FormatErrors = {}
    for name in formats:
        # `measure` returns no quantization errors for unsupported dtypes, nor for block formats if
        # only a slice of the tensor was collected
        if not contents[name]:
            continue
        fmt = get_format(name)
        codes = number_of_codes(fmt.element)
        for axis, errors in unpack_errors(contents[name], codes, axes_of(fmt)).items():
            errors_of_formats[name, axis] = errors
    return unpack_values(contents[VALUES]), errors_of_formats


def _load(part: Part) -> tuple[Tensor | None, tuple[Failure, ...]]:
    """Return the tensor of a part, and the files that could not be read.

    The tensor of a single file is memory-mapped. Tensors of several files are added in float64, and
    the sum is rounded once. The first readable replica of each file is used. All replicas are
    opened, without reading their values, so that unreadable replicas are reported. The tensor is
    None if a file and all its replicas are unreadable.
    """
    tensors: list[Tensor] = []
    failures: list[Failure] = []
    for path, replicas in zip(part.paths, part.replicas, strict=True):
        copies = [_read(copy, part.matrix.shape) for copy in (path, *replicas)]
        failures += [copy for copy in copies if isinstance(copy, Failure)]
        tensors += [copy for copy in copies if isinstance(copy, Tensor)][:1]
    if len(tensors) < len(part.paths):
        return None, tuple(failures)
    if len(tensors) == 1:
        return tensors[0], tuple(failures)
    total = tensors[0].to(torch.float64)
    for tensor in tensors[1:]:
        total += tensor
    return total.to(tensors[0].dtype), tuple(failures)


def _read(path: str, shape: tuple[int, ...]) -> Tensor | Failure:
    try:
        tensor, _ = read_tensor(Path(path))
    except UnreadableTensorError as error:
        return Failure(path, error.why)
    except OSError as error:
        return Failure(path, error.strerror or str(error))
    if tuple(tensor.shape) != shape:
        return Failure(
            path,
            f"holds a tensor of shape {list(tensor.shape)}, but the shape in its record is "
            f"{list(shape)}",
        )
    return tensor


def _format_groups(job: Job) -> FormatGroups:
    """Return the formats to measure in a job, grouped by the method of measurement.

    Formats with block scales are left out for a slice.
    """
    formats = group_formats(job.formats)
    if job.part.blocks:
        return formats
    sampled = tuple(fmt for fmt in formats.sampled if fmt.block_size is None)
    return FormatGroups(formats.plain, (), sampled)


def _workspace() -> Workspace:
    """Return the current thread's tables of counts; create them on the first call."""
    if not hasattr(_local, "workspace"):
        _local.workspace = Workspace()
    workspace: Workspace = _local.workspace
    return workspace
