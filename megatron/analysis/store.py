"""Access a dump as a table with one row per tensor, and load its tensors.

store = TensorStore("enhanced_tensor_logs/mxfp8")
store.records                                      pandas, one row per tensor, from the indexes
store.select(layer=0, tensor_name=["input", "weight"], module="linear_fc*", iteration=range(1, 5))
store.load(store.records.iloc[0])                  one file, memory-mapped
store.load_global(layer=0, module="linear_qkv", tensor_name="output")   joined from all ranks

The table is read from the index files, so no `.pt` file needs to be opened. If a tensor is not
listed in an index, as in a dump of another program, its file is opened to read the metadata. If
the file has no metadata, only the information in the file name is available. Unreadable files are
listed in `problems`. Files that an index lists but that do not exist are listed in `missing`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from numbers import Integral
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from megatron.analysis.dump.loss_curve import loss_curve
from megatron.analysis.dump.packed_codes import read_codes
from megatron.analysis.dump.query import matching
from megatron.analysis.dump.reassembly import data_ranks, reassemble
from megatron.analysis.dump.scan import scan
from megatron.analysis.dump.tensor_files import Problem, UnreadableTensorError, read_tensor
from megatron.analysis.garbage import no_garbage_collection
from megatron.fake_quant.packing import QuantizedTensor

#: Columns that, together with the data-parallel rank, identify a logical tensor (the tensor that
#: all shards form).
IDENTITY = (
    "run_id",
    "iteration",
    "micro_batch",
    "layer_type",
    "layer_idx",
    "module",
    "operation",
    "phase",
    "tensor_name",
)


class TensorStore:
    """The tensors in a folder and its subfolders, in the order in which they were written.

    Raises:
        ValueError: if the folder does not exist, is not a folder, or contains no `.pt` file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        with no_garbage_collection():
            contents = scan(self.folder)
        #: Table with one row per tensor and the columns `dump.record_columns.COLUMNS`.
        self.records: pd.DataFrame = contents.records
        self.missing: pd.DataFrame = contents.missing  #: records whose tensor file is missing
        self.problems: list[Problem] = contents.problems  #: files that could not be read
        #: Lines of the indexes that report an event: {"event": ..., "run_id": ..., "rank": ...}.
        self.events: list[dict[str, Any]] = contents.events
        self._cards = contents.cards

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        runs = len([run for run in self.runs() if run])
        return f"TensorStore({str(self.folder)!r}): {len(self)} tensors of {runs} run(s)"

    def runs(self) -> dict[str, int]:
        """Return the number of tensors of each run, by run ID, starting with the oldest run.

        Tensors without a run ID are counted under the empty string.
        """
        groups = self.records.groupby(self.records["run_id"].fillna(""), sort=False)["timestamp"]
        started = {str(run): str(times.fillna("").min()) for run, times in groups}
        counts = {str(run): len(times) for run, times in groups}
        return {run: counts[run] for run in sorted(counts, key=lambda run: (started[run], run))}

    def only(self, run: str) -> TensorStore:
        """Return a store that contains only the tensors of one run.

        Args:
            run: ID of the run, or `latest` for the most recent one.

        Raises:
            ValueError: if there is no such run.
        """
        runs = [name for name in self.runs() if name]
        wanted = runs[-1] if run == "latest" and runs else run
        if wanted not in runs:
            choices = ", ".join(runs) or "(no run has an ID)"
            raise ValueError(f"no run {run!r} in {self.folder}; give 'latest' or one of: {choices}")
        part = copy.copy(self)
        part.records = matching(self.records, {"run_id": wanted}).reset_index(drop=True)
        part.missing = matching(self.missing, {"run_id": wanted}).reset_index(drop=True)
        part.events = [event for event in self.events if event.get("run_id") == wanted]
        return part

    def run_card(self, run_id: str) -> dict[str, Any]:
        """Return the run card of a run, with its arguments, formats, versions and topology.

        The result is empty if the run has no card.
        """
        return self._cards.get(run_id, {})

    def loss_curve(self) -> pd.DataFrame:
        """Return the loss and the gradient norm of each iteration, as far as the dump has them.

        The columns are `run_id`, `iteration`, `loss`, `grad_norm` and `finite`. An unknown number
        is NaN; `finite` is false if a known number is NaN or infinite. The table also has the
        iterations in which no tensor was collected. It is empty for a dump of an older version,
        and if the trainer has not called `tensor_saver.observe`.
        """
        return loss_curve(self.events)

    def select(self, **conditions: Any) -> pd.DataFrame:
        """Return the records that meet all conditions; the table is empty if there are none.

        Each condition names a column and gives a value, a list of values, a range, or None
        (unknown). `layer` is short for `layer_idx`; the coordinates of a rank are `rank`, `tp`,
        `pp`, `dp`, `cp`, `ep` and `etp`. A condition on `module` is a shell pattern that matches
        the dotted name of the module or the end of it: `linear_qkv`, `layers.3.*`, `linear_fc*`.

        Raises:
            ValueError: if a column is unknown, or a value is never valid for its column.
        """
        return matching(self.records, conditions)

    def load(self, record: Any) -> Tensor:
        """Return one tensor, memory-mapped so that its values are read only when accessed.

        Args:
            record: a row of `records` (from `iloc` or `itertuples`), a table with one row, or the
                index label of a row.

        Raises:
            ValueError: if `record` is a table that does not have exactly one row.
            UnreadableTensorError: if the file is corrupt or contradicts its record.
        """
        return self.load_with_metadata(record)[0]

    def load_with_metadata(self, record: Any) -> tuple[Tensor, dict[str, Any] | None]:
        """Return what `load` returns, and the metadata in the file (None if the file has none).

        Raises:
            ValueError, UnreadableTensorError: as for `load`.
        """
        record = self._row(record)
        path, shape = (_field(record, name) for name in ("path", "shape"))
        tensor, metadata = read_tensor(Path(path))
        if shape is not None and list(tensor.shape) != list(shape):
            raise UnreadableTensorError(
                Path(path),
                f"holds a tensor of shape {list(tensor.shape)}, but the shape in its record is "
                f"{list(shape)}",
            )
        return tensor, metadata

    def load_codes(self, record: Any) -> QuantizedTensor:
        """Return the memory-mapped codes and scales of a matmul operand.

        `megatron.fake_quant.dequantize` converts the result to values.

        Args:
            record: record of a tensor whose name ends in `_codes`, in any form that `load` accepts.

        Raises:
            ValueError: if the tensor has no codes, or `record` is a table that does not have
                exactly one row.
            UnreadableTensorError: if the file is corrupt or does not contain codes and scales.
        """
        record = self._row(record)
        metadata = {name: _field(record, name) for name in ("codes", "format")}
        if not isinstance(metadata["codes"], dict):
            name = _field(record, "tensor_name")
            raise ValueError(f"{name} has no codes; load it with load")
        return read_codes(Path(_field(record, "path")), metadata)

    def load_global(
        self, record: Any = None, *, dp: int | None = None, **conditions: Any
    ) -> Tensor:
        """Return one logical tensor, reassembled from the shards of all ranks.

        The field `dims` of the records describes the sharding. Shards are joined along the marked
        dimension (`h[tp]`, `s[cp:zigzag]`). Partial sums (`| partial[tp]`) are added in float64 and
        rounded once. Replicas must be bit-identical. If activation recomputation repeated the
        forward pass, the tensors of the first pass are used.

        Args:
            record: any shard of the tensor, or a table of its shards; the other shards are looked
                up.
            dp: data-parallel rank, required if there are several; see also `load_global_all`.
                Ignored for a weight, which is the same on all of them.
            conditions: conditions on columns, as in `select`. They replace or supplement `record`,
                and must identify one logical tensor.

        Raises:
            ValueError: if no tensor or several tensors match; if shards are missing, duplicated or
                do not fit together; or if replicas differ.
        """
        frame = self._one_tensor(record, conditions)
        ranks = sorted(frame["data_rank"].unique())
        shared = len(ranks) == 1 and (frame["tensor_name"] == "weight").all()
        if dp is not None and not shared:
            frame = frame[frame["data_rank"] == dp]
            if frame.empty:
                raise ValueError(f"no data-parallel rank {dp}; choose from {_listed(ranks)}")
        elif len(ranks) > 1:
            raise ValueError(
                f"data-parallel ranks {_listed(ranks)} hold different data; give dp=..., or use "
                "load_global_all, which returns the tensors of all ranks in order"
            )
        return reassemble(frame, self.load)

    def load_global_all(self, record: Any = None, **conditions: Any) -> list[Tensor]:
        """Return a list with the logical tensor of each data-parallel rank; see `load_global`."""
        frame = self._one_tensor(record, conditions)
        return [reassemble(part, self.load) for _, part in frame.groupby("data_rank", sort=True)]

    def _one_tensor(self, record: Any, conditions: dict[str, Any]) -> pd.DataFrame:
        """Return the shards of one logical tensor on all ranks, with a column `data_rank`."""
        if record is not None:
            if isinstance(record, pd.DataFrame) and len(record):
                _check_one(record)
                record = record.iloc[0]
            record = self._row(record)
            own = {name: _field(record, name) for name in IDENTITY}
            own = {name: None if pd.isna(value) else value for name, value in own.items()}
            conditions = own | conditions
        frame = self.select(**conditions)
        if "recomputed" not in conditions and frame["recomputed"].nunique() > 1:
            frame = frame[frame["recomputed"] == False]  # noqa: E712  the dtype is object
        if frame.empty and conditions.get("tensor_name") == "weight":
            # a weight is the same in all micro-batches of an iteration and may be saved in only one
            rest = {name: value for name, value in conditions.items() if name != "micro_batch"}
            same_pass = {name: value for name, value in conditions.items() if name != "tensor_name"}
            frame = self.select(**rest) if len(self.select(**same_pass)) else frame
        if frame.empty:
            given = ", ".join(f"{name}={value!r}" for name, value in conditions.items())
            raise ValueError(
                f"no tensor has {given}; see `records` of this store, or give fewer conditions"
            )
        if any(isinstance(each, dict) for each in frame["codes"]):
            raise ValueError(
                "codes belong to the blocks of one rank's operand and cannot be joined; load each "
                "with load_codes"
            )
        _check_one(frame)
        return frame.assign(data_rank=data_ranks(frame))

    def _row(self, record: Any) -> Any:
        """Return the row that `record` refers to; `load` lists the accepted forms of `record`."""
        if isinstance(record, pd.DataFrame):
            if len(record) != 1:
                raise ValueError(
                    f"a table of {len(record)} tensors was given; give one of its rows "
                    "(table.iloc[0], or each of table.itertuples())"
                )
            return record.iloc[0]
        return self.records.loc[record] if isinstance(record, Integral) else record


def selected(store: TensorStore, conditions: Mapping[str, Any]) -> pd.DataFrame:
    """Return the records in a store that meet all conditions.

    Raises:
        ValueError: if a column is unknown, or no tensor meets all conditions.
    """
    records = store.select(**conditions)
    if records.empty:
        given = " ".join(f"{name}={_listed_values(value)}" for name, value in conditions.items())
        raise ValueError(f"no tensor in {store.folder} meets {given}")
    return records


def _listed_values(value: Any) -> str:
    """Return the values of a condition as text, such as `0,1` for a list."""
    if isinstance(value, (list, tuple, range, set)):
        return ",".join(map(str, value))
    return str(value)


def _check_one(frame: pd.DataFrame) -> None:
    """Raise ValueError if a table contains shards of more than one tensor."""
    if several := [name for name in IDENTITY if frame[name].nunique(dropna=False) > 1]:
        ways = ", ".join(_choice(name, list(frame[name].unique())) for name in several)
        raise ValueError(
            f"{len(frame)} records of more than one tensor match; give {ways}, or one of the "
            "records (table.iloc[0])"
        )


def _choice(name: str, values: list[Any]) -> str:
    """Return a condition on a column as text that lists its values, such as `iteration=1 or 2`."""
    shown = [repr(value) if isinstance(value, str) else str(value) for value in values[:6]]
    more = f" or {len(values) - 6} more" if len(values) > 6 else ""
    return f"{name.removesuffix('_idx')}={' or '.join(shown)}{more}"


def _field(record: Any, name: str) -> Any:
    """Return a field of a row; the row is a named tuple or a Series.

    A field of a Series cannot be read as an attribute, because `Series.shape` hides `shape`.
    """
    return record[name] if isinstance(record, pd.Series) else getattr(record, name)


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in values)
