"""A dump as a table of its records, from which tensors are picked and read.

store = TensorStore("enhanced_tensor_logs/mxfp8")
store.records                                      pandas, a row a tensor; no .pt file was opened
store.select(layer=0, tensor_name=["input", "weight"], module="linear_fc*", iteration=range(1, 5))
store.load(store.records.iloc[0])                  memory-mapped
store.load_global(layer=0, module="linear_qkv", tensor_name="output")   over all ranks

The table comes from the index files. Tensors that stand in no index (a dump of an older version, or
of another program) are opened for their metadata, or known by their name alone. What cannot be read
is in `problems`, what an index names in vain in `missing`.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from megatron.analysis.dump.packed_codes import read_codes
from megatron.analysis.dump.query import matching
from megatron.analysis.dump.reassembly import data_ranks, reassemble
from megatron.analysis.dump.scan import scan
from megatron.analysis.dump.tensor_files import Problem, UnreadableTensorError, read_tensor
from megatron.fake_quant.packing import QuantizedTensor

#: What tells one logical tensor from another, besides the data-parallel rank.
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
    """The tensors below a folder, in the order in which they were written.

    Raises:
        ValueError: the folder is missing, is no folder, or holds no `.pt` file.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        with _no_garbage_collection():
            found = scan(self.folder)
        self.records: pd.DataFrame = found.records  #: see `record_table`
        self.missing: pd.DataFrame = found.missing  #: in an index, but not in the folder
        self.problems: list[Problem] = found.problems  #: files that were left out
        #: what the indexes say besides their records: {"event": ..., "run_id": ..., "rank": ...}
        self.events: list[dict[str, Any]] = found.events
        self._cards = found.cards

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        runs = len([run for run in self.runs() if run])
        return f"TensorStore({str(self.folder)!r}): {len(self)} tensors of {runs} run(s)"

    def runs(self) -> dict[str, int]:
        """Number of tensors by run, oldest first; those of unknown origin under the empty name."""
        groups = self.records.groupby(self.records["run_id"].fillna(""), sort=False)["timestamp"]
        started = {str(run): str(times.fillna("").min()) for run, times in groups}
        counts = {str(run): len(times) for run, times in groups}
        return {run: counts[run] for run in sorted(counts, key=lambda run: (started[run], run))}

    def only(self, run: str) -> TensorStore:
        """The part that belongs to one run, named by its id; `latest` is the one that started last.

        Raises:
            ValueError: no such run.
        """
        runs = [name for name in self.runs() if name]
        wanted = runs[-1] if run == "latest" and runs else run
        if wanted not in runs:
            found = ", ".join(runs) or "none that has an id"
            raise ValueError(f"no run {run!r} in {self.folder}; give 'latest' or one of: {found}")
        part = copy.copy(self)
        part.records = matching(self.records, {"run_id": wanted}).reset_index(drop=True)
        part.missing = matching(self.missing, {"run_id": wanted}).reset_index(drop=True)
        part.events = [event for event in self.events if event.get("run_id") == wanted]
        return part

    def run_card(self, run_id: str) -> dict[str, Any]:
        """Arguments, formats, versions and topology of a run; empty where there is no card."""
        return self._cards.get(run_id, {})

    def select(self, **conditions: Any) -> pd.DataFrame:
        """The records that meet all conditions; none is an empty table.

        A condition names a column (`layer` is short for `layer_idx`; the rank's coordinates are
        `rank`, `tp`, `pp`, `dp`, `cp`, `ep`, `etp`) and gives a value, a list of values, a range,
        or None for unknown. A module is given by a shell pattern that fits its dotted name, or the
        end of it: `linear_qkv`, `layers.3.*`, `linear_fc*`.

        Raises:
            ValueError: no such column, or a value that it can never have.
        """
        return matching(self.records, conditions)

    def load(self, record: Any) -> Tensor:
        """One tensor, memory-mapped: its pages are read when its values are.

        Args:
            record: a row of `records` (as `iloc` or `itertuples` give it), a table of that one row,
                or its label.

        Raises:
            ValueError: a table of no row, or of several.
            UnreadableTensorError: the file is corrupt, or is not what its record says.
        """
        record = self._row(record)
        path, shape = (_field(record, name) for name in ("path", "shape"))
        tensor, _ = read_tensor(Path(path))
        if shape is not None and list(tensor.shape) != list(shape):
            raise UnreadableTensorError(
                Path(path),
                f"holds a tensor of shape {list(tensor.shape)}, but its record says {list(shape)}",
            )
        return tensor

    def load_codes(self, record: Any) -> QuantizedTensor:
        """Codes and scales of a matmul's operand, memory-mapped; `dequantize` gives its values.

        Args:
            record: as in `load`, of a tensor whose name ends in `_codes`.

        Raises:
            ValueError: a tensor of another kind, or a table as in `load`.
            UnreadableTensorError: as of `load`.
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
        """One logical tensor, put together from the shards of all ranks by their `dims`.

        Shards are joined along the dimension that is marked (`h[tp]`, `s[cp:zigzag]`), partial sums
        (`| partial[tp]`) are added in float64 and rounded once, and replicas must agree in every
        bit. Of a forward pass that was run again by activation recomputation, the first counts.

        Args:
            record: one shard, whose others are found, or a table of shards; or None, and
            conditions: as in `select`, which together name one logical tensor.
            dp: whose data, where there are several data-parallel ranks; see also `load_global_all`.

        Raises:
            ValueError: no tensor or several, shards are missing, twice there or no shards of one
                tensor, or replicas differ; the message says which.
        """
        frame = self._one_tensor(record, conditions)
        ranks = sorted(frame["data_rank"].unique())
        if dp is not None:
            frame = frame[frame["data_rank"] == dp]
            if frame.empty:
                raise ValueError(f"no data-parallel rank {dp}; there are {_listed(ranks)}")
        elif len(ranks) > 1:
            raise ValueError(
                f"data-parallel ranks {_listed(ranks)} have other data each; give dp=..., or take "
                "load_global_all, which gives all of them in order"
            )
        return reassemble(frame, self.load)

    def load_global_all(self, record: Any = None, **conditions: Any) -> list[Tensor]:
        """The logical tensor of each data-parallel rank, in their order; else as `load_global`."""
        frame = self._one_tensor(record, conditions)
        return [reassemble(part, self.load) for _, part in frame.groupby("data_rank", sort=True)]

    def _one_tensor(self, record: Any, conditions: dict[str, Any]) -> pd.DataFrame:
        """The shards of one logical tensor over all data-parallel ranks; `data_rank` is whose."""
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
            frame = frame[frame["recomputed"] == False]  # noqa: E712  a column of objects
        if frame.empty and conditions.get("tensor_name") == "weight":
            # the same in every micro-batch of an iteration: it may be written with one of them only
            rest = {name: value for name, value in conditions.items() if name != "micro_batch"}
            same_pass = {name: value for name, value in conditions.items() if name != "tensor_name"}
            frame = self.select(**rest) if len(self.select(**same_pass)) else frame
        if frame.empty:
            asked = ", ".join(f"{name}={value!r}" for name, value in conditions.items())
            raise ValueError(f"no tensor with {asked}; look into records, or select less")
        if any(isinstance(each, dict) for each in frame["codes"]):
            raise ValueError(
                "codes stand for blocks of one rank's operand and are not put together; load each "
                "with load_codes"
            )
        _check_one(frame)
        return frame.assign(data_rank=data_ranks(frame))

    def _row(self, record: Any) -> Any:
        """What `load` takes, as one row."""
        if isinstance(record, pd.DataFrame):
            if len(record) != 1:
                raise ValueError(
                    f"a table of {len(record)} tensors was given; give one of its rows "
                    "(table.iloc[0], or each of table.itertuples())"
                )
            return record.iloc[0]
        return self.records.loc[record] if isinstance(record, Integral) else record


def _check_one(frame: pd.DataFrame) -> None:
    """Refuse shards of several tensors."""
    if several := [name for name in IDENTITY if frame[name].nunique(dropna=False) > 1]:
        ways = ", ".join(_choice(name, list(frame[name].unique())) for name in several)
        raise ValueError(
            f"{len(frame)} records of more than one tensor match; give {ways}, or one of the "
            "records (table.iloc[0])"
        )


def _choice(name: str, values: list[Any]) -> str:
    """Return a selection with its possible values, as in `iteration=1 or 2`."""
    shown = [repr(value) if isinstance(value, str) else str(value) for value in values[:6]]
    more = f" or {len(values) - 6} more" if len(values) > 6 else ""
    return f"{name.removesuffix('_idx')}={' or '.join(shown)}{more}"


def _field(record: Any, name: str) -> Any:
    """Of a row as a Series, whose `shape` is its own, or as a named tuple."""
    return record[name] if isinstance(record, pd.Series) else getattr(record, name)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """It looks at every record again and again while they are made, which doubles the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _listed(values: Any) -> str:
    return ", ".join(str(value) for value in values)
