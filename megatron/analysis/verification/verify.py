"""Whether a dump can be trusted: every file read, every result recomputed, everything there.

1. files: each can be read, has the shape and dtype of its record, and finite values only;
2. replicas: the ranks that should have one tensor have the same bits, and a recomputed forward pass
   has those of the first;
3. linear layers and attention: each output and gradient follows from the saved operands under the
   recorded formats (`recompute`, `recompute_attention`: what is allowed, and why), or from their
   codes where they were rounded stochastically;
4. schedule: what must be there is there (`schedule`).

Nothing is skipped in silence: what cannot be checked is counted, with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
from megatron.analysis.verification.finding import Finding
from megatron.analysis.verification.recompute_linear import Recomputation
from megatron.analysis.verification.recorded_formats import NotCheckedError
from megatron.analysis.verification.results import Results


@dataclass
class Verdict:
    """What was found, and how much was looked at."""

    findings: list[Finding] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)  #: by what: how many
    unchecked: Counter[str] = field(default_factory=Counter)  #: by reason: how many results

    @property
    def errors(self) -> list[Finding]:
        """The findings that make the dump wrong."""
        return [finding for finding in self.findings if not finding.note]


@dataclass(frozen=True)
class Verification:
    """One verification: what is read, and how strict it is."""

    store: TensorStore
    exact: bool = False  #: results must be the same bit for bit: on the machine of the run
    slack: float = 1.0  #: multiplies what rounding allows
    progress: Callable[[], object] = lambda: None  #: called once a file and once a pass
    verdict: Verdict = field(default_factory=Verdict)

    @staticmethod
    def steps(store: TensorStore) -> int:
        """How often `progress` is called, about."""
        keys = ["run_id", "rank", "iteration", "micro_batch", "module"]
        return len(store) + len(store.records[keys].drop_duplicates())

    def run(self) -> Verdict:
        """Check everything."""
        store, found = self.store, self.verdict.findings
        found += [Finding("file", str(each.path), each.why) for each in store.problems]
        for row in store.missing.itertuples():
            found.append(Finding("file", str(row.path), "an index names it, but it is not there"))
        records = store.records.assign(data_rank=data_ranks(store.records))
        # an empty list would choose columns
        good = records[np.array([self._file_is_good(row) for row in records.itertuples()], bool)]
        known = good[_identified(good) & good["dims"].notna()]
        if bare := len(good) - len(known):
            reason = "tensors whose metadata do not say what they are: only values were read"
            self.verdict.unchecked[reason] += bare
        of_attention = known["codes"].notna() & (known["layer_type"] == "attention")
        if of_attention.any():
            reason = "codes of attention, of which only the file was read"
            self.verdict.unchecked[reason] += int(of_attention.sum())
        known = self._without_recomputed(known[~of_attention])
        self._replicas(known[known["codes"].isna()])
        for run_id, of_run in known.groupby("run_id", sort=False):
            self._run(str(run_id), of_run)
        return self.verdict

    def _run(self, run_id: str, good: pd.DataFrame) -> None:
        """Schedule and results of one run."""
        card = self.store.run_card(run_id)
        everything = pd.concat(
            [frame for frame in (self.store.records, self.store.missing) if len(frame)]
        )
        everything = everything[_identified(everything)]
        own = everything["run_id"] == run_id
        events = [event for event in self.store.events if event.get("run_id") == run_id]
        self.verdict.findings += completeness.check_run(
            everything[own], card, events, others=everything[~own]
        )
        for group, row, outcome in Results(self.store, good, card, self.slack).check(self.progress):
            self._note(group, row, outcome)

    def _note(self, what: str, row: Any, outcome: Recomputation | NotCheckedError) -> None:
        """Count a result; an error in it is a finding."""
        if isinstance(outcome, NotCheckedError):
            self.verdict.unchecked[str(outcome)] += 1
            return
        if outcome.wrong or (self.exact and not outcome.exact):
            text = f"{row.tensor_name} of {row.module} does not follow: {outcome.text}"
            self.verdict.findings.append(Finding("result", row.path, text))
        else:
            how = "bit for bit" if outcome.exact else "within what rounding allows"
            self.verdict.checked[f"results of {what}, {how}"] += 1

    def _file_is_good(self, row: Any) -> bool:
        """Whether a file is what its record says; that its values are finite is said apart."""
        self.progress()
        try:
            tensor = self.store.load(row)
            self._check_metadata(row, tensor)
        except (UnreadableTensorError, ValueError) as error:
            text = error.why if isinstance(error, UnreadableTensorError) else str(error)
            self.verdict.findings.append(Finding("file", row.path, text))
            return False
        self.verdict.checked["files"] += 1
        if tensor.is_floating_point() and tensor.element_size() == 1:
            tensor = tensor.float()  # torch has no isfinite for 8 bits
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            nan = int(tensor.isnan().sum())
            text = f"{nan} NaN and {int(tensor.isinf().sum())} Inf of {tensor.numel()} values"
            self.verdict.findings.append(Finding("values", row.path, text))
        return True

    def _check_metadata(self, row: Any, tensor: Tensor) -> None:
        """Dtype and global shape."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if row.dtype is not None and dtype != row.dtype:
            raise ValueError(f"holds {dtype}, but its record says {row.dtype}")
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
                shape[cut.axis] *= int(size)
        if shape != list(row.global_shape):
            raise ValueError(
                f"its shape {list(tensor.shape)} with dims {row.dims!r} makes {shape} of all "
                f"shards, but its record says {list(row.global_shape)}"
            )

    def _without_recomputed(self, records: pd.DataFrame) -> pd.DataFrame:
        """Forward tensors once; those of a recomputed pass are compared with the first."""
        keys = [*IDENTITY, "rank"]
        ordered = records.sort_values("counter", kind="stable")
        again = ordered.duplicated(keys)
        if again.any():
            own = zip(*(ordered[~again][name] for name in keys), strict=True)
            first = dict(zip(own, ordered["path"][~again], strict=True))
            for row in ordered[again].itertuples():
                key = tuple(getattr(row, name) for name in keys)
                self._same(row, first[key], "the first of the same pass")
        return ordered[~again].sort_index()

    def _replicas(self, records: pd.DataFrame) -> None:
        """Every further copy of a shard against the first."""
        firsts: dict[tuple[Any, ...], Any] = {}
        for row in records.itertuples():
            place = tuple(getattr(row, cut.group) for cut in parse_dims(row.dims))
            key = (*(getattr(row, name) for name in IDENTITY), row.data_rank, place)
            first = firsts.setdefault(key, row)
            if first is not row:
                self._same(row, first.path, f"its replica on rank {first.rank}")

    def _same(self, row: Any, other: str, what: str) -> None:
        difference = differences(*(read_tensor(Path(path))[0] for path in (other, row.path)))
        if difference:
            text = f"{row.tensor_name} of {row.module} is not {what} ({Path(other).name})"
            self.verdict.findings.append(Finding("replica", row.path, f"{text}: {difference}"))
        else:
            self.verdict.checked["replicas"] += 1


def verify(store: TensorStore, *, exact: bool = False, slack: float = 1.0) -> Verdict:
    """Check a dump and return what is wrong with it; the options are those of `Verification`."""
    return Verification(store, exact, slack).run()


def _identified(records: pd.DataFrame) -> Any:
    """Which records say of what run, pass, rank and layer they are."""
    return records[[*IDENTITY, "rank"]].notna().all(axis=1)
