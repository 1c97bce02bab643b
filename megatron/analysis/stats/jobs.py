"""The work on one part of a tensor: a file is read, measured, and let go. Runs in any thread, and
in the processes of a Dask cluster.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.analysis.dump.tensor_files import UnreadableTensorError, read_tensor
from megatron.analysis.stats.format_groups import FormatGroups, axes_of, make_plan
from megatron.analysis.stats.kernels.pattern_counts import Workspace
from megatron.analysis.stats.kernels.scalar_quantizer import number_of_codes
from megatron.analysis.stats.logical_tensors import FormatErrors, Part
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
#: Exceptions of NumPy and torch for a tensor that cannot be measured; the run continues without it.
_IMPOSSIBLE = (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError, MemoryError)


@dataclass(frozen=True, slots=True)
class Job:
    """What is still to be computed of a part."""

    number: int  #: told back with the outcome
    part: Part
    formats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A file that could not be measured, and why."""

    path: str
    why: str


@dataclass(frozen=True, slots=True)
class JobResult:
    """What came of a job."""

    contents: dict[str, bytes]  #: by name: `VALUES`, and each format; empty: could not be measured
    failures: tuple[Failure, ...]  #: also of replicas that were not needed


def measure_job(job: Job) -> JobResult:
    """Read and measure."""
    tensor, failures = _load(job.part)
    if tensor is None:
        return JobResult({}, failures)
    try:
        values, found = measure(tensor, job.part.layout, _plan(job), _workspace())
    except (
        TypeError,
        ValueError,
        RuntimeError,
        ArithmeticError,
        LookupError,
        MemoryError,
    ) as error:
        why = str(error) if isinstance(error, TypeError) else f"{type(error).__name__}: {error}"
        return JobResult({}, (*failures, Failure(job.part.paths[0], f"cannot be measured ({why})")))
    contents = {VALUES: pack_values(values)}
    for name in job.formats:
        of_format = {axis: errors for (fmt, axis), errors in found.items() if fmt == name}
        contents[name] = pack_errors(of_format) if of_format else b""
    return JobResult(contents, failures)


def measure_jobs(jobs: Sequence[Job]) -> list[tuple[int, JobResult]]:
    """Several, one after the other, on one thread."""
    return [(job.number, measure_job(job)) for job in jobs]


def read_outcome(contents: dict[str, bytes], formats: Sequence[str]) -> tuple[Values, FormatErrors]:
    """The statistics of a part from its results."""
    found: FormatErrors = {}
    for name in formats:
        if not contents[name]:  # of a dtype that no format takes, or of a slice
            continue
        fmt = get_format(name)
        codes = number_of_codes(fmt.element)
        for axis, errors in unpack_errors(contents[name], codes, axes_of(fmt)).items():
            found[name, axis] = errors
    return unpack_values(contents[VALUES]), found


def _load(part: Part) -> tuple[Tensor | None, tuple[Failure, ...]]:
    """The tensor of a file, memory-mapped; or the sum of several, rounded once. Every replica is
    opened, which touches none of its values, and the first good one is taken.
    """
    tensors: list[Tensor] = []
    failures: list[Failure] = []
    for path, replicas in zip(part.paths, part.replicas, strict=True):
        read = [_read(each, part.layout.shape) for each in (path, *replicas)]
        failures += [each for each in read if isinstance(each, Failure)]
        tensors += [each for each in read if isinstance(each, Tensor)][:1]
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
            path, f"holds a tensor of shape {list(tensor.shape)}, but its record says {list(shape)}"
        )
    return tensor


def _plan(job: Job) -> FormatGroups:
    plan = make_plan(job.formats)
    if job.part.blocks:
        return plan
    sampled = tuple(fmt for fmt in plan.sampled if fmt.block_size is None)
    return FormatGroups(plan.plain, (), sampled)


def _workspace() -> Workspace:
    """Of this thread."""
    if not hasattr(_local, "workspace"):
        _local.workspace = Workspace()
    workspace: Workspace = _local.workspace
    return workspace
