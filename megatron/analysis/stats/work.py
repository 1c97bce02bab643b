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

from megatron.analysis.stats.cache import (
    VALUES,
    pack_errors,
    pack_values,
    unpack_errors,
    unpack_values,
)
from megatron.analysis.stats.coder import number_of_codes
from megatron.analysis.stats.counter import Workspace
from megatron.analysis.stats.logical import Found, Part
from megatron.analysis.stats.plan import Plan, axes_of, make_plan
from megatron.analysis.stats.tensor import measure
from megatron.analysis.stats.values import Values
from megatron.analysis.tensor_files import UnreadableTensorError, read_tensor
from megatron.fake_quant.names import get_format

_local = threading.local()


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


Outcome = dict[str, bytes] | Failure  #: results by name: `VALUES`, and each format


def measure_job(job: Job) -> Outcome:
    """Read and measure."""
    try:
        tensor = _load(job.part)
        values, found = measure(tensor, job.part.layout, _plan(job), _workspace())
    except _UnreadableError as error:
        return error.failure
    except TypeError as error:
        return Failure(job.part.paths[0], str(error))
    contents = {VALUES: pack_values(values)}
    for name in job.formats:
        of_format = {axis: errors for (fmt, axis), errors in found.items() if fmt == name}
        contents[name] = pack_errors(of_format) if of_format else b""
    return contents


def measure_jobs(jobs: Sequence[Job]) -> list[tuple[int, Outcome]]:
    """Several, one after the other, on one thread."""
    return [(job.number, measure_job(job)) for job in jobs]


def read_outcome(contents: dict[str, bytes], formats: Sequence[str]) -> tuple[Values, Found]:
    """The statistics of a part from its results."""
    found: Found = {}
    for name in formats:
        if not contents[name]:  # of a dtype that no format takes, or of a slice
            continue
        fmt = get_format(name)
        codes = number_of_codes(fmt.element)
        for axis, errors in unpack_errors(contents[name], codes, axes_of(fmt)).items():
            found[name, axis] = errors
    return unpack_values(contents[VALUES]), found


class _UnreadableError(Exception):
    def __init__(self, path: str, why: str):
        super().__init__(why)
        self.failure = Failure(path, why)


def _load(part: Part) -> Tensor:
    """The tensor of a file, memory-mapped; or the sum of several, rounded once."""
    tensors = []
    for path in part.paths:
        try:
            tensor, _ = read_tensor(Path(path))
        except UnreadableTensorError as error:
            raise _UnreadableError(path, error.why) from None
        except OSError as error:
            raise _UnreadableError(path, error.strerror or str(error)) from None
        if tuple(tensor.shape) != part.layout.shape:
            raise _UnreadableError(
                path,
                f"holds a tensor of shape {list(tensor.shape)}, but its record says "
                f"{list(part.layout.shape)}",
            )
        tensors.append(tensor)
    if len(tensors) == 1:
        return tensors[0]
    total = tensors[0].to(torch.float64)
    for tensor in tensors[1:]:
        total += tensor
    return total.to(tensors[0].dtype)


def _plan(job: Job) -> Plan:
    plan = make_plan(job.formats)
    if job.part.blocks:
        return plan
    sampled = tuple(fmt for fmt in plan.sampled if fmt.block_size is None)
    return Plan(plan.plain, (), sampled)


def _workspace() -> Workspace:
    """Of this thread."""
    if not hasattr(_local, "workspace"):
        _local.workspace = Workspace()
    workspace: Workspace = _local.workspace
    return workspace
