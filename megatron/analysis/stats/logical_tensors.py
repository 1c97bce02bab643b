"""Group the records of a dump into logical tensors, and merge the statistics of their parts.

Each shard is a separate part, because its rank quantized it separately. Replicas count once: the
first readable replica is measured, and `verify` checks that the others are identical. Partial sums
are added before they are measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.dump.reassembly import Cut, data_ranks, parse_dims
from megatron.analysis.dump.tensor_files import UnreadableTensorError, read_tensor
from megatron.analysis.stats.errors import FormatErrors
from megatron.analysis.stats.matrix_view import MatrixView, matrix_view_of
from megatron.analysis.stats.values import Values, join
from megatron.analysis.store import IDENTITY

#: Columns that together identify a logical tensor.
KEYS = (*IDENTITY, "quant_type", "recomputed", "data_rank")

NOTE_SEPARATOR = "; "
MOST_MISSING = 16  #: maximum number of missing parts that a note lists

#: Index of a shard in its logical tensor: one number per parallel group that shards the tensor.
ShardIndex = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """Unit of measurement: the part of a tensor in one file, or the sum of parts in several."""

    paths: tuple[str, ...]
    #: for each of `paths`, the other files that should have the same content
    replicas: tuple[tuple[str, ...], ...]
    matrix: MatrixView
    blocks: bool  #: True if formats with block scales can be measured; False for a slice
    nbytes: int  #: size of the first file, in bytes; 0 if unknown


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """Logical tensor of one run. Its parts are measured separately."""

    row: Any  #: record of the first file, as a named tuple
    data_rank: int
    cuts: tuple[Cut, ...]  #: how the tensor is sharded; partial sums are left out
    parts: dict[ShardIndex, Part]
    files: int  #: number of files, including replicas
    note: str

    @property
    def shape(self) -> list[int]:
        """Shape of the tensor that all available parts form together."""
        shape = list(self.row.shape)
        for number, cut in enumerate(self.cuts):
            if cut.axis is not None:
                shape[cut.axis] *= len({index[number] for index in self.parts})
        return shape


def logical_tensors(
    records: pd.DataFrame, *, dump: pd.DataFrame | None = None
) -> Iterator[LogicalTensor]:
    """Yield the logical tensors of `records`, in the order of their first files.

    Records of stored codes are left out, because codes are not values.

    Args:
        dump: all records of the dump, if `records` is a selection. The size of a head is read from
            the records of other tensors and must not depend on the selection.
    """
    # `Series.map` cannot be used: for an empty column, its result would make `records[keep]`
    # select columns
    keep = np.array([not isinstance(codes, dict) for codes in records["codes"]], dtype=bool)
    records = _with_shapes(records[keep])
    records = records.assign(data_rank=data_ranks(records))
    head_dims = _head_dims(records if dump is None else dump)
    unknown = np.array([_cuts(dims) is None for dims in records["dims"]], dtype=bool)
    separate = records["run_id"].isna().to_numpy(dtype=bool) | unknown
    groups: dict[tuple[Any, ...], list[Any]] = {}
    keys = records[list(KEYS)].astype(object).where(records[list(KEYS)].notna(), None)
    for row, key, is_separate in zip(
        records.itertuples(), keys.itertuples(index=False, name=None), separate, strict=True
    ):
        groups.setdefault((row.path,) if is_separate else key, []).append(row)
    for rows in groups.values():
        yield _logical_tensor(rows, head_dims)


def first_passes(tensors: Sequence[LogicalTensor]) -> list[LogicalTensor]:
    """Return the tensors, leaving out those that activation recomputation saved a second time.

    Recomputation repeats a forward pass and saves its tensors a second time. If the dump also
    contains the first pass, these tensors would be counted twice.
    """
    first = {_pass(tensor) for tensor in tensors if tensor.row.recomputed is not True}
    return [
        tensor
        for tensor in tensors
        if tensor.row.recomputed is not True or _pass(tensor) not in first
    ]


def _pass(tensor: LogicalTensor) -> tuple[Any, ...]:
    """Return a key shared by a tensor and the copy that activation recomputation saved.

    A file without a run ID gets a key of its own.
    """
    if pd.isna(tensor.row.run_id):
        return (tensor.row.path,)
    names = (name for name in KEYS if name not in ("recomputed", "data_rank"))
    known = (getattr(tensor.row, name) for name in names)
    return (*(None if pd.isna(value) else value for value in known), tensor.data_rank)


def _with_shapes(records: pd.DataFrame) -> pd.DataFrame:
    """Return the records with missing shapes filled in from the files.

    An unreadable file gets an empty shape here; it is reported when it is measured.
    """
    unknown = [position for position, shape in enumerate(records["shape"]) if shape is None]
    if not unknown:
        return records
    shapes = list(records["shape"])
    for position in unknown:
        shapes[position] = []
        with contextlib.suppress(UnreadableTensorError):
            shapes[position] = list(read_tensor(Path(records["path"].iloc[position]))[0].shape)
    column = np.fromiter(shapes, dtype=object, count=len(shapes))
    return records.assign(shape=pd.Series(column, index=records.index, dtype=object))


def _head_dims(records: pd.DataFrame) -> dict[tuple[Any, ...], int]:
    """Return the size of an attention head in each layer, read from the shapes of the V tensors.

    This size is needed for tensors whose last dimension holds all heads.
    """
    values = records[records["tensor_name"] == "value"]
    return {
        (row.run_id, row.layer_idx, row.layer_type): int(row.shape[-1])
        for row in values.itertuples()
        if row.shape
    }


def _logical_tensor(rows: Sequence[Any], head_dims: dict[tuple[Any, ...], int]) -> LogicalTensor:
    """Combine records with the same values in the columns KEYS into one logical tensor."""
    first, notes = rows[0], []
    cuts = _cuts(first.dims) or []
    if any(cut.axis is not None and cut.axis >= len(first.shape) for cut in cuts):
        cuts = []
    if first.dims is not None and _cuts(first.dims) is None:
        notes.append(f"dims {first.dims!r} cannot be parsed: each file counts as a tensor")
    known = [c for c in cuts if not any(pd.isna(getattr(row, c.group)) for row in rows)]
    joined = [cut for cut in known if cut.axis is not None]
    summed = [cut for cut in known if cut.axis is None or cut.summed]
    head_dim = head_dims.get((first.run_id, first.layer_idx, first.layer_type))
    shards: dict[ShardIndex, dict[ShardIndex, list[Any]]] = {}
    for row in rows:
        index = tuple(_rank(row, cut) // cut.copies for cut in joined)
        addend = tuple(
            _rank(row, c) if c.axis is None else _rank(row, c) % c.copies for c in summed
        )
        shards.setdefault(index, {}).setdefault(addend, []).append(row)
    notes += _missing(first, joined, set(shards), "shards")
    parts: dict[ShardIndex, Part] = {}
    for index, addends in sorted(shards.items()):
        notes += _missing(first, summed, set(addends), "addends")
        row = addends[min(addends)][0]  # record of the first replica of the first addend
        matrix = matrix_view_of(
            tuple(row.shape),
            layer_type=row.layer_type,
            tensor_name=row.tensor_name,
            head_dim=head_dim,
        )
        files = [tuple(copy.path for copy in addends[addend]) for addend in sorted(addends)]
        paths, replicas = tuple(each[0] for each in files), tuple(each[1:] for each in files)
        size = int(row.bytes) if not pd.isna(row.bytes) else 0
        parts[index] = Part(paths, replicas, matrix, row.slice is None, size)
    if first.slice is not None:
        notes.append("a slice: formats with block scales are left out")
    return LogicalTensor(
        first,
        int(first.data_rank),
        tuple(joined),
        parts,
        len(rows),
        NOTE_SEPARATOR.join(dict.fromkeys(notes)),
    )


def _cuts(dims: Any) -> list[Cut] | None:
    """Parse a record's field `dims`; return None if it is missing or invalid."""
    try:
        return parse_dims(dims) if isinstance(dims, str) else None
    except ValueError:
        return None


def _rank(row: Any, cut: Cut) -> int:
    """Return a record's rank in the parallel group that `cut` describes."""
    return int(getattr(row, cut.group))


def _missing(row: Any, cuts: Sequence[Cut], present: set[ShardIndex], what: str) -> list[str]:
    """Return notes on the missing parts of a tensor, with at most one note per parallel group.

    A part has the number of its rank in the group. If several ranks share a part, the parts are
    numbered consecutively.
    """
    notes = []
    for number, cut in enumerate(cuts):
        size = getattr(row, f"{cut.group}_size", None)
        if size is None or pd.isna(size):
            continue
        shards = what == "shards"
        parts = int(size) // cut.copies if shards else cut.copies if cut.summed else int(size)
        there = {index[number] for index in present}
        # a damaged record may claim any size, so the search stops after a few missing parts
        gaps = list(islice((part for part in range(parts) if part not in there), MOST_MISSING + 1))
        if gaps:
            named = ", ".join(map(str, gaps[:MOST_MISSING]))
            more = " and more" if len(gaps) > MOST_MISSING else ""
            notes.append(f"{what} of {cut.group} {named}{more} are missing")
    return notes


def merge_parts(
    tensor: LogicalTensor, measured: dict[ShardIndex, tuple[Values, FormatErrors]]
) -> tuple[Values, FormatErrors]:
    """Merge the statistics of all parts of a tensor."""
    values = {index: values_of_part for index, (values_of_part, _) in measured.items()}
    for cut in reversed(tensor.cuts):
        groups: dict[ShardIndex, list[Values]] = {}
        for index in sorted(values):
            groups.setdefault(index[:-1], []).append(values[index])
        values = {
            index: join(parts, cut.axis, zigzag=cut.zigzag) if len(parts) > 1 else parts[0]
            for index, parts in groups.items()
        }
    merged: FormatErrors = {}
    for _, errors_of_part in measured.values():
        for key, errors in errors_of_part.items():
            if key in merged:
                merged[key] += errors
            else:
                merged[key] = errors.copy() if len(measured) > 1 else errors
    return values[()], merged
