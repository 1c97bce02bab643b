"""Verify a dump: read every file, and recompute every result whose operands and formats allow it.

1. Files: each file is readable, agrees with its record in the index (which tensor it is, format,
   shape and dtype), and contains only finite values.
2. Replicas: tensors that should be equal on several ranks are bit-identical. The same applies to
   tensors that activation recomputation saved a second time.
3. Linear layers and attention: each output and gradient can be recomputed from the saved operands
   in the recorded formats, or from the codes of operands that were rounded stochastically.
   `recompute_linear` and `recompute_attention` describe and justify the allowed deviations.
4. Completeness: every tensor that the run should have saved is present; see `completeness`.

No check is skipped silently: results that cannot be checked are counted by reason.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from megatron.analysis.dump.reassembly import data_ranks, differences, parse_dims
from megatron.analysis.dump.tensor_files import UnreadableTensorError, read_tensor
from megatron.analysis.store import IDENTITY, TensorStore
from megatron.analysis.verification import completeness
from megatron.analysis.verification.recompute_linear import Outcome
from megatron.analysis.verification.recorded_formats import NotCheckedError
from megatron.analysis.verification.results import Finding, Results

#: Fields that must be the same in the metadata of a file and in its record in the index.
_FIELDS = (*IDENTITY, "format", "dims")


@dataclass
class Verdict:
    """Findings of a verification, with counts of checked and unchecked results."""

    findings: list[Finding] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)  #: number of passed checks, by kind
    #: Number of unchecked tensors, by reason.
    unchecked: Counter[str] = field(default_factory=Counter)

    @property
    def errors(self) -> list[Finding]:
        """Findings that are errors, without the notes."""
        return [finding for finding in self.findings if not finding.note]


@dataclass(frozen=True)
class Verification:
    """Settings and checks for the verification of one dump."""

    store: TensorStore
    exact: bool = False  #: True if results must be bit-identical
    slack: float = 1.0  #: factor by which the allowed deviations are multiplied
    progress: Callable[[], object] = lambda: None  #: called after each checked file and pass
    verdict: Verdict = field(default_factory=Verdict)

    @staticmethod
    def steps(store: TensorStore) -> int:
        """Return the approximate number of times that `progress` is called, for a progress bar."""
        keys = ["run_id", "rank", "iteration", "micro_batch", "module"]
        return len(store) + len(store.records[keys].drop_duplicates())

    def run(self) -> Verdict:
        """Check the whole dump and return the verdict."""
        store, findings = self.store, self.verdict.findings
        findings += [Finding("file", str(bad.path), bad.why) for bad in store.problems]
        for row in store.missing.itertuples():
            why = "listed in an index, but missing"
            findings.append(Finding("file", str(row.path), why))
        records = store.records.assign(data_rank=data_ranks(store.records))
        # use an array, because pandas would interpret an empty list as a selection of columns
        good = records[np.array([self._file_is_good(row) for row in records.itertuples()], bool)]
        known = good[_identified(good) & good["dims"].notna()]
        if bare := len(good) - len(known):
            reason = "tensors that their metadata do not identify: only their values were read"
            self.verdict.unchecked[reason] += bare
        of_attention = known["codes"].notna() & (known["layer_type"] == "attention")
        if of_attention.any():
            reason = "codes of attention: only their files were read"
            self.verdict.unchecked[reason] += int(of_attention.sum())
        known = self._without_recomputed(known[~of_attention])
        self._replicas(known[known["codes"].isna()])
        for run_id, of_run in known.groupby("run_id", sort=False):
            self._run(str(run_id), of_run)
        return self.verdict

    def _run(self, run_id: str, good: pd.DataFrame) -> None:
        """Check the completeness and the results of one run.

        Args:
            run_id: ID of the run.
            good: records of the run whose files passed the check.
        """
        card = self.store.run_card(run_id)
        records = pd.concat(
            [frame for frame in (self.store.records, self.store.missing) if len(frame)]
        )
        records = records[_identified(records)]
        records = records[records["run_id"] == run_id]
        events = [event for event in self.store.events if event.get("run_id") == run_id]
        self.verdict.findings += completeness.check_run(records, card, events)
        for group, row, outcome in Results(self.store, good, card, self.slack).check(self.progress):
            self._count(group, row, outcome)

    def _count(self, what: str, row: Any, outcome: Outcome) -> None:
        """Count a result as checked or unchecked; if it is wrong, add a finding instead.

        Args:
            what: kind of layer, such as "attention".
            row: record of the result.
            outcome: outcome of its recomputation.
        """
        if isinstance(outcome, NotCheckedError):
            self.verdict.unchecked[str(outcome)] += 1
            return
        if outcome.wrong or (self.exact and not outcome.exact):
            text = f"{row.tensor_name} of {row.module} fails the check: {outcome.text}"
            self.verdict.findings.append(Finding("result", row.path, text))
        else:
            how = "bit for bit" if outcome.exact else "within what rounding allows"
            self.verdict.checked[f"results of {what}, {how}"] += 1

    def _file_is_good(self, row: Any) -> bool:
        """Return whether a file is readable and agrees with its record.

        If it does not, or if it contains NaN or Inf, a finding is added.
        """
        self.progress()
        try:
            tensor, metadata = self.store.load_with_metadata(row)
            _check_identity(row, metadata)
            self._check_metadata(row, tensor)
        except (UnreadableTensorError, ValueError) as error:
            text = error.why if isinstance(error, UnreadableTensorError) else str(error)
            self.verdict.findings.append(Finding("file", row.path, text))
            return False
        self.verdict.checked["files"] += 1
        if tensor.is_floating_point() and tensor.element_size() == 1:
            tensor = tensor.float()  # torch.isfinite does not support 8-bit floats
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            nan = int(tensor.isnan().sum())
            text = f"{nan} NaN and {int(tensor.isinf().sum())} Inf of {tensor.numel()} values"
            self.verdict.findings.append(Finding("values", row.path, text))
        return True

    def _check_metadata(self, row: Any, tensor: Tensor) -> None:
        """Check that a tensor's dtype and shape agree with its record.

        Raises:
            ValueError: if they do not agree, or if the `dims` of the record are invalid.
        """
        dtype = str(tensor.dtype).removeprefix("torch.")
        if row.dtype is not None and dtype != row.dtype:
            raise ValueError(f"holds {dtype}, but the dtype in its record is {row.dtype}")
        if row.dims is None:
            return
        cuts, letters = parse_dims(row.dims), row.dims.partition("|")[0].split()
        if len(letters) != tensor.dim():
            raise ValueError(f"its shape is {list(tensor.shape)}, but its dims are {row.dims!r}")
        if row.global_shape is None or row.slice is not None:
            return
        shape = list(tensor.shape)
        for cut in cuts:
            if cut.axis is not None and not pd.isna(size := getattr(row, f"{cut.group}_size")):
                shape[cut.axis] *= int(size) // cut.copies
        if shape != list(row.global_shape):
            raise ValueError(
                f"shards of shape {list(tensor.shape)} with dims {row.dims!r} form a tensor of "
                f"shape {shape}, but the global shape in its record is {list(row.global_shape)}"
            )

    def _without_recomputed(self, records: pd.DataFrame) -> pd.DataFrame:
        """Return the records without those that activation recomputation saved a second time.

        The tensors of a repeated pass are compared with the tensors of the first pass.
        """
        keys = [*IDENTITY, "rank"]
        ordered = records.sort_values("counter", kind="stable")
        again = ordered.duplicated(keys)
        if again.any():
            own = zip(*(ordered[~again][name] for name in keys), strict=True)
            first = dict(zip(own, ordered["path"][~again], strict=True))
            for row in ordered[again].itertuples():
                key = tuple(getattr(row, name) for name in keys)
                self._same(row, first[key], "the tensor of the first pass")
        return ordered[~again].sort_index()

    def _replicas(self, records: pd.DataFrame) -> None:
        """Compare each shard's replicas with the first one, and report differences as findings."""
        firsts: dict[tuple[Any, ...], Any] = {}
        for row in records.itertuples():
            shard = tuple(getattr(row, cut.group) for cut in parse_dims(row.dims))
            key = (*(getattr(row, name) for name in IDENTITY), row.data_rank, shard)
            first = firsts.setdefault(key, row)
            if first is not row:
                self._same(row, first.path, f"its replica on rank {first.rank}")

    def _same(self, row: Any, other: str, what: str) -> None:
        difference = differences(*(read_tensor(Path(path))[0] for path in (other, row.path)))
        if difference:
            text = f"{row.tensor_name} of {row.module} differs from {what} ({Path(other).name})"
            self.verdict.findings.append(Finding("replica", row.path, f"{text}: {difference}"))
        else:
            self.verdict.checked["replicas"] += 1


def verify(store: TensorStore, *, exact: bool = False, slack: float = 1.0) -> Verdict:
    """Verify a dump and return the verdict; see `Verification` for the options."""
    return Verification(store, exact, slack).run()


def _identified(records: pd.DataFrame) -> Any:
    """Return a mask of the records that state their run, pass, rank, layer and tensor name."""
    return records[[*IDENTITY, "rank"]].notna().all(axis=1)


def _check_identity(row: Any, metadata: Mapping[str, Any] | None) -> None:
    """Check that the metadata in a file and its record in the index describe the same tensor.

    Raises:
        ValueError: if they do not.
    """
    if metadata is None:
        return
    pairs = {name: (metadata[name], getattr(row, name)) for name in _FIELDS if name in metadata}
    rank = metadata.get("rank")
    if isinstance(rank, dict):
        pairs["rank"] = rank.get("world"), row.rank
    for name, pair in pairs.items():
        own, indexed = (None if _is_null(value) else value for value in pair)
        if own != indexed:
            raise ValueError(f"{name} is {own!r} in its metadata, but {indexed!r} in the index")


def _is_null(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))
