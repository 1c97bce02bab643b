"""Reassemble a logical tensor from the shards that the ranks of a run hold.

The field `dims` of a record describes the sharding. It has one letter per dimension; if a parallel
group shards the dimension, the name of the group follows in brackets. A vertical bar precedes the
groups whose ranks hold partial sums.

    s b h[tp]              shards are joined along h, in the order of the tensor-parallel ranks
    s[cp:zigzag] b h       s is divided into 2 * cp_size chunks; rank r holds chunks r and
                           2 * cp_size - 1 - r
    s b o | partial[tp]    partial sums are added over the tensor-parallel ranks
    s b g[tp:2] d          shards are joined along g; each pair of consecutive ranks holds the
                           same shard
    s b g[tp:2] d | partial[tp:2]    like the line above, but each pair of ranks holds partial
                           sums of its shard

If `dims` does not name a group, its ranks hold replicas. Data-parallel ranks hold different data,
except for weights. Experts have their own groups: the data-parallel rank of an expert's tensor is
its rank among the ranks that hold the same expert ("expert data parallel").
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from megatron.analysis.dump.record_columns import GROUPS

_LETTER = re.compile(
    r"(?P<letter>\w+)(\[(?P<group>\w+)((?P<zigzag>:zigzag)|:(?P<copies>[1-9]\d*))?\])?"
)
_PARTIAL = re.compile(r"partial\[(\w+(?:,\w+)*)(:[1-9]\d*)?\]")
NAMED = 8  #: maximum number of missing shards listed in a message
_EXPERT = r"\blocal_experts\.\d+\b"  # matches the names of modules that belong to an expert


@dataclass(frozen=True, slots=True)
class Cut:
    """Description of how a tensor is divided among the ranks of one parallel group."""

    group: str
    axis: int | None  #: dimension that is divided; None if the ranks hold partial sums
    zigzag: bool = False  #: True if each rank holds one chunk of each half of the dimension
    copies: int = 1  #: number of consecutive ranks that share one part
    summed: bool = False  #: True if ranks that share a part hold partial sums of it, not copies


def parse_dims(dims: str) -> list[Cut]:
    """Return how each parallel group in a record's field `dims` divides the tensor.

    Raises:
        ValueError: if `dims` does not have the form that the module's docstring describes.
    """
    letters, _, sums = dims.partition("|")
    cuts = []
    for axis, word in enumerate(letters.split()):
        match = _LETTER.fullmatch(word)
        if match is None:
            raise ValueError(
                f"dims {dims!r}: {word!r} is not understood; give dims such as 's b h[tp]'"
            )
        if match["group"]:
            copies, zigzag = int(match["copies"] or 1), bool(match["zigzag"])
            cuts.append(Cut(match["group"], axis, zigzag=zigzag, copies=copies))
    for word in sums.split():
        match = _PARTIAL.fullmatch(word)
        if match is None:
            raise ValueError(
                f"dims {dims!r}: {word!r} is not understood; give sums such as '| partial[tp]'"
            )
        if match[2]:
            cuts = [replace(c, summed=True) if c.group == match[1] else c for c in cuts]
        else:
            cuts += [Cut(group, None) for group in match[1].split(",")]
    if unknown := [cut.group for cut in cuts if cut.group not in GROUPS]:
        raise ValueError(
            f"dims {dims!r}: no parallel group {unknown[0]!r}; choose from {', '.join(GROUPS)}"
        )
    return cuts


def data_ranks(records: pd.DataFrame) -> Any:
    """Return the data-parallel rank of each record; it is 0 for weights, which are replicated.

    For experts, the result is the expert-data-parallel rank. In Megatron's numbering of ranks, etp
    varies fastest, then ep, then expert data parallel, then pp.
    """
    dp = records["dp"].fillna(0).to_numpy(dtype=np.int64)
    experts = records["module"].str.contains(_EXPERT, regex=True, na=False).to_numpy(dtype=bool)
    if experts.any():
        numbers = records[["rank", "world_size", "pp_size", "ep_size", "etp_size"]].fillna(1)
        rank, world, pp, ep, etp = numbers.to_numpy(dtype=np.int64).T
        copies = np.maximum(world // (pp * ep * etp), 1)
        dp = np.where(experts, rank // (etp * ep) % copies, dp)
    return np.where(records["tensor_name"] == "weight", 0, dp)


def reassemble(records: pd.DataFrame, load: Callable[[Any], Tensor]) -> Tensor:
    """Return the logical tensor whose shards and replicas are listed in `records`.

    Args:
        records: the shards and replicas, one per row.
        load: function that returns the tensor of a row.

    Raises:
        ValueError: if shards are missing, duplicated or do not fit together, or replicas differ.
    """
    rows = list(records.itertuples())
    first = rows[0]
    if len(rows) == 1 and first.dims is None:
        return load(first)
    of_tensor = f"{first.tensor_name} of {first.module} ({Path(first.path).name})"
    if parts := [row.slice for row in rows if row.slice is not None]:
        raise ValueError(
            f"{of_tensor}: only a part of it was collected, {parts[0]}; load each file with "
            "load(record), or collect without --collect-slice"
        )
    if records["dims"].nunique(dropna=False) > 1 or first.dims is None:
        raise ValueError(
            f"{of_tensor}: the dims of its {len(rows)} records are "
            f"{', '.join(map(repr, records['dims'].unique()))}; shards with unknown or different "
            "dims cannot be joined; load each with load(record)"
        )
    if (twice := records["rank"].duplicated(keep=False)).any():
        names = ", ".join(Path(path).name for path in records["path"][twice].head(4))
        raise ValueError(
            f"{of_tensor}: rank {records['rank'][twice].iloc[0]} has more than one such tensor "
            f"({names}); select one with counter=..., or remove the copy"
        )
    cuts = parse_dims(first.dims)
    sizes = [_size(records, cut.group, of_tensor) for cut in cuts]
    cells: dict[tuple[int, ...], list[Any]] = {}
    for row in rows:
        cells.setdefault(tuple(int(getattr(row, cut.group)) for cut in cuts), []).append(row)
    _check_complete(cells, cuts, sizes, of_tensor)
    shards = {index: one_of_replicas(copies, load) for index, copies in cells.items()}
    whole = _join(shards, cuts, of_tensor)
    if first.global_shape is not None and list(whole.shape) != list(first.global_shape):
        raise ValueError(
            f"{of_tensor}: its shards form a tensor of shape {list(whole.shape)}, but the global "
            f"shape in the record is {list(first.global_shape)}; the files do not belong to one "
            "tensor"
        )
    return whole


def _size(records: pd.DataFrame, group: str, of_tensor: str) -> int:
    """Return the size of a parallel group according to the records.

    Raises:
        ValueError: if a rank or the size is unknown, or the sizes differ.
    """
    name = f"{group}_size"
    sizes = records[name].dropna().unique() if name in records else []
    if len(sizes) != 1 or records[group].isna().any():
        raise ValueError(
            f"{of_tensor}: dims {records['dims'].iloc[0]!r} contain the group {group!r}, but a "
            "rank in it is unknown, or its size is unknown or ambiguous; load each with "
            "load(record)"
        )
    return int(sizes[0])


def _check_complete(
    cells: dict[tuple[int, ...], list[Any]], cuts: Sequence[Cut], sizes: list[int], of_tensor: str
) -> None:
    # find only the first few missing shards, because a damaged record may claim any group size
    most = len(cells) + NAMED + 1
    expected = itertools.product(*(range(min(size, most)) for size in sizes))
    gaps = list(itertools.islice((index for index in expected if index not in cells), NAMED + 1))
    if gaps:
        named = [
            " ".join(f"{cut.group}={rank}" for cut, rank in zip(cuts, index, strict=True))
            for index in gaps
        ]
        raise ValueError(
            f"{of_tensor}: {math.prod(sizes) - len(cells)} of {math.prod(sizes)} shards are "
            f"missing, from ranks {'; '.join(named[:NAMED])}; copy the missing files into the "
            "folder, or load single shards with load(record)"
        )


def one_of_replicas(copies: Sequence[Any], load: Callable[[Any], Tensor]) -> Tensor:
    """Load all replicas of a tensor, and return the first after checking that they are equal.

    Raises:
        ValueError: if two replicas are not bit-identical.
    """
    first = load(copies[0])
    for row in copies[1:]:
        if difference := differences(first, load(row)):
            raise ValueError(
                f"{row.tensor_name} of {row.module}: rank {row.rank} ({Path(row.path).name}) "
                f"should hold the same tensor as rank {copies[0].rank} "
                f"({Path(copies[0].path).name}), but {difference}"
            )
    return first


def differences(first: Tensor, second: Tensor) -> str:
    """Return a description of how two tensors differ, or "" if they are bit-identical."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return (
            f"{list(second.shape)} {second.dtype} is not {list(first.shape)} {first.dtype}; "
            "the files do not belong to one tensor"
        )
    if torch.equal(bits(first), bits(second)):
        return ""
    unequal = int((bits(first) != bits(second)).sum())
    largest = float((first.double() - second.double()).abs().nan_to_num(nan=torch.inf).max())
    return f"{unequal} of {first.numel()} values differ, by up to {largest:.3g}"


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns of a tensor as integers.

    Bit patterns distinguish -0 from +0, and NaN values with the same bits are equal.
    """
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return x.contiguous().view(sizes.get(x.element_size(), torch.int64))


def _join(shards: dict[tuple[int, ...], Tensor], cuts: Sequence[Cut], of_tensor: str) -> Tensor:
    """Combine the shards into one tensor; `cuts` is processed from last to first."""
    for cut in reversed(cuts):
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for index in sorted(shards):
            groups.setdefault(index[:-1], []).append(shards[index])
        try:
            shards = {index: _of_group(parts, cut) for index, parts in groups.items()}
        except _CopiesDifferError as error:
            raise ValueError(f"{of_tensor}: {error}") from None
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"{of_tensor}: its shards along {cut.group} do not fit together ({error}); the "
                "files do not belong to one tensor"
            ) from None
    return shards[()]


class _CopiesDifferError(Exception):
    """Error raised if ranks that should hold the same part of a tensor hold different values."""


def _sum(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0, dtype=torch.float64).to(parts[0].dtype)


def _one_of(copies: list[Tensor], cut: Cut) -> Tensor:
    for other in copies[1:]:
        if difference := differences(copies[0], other):
            raise _CopiesDifferError(
                f"{cut.copies} consecutive ranks of {cut.group} should hold the same part, but "
                f"{difference}"
            )
    return copies[0]


def _of_group(parts: list[Tensor], cut: Cut) -> Tensor:
    """Combine the parts of a tensor that the ranks of one parallel group hold, in rank order."""
    if cut.axis is None:
        return _sum(parts)
    if cut.copies > 1:
        together = [parts[at : at + cut.copies] for at in range(0, len(parts), cut.copies)]
        parts = [_sum(group) if cut.summed else _one_of(group, cut) for group in together]
    if cut.zigzag:
        halves = [part.chunk(2, cut.axis) for part in parts]
        parts = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
    return torch.cat(parts, cut.axis)
