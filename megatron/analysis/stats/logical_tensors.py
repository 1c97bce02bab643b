"""From the records of a dump to logical tensors: which files make up each, and how.

A shard is quantized by itself, as its rank did. Replicas count once: the first that can be read;
that they are the same is for `verify` to say. Of partial sums the sum is
what matters: their files are added first.
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
from megatron.analysis.stats.errors import Errors
from megatron.analysis.stats.matrix_view import MatrixView, layout_of
from megatron.analysis.stats.values import Values, join

KEYS = (
    "run_id",
    "iteration",
    "micro_batch",
    "layer_type",
    "layer_idx",
    "module",
    "operation",
    "phase",
    "tensor_name",
    "quant_type",
    "recomputed",
    "data_rank",
)

NOTE_SEPARATOR = "; "
MOST_MISSING = 16  #: parts that a note names

ShardIndex = tuple[int, ...]
FormatErrors = dict[tuple[str, str], Errors]


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured at once: a file, or several whose tensors are added."""

    paths: tuple[str, ...]
    replicas: tuple[tuple[str, ...], ...]  #: of each path, files that should hold the same
    layout: MatrixView
    blocks: bool  #: whether formats with block scales make sense: not of a slice
    nbytes: int  #: about, of one tensor


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """A tensor that is put together from parts."""

    row: Any  #: the record of its first file, a named tuple
    data_rank: int
    cuts: tuple[Cut, ...]  #: without those of sums
    parts: dict[ShardIndex, Part]  #: by the ranks in the groups of the cuts
    files: int  #: all of them, replicas too
    note: str

    @property
    def shape(self) -> list[int]:
        """Of all parts together; of what there is if some are missing."""
        shape = list(self.row.shape)
        for number, cut in enumerate(self.cuts):
            if cut.axis is not None:
                shape[cut.axis] *= len({place[number] for place in self.parts})
        return shape


def logical_tensors(
    records: pd.DataFrame, *, dump: pd.DataFrame | None = None
) -> Iterator[LogicalTensor]:
    """The logical tensors of these records, in the order of their first files. Codes are no values
    and are left out.

    Args:
        dump: all records of the dump that these are from, if they are not: what one tensor tells of
            another (the width of a head) must not depend on what is chosen.
    """
    # as arrays: `map` of an empty column gives no booleans, and would select columns
    keep = np.array([not isinstance(codes, dict) for codes in records["codes"]], dtype=bool)
    records = _with_shapes(records[keep])
    records = records.assign(data_rank=data_ranks(records))
    head_dims = _head_dims(records if dump is None else dump)
    unknown = np.array([_cuts(dims) is None for dims in records["dims"]], dtype=bool)
    alone = records["run_id"].isna().to_numpy(dtype=bool) | unknown
    groups: dict[tuple[Any, ...], list[Any]] = {}
    keys = records[list(KEYS)].astype(object).where(records[list(KEYS)].notna(), None)
    for row, key, single in zip(
        records.itertuples(), keys.itertuples(index=False, name=None), alone, strict=True
    ):
        groups.setdefault((row.path,) if single else key, []).append(row)
    for rows in groups.values():
        yield _logical(rows, head_dims)


def first_passes(tensors: Sequence[LogicalTensor]) -> list[LogicalTensor]:
    """Return the tensors without those that recomputation saved a second time.

    Activation recomputation runs a forward pass again and saves its tensors again. If the first
    pass is in the dump too, the second one would count everything twice.
    """
    first = {_pass(tensor) for tensor in tensors if tensor.row.recomputed is not True}
    return [
        tensor
        for tensor in tensors
        if tensor.row.recomputed is not True or _pass(tensor) not in first
    ]


def _pass(tensor: LogicalTensor) -> tuple[Any, ...]:
    """Return a key that a tensor shares with its repetition; a file of an unknown run has none."""
    if pd.isna(tensor.row.run_id):
        return (tensor.row.path,)
    names = (name for name in KEYS if name not in ("recomputed", "data_rank"))
    known = (getattr(tensor.row, name) for name in names)
    return (*(None if pd.isna(value) else value for value in known), tensor.data_rank)


def _with_shapes(records: pd.DataFrame) -> pd.DataFrame:
    """A shape that no record tells is the file's. (What cannot be read is said when it is
    measured.)
    """
    unknown = [place for place, shape in enumerate(records["shape"]) if shape is None]
    if not unknown:
        return records
    shapes = list(records["shape"])
    for place in unknown:
        shapes[place] = []
        with contextlib.suppress(UnreadableTensorError):
            shapes[place] = list(read_tensor(Path(records["path"].iloc[place]))[0].shape)
    column = np.fromiter(shapes, dtype=object, count=len(shapes))
    return records.assign(shape=pd.Series(column, index=records.index, dtype=object))


def _head_dims(records: pd.DataFrame) -> dict[tuple[Any, ...], int]:
    """Width of a head by layer, from the values, for tensors in which the heads are one."""
    values = records[records["tensor_name"] == "value"]
    return {
        (row.run_id, row.layer_idx, row.layer_type): int(row.shape[-1])
        for row in values.itertuples()
        if row.shape
    }


def _logical(rows: Sequence[Any], head_dims: dict[tuple[Any, ...], int]) -> LogicalTensor:
    first, notes = rows[0], []
    cuts = _cuts(first.dims) or []
    if any(cut.axis is not None and cut.axis >= len(first.shape) for cut in cuts):
        cuts = []
    if first.dims is not None and _cuts(first.dims) is None:
        notes.append(f"dims {first.dims!r} are not understood: each file is a tensor")
    known = [c for c in cuts if not any(pd.isna(getattr(row, c.group)) for row in rows)]
    joined = [cut for cut in known if cut.axis is not None]
    summed = [cut for cut in known if cut.axis is None or cut.summed]
    head_dim = head_dims.get((first.run_id, first.layer_idx, first.layer_type))
    places: dict[ShardIndex, dict[ShardIndex, list[Any]]] = {}
    for row in rows:
        place = tuple(_rank(row, cut) // cut.copies for cut in joined)
        of_sum = tuple(
            _rank(row, c) if c.axis is None else _rank(row, c) % c.copies for c in summed
        )
        places.setdefault(place, {}).setdefault(of_sum, []).append(row)
    notes += _missing(first, joined, set(places), "shards")
    parts: dict[ShardIndex, Part] = {}
    for place, addends in sorted(places.items()):
        notes += _missing(first, summed, set(addends), "addends")
        row = addends[min(addends)][0]  # of replicas the first counts
        layout = layout_of(
            tuple(row.shape),
            layer_type=row.layer_type,
            tensor_name=row.tensor_name,
            head_dim=head_dim,
        )
        files = [tuple(copy.path for copy in addends[of_sum]) for of_sum in sorted(addends)]
        paths, replicas = tuple(each[0] for each in files), tuple(each[1:] for each in files)
        size = int(row.bytes) if not pd.isna(row.bytes) else 0
        parts[place] = Part(paths, replicas, layout, row.slice is None, size)
    if first.slice is not None:
        notes.append("a slice: without formats that have block scales")
    return LogicalTensor(
        first,
        int(first.data_rank),
        tuple(joined),
        parts,
        len(rows),
        NOTE_SEPARATOR.join(dict.fromkeys(notes)),
    )


def _cuts(dims: Any) -> list[Cut] | None:
    """How a tensor is cut; None if that is not said."""
    try:
        return parse_dims(dims) if isinstance(dims, str) else None
    except ValueError:
        return None


def _rank(row: Any, cut: Cut) -> int:
    """The record's place in the group of a cut."""
    return int(getattr(row, cut.group))


def _missing(row: Any, cuts: Sequence[Cut], found: set[ShardIndex], what: str) -> list[str]:
    """Which parts' files are not there: they are numbered as the ranks are, or, where several
    ranks have one part, as the parts.
    """
    notes = []
    for number, cut in enumerate(cuts):
        size = getattr(row, f"{cut.group}_size", None)
        if size is None or pd.isna(size):
            continue
        shards = what == "shards"
        parts = int(size) // cut.copies if shards else cut.copies if cut.summed else int(size)
        there = {place[number] for place in found}
        # not all of them: a record may say anything of the size
        gone = list(islice((part for part in range(parts) if part not in there), MOST_MISSING + 1))
        if gone:
            named = ", ".join(map(str, gone[:MOST_MISSING]))
            more = " and more" if len(gone) > MOST_MISSING else ""
            notes.append(f"{what} of {cut.group} {named}{more} are missing")
    return notes


def put_together(
    logical: LogicalTensor, measured: dict[ShardIndex, tuple[Values, FormatErrors]]
) -> tuple[Values, FormatErrors]:
    """The statistics of a tensor from those of its parts."""
    values = {place: of_values for place, (of_values, _) in measured.items()}
    for cut in reversed(logical.cuts):
        groups: dict[ShardIndex, list[Values]] = {}
        for place in sorted(values):
            groups.setdefault(place[:-1], []).append(values[place])
        values = {
            place: join(parts, cut.axis, zigzag=cut.zigzag) if len(parts) > 1 else parts[0]
            for place, parts in groups.items()
        }
    found: FormatErrors = {}
    for _, of_formats in measured.values():
        for key, errors in of_formats.items():
            if key in found:
                found[key] += errors
            else:
                found[key] = errors.copy() if len(measured) > 1 else errors
    return values[()], found
