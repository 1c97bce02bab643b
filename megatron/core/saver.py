"""One rank's collection: decides what is collected, numbers it and hands it to the writer.

A write that fails and a limit that is reached both end the writing of this rank and nothing else:
layers go on showing their tensors, because the ranks of a parallel group must communicate alike.
"""

import contextlib
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron.core._record_writer import RecordWriter, own_copy
from megatron.core.collection_clock import clock
from megatron.core.collection_limits import OVERHEAD, Limits, gib
from megatron.core.module_identity import ModuleIdentity
from megatron.core.run_card import collect_run_card, rank_coordinates
from megatron.core.selection import Selection, describe
from megatron.tensor_record import TensorRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """What to collect and where."""

    directory: Path
    quant_type: str
    control_iter: int  #: iterations to collect, 0: no end
    selection: Selection
    limits: Limits  #: of this rank


class Writer(Protocol):
    """Where records go."""

    records: int
    bytes: int

    def write(self, tensor: torch.Tensor, record: TensorRecord) -> None: ...
    def append(self, line: dict[str, Any]) -> None: ...
    def write_run_card(self, card: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class TensorSaver:
    """See the module's docstring."""

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        card: dict[str, Any] | None = None,
        writer: Writer | None = None,
    ):
        self.settings = settings
        self.error: str | None = None  #: why writing failed
        self.limit: str | None = None  #: which limit was reached, and where
        self.dropped = [0, 0]  #: tensors that were not written for that, and their bytes
        self.ranks: list[dict[str, Any]] = []  #: how each rank fared, known after `settle`
        self.coordinates = rank_coordinates()
        self.run_id = run_id
        self.collected = 0  #: iterations
        self._counter = 0
        self._wanted: dict[tuple[ModuleIdentity, str], bool] = {}
        self._writes = self.coordinates["world"] in settings.selection.ranks
        self._card = card or {}
        self._writer = writer or RecordWriter(settings.directory, run_id, self.coordinates["world"])
        self.write_card("running")

    @classmethod
    def start(cls, settings: Settings, run_id: str, args: dict[str, Any], **more: Any):
        """One that writes; `more` goes to the run card."""
        card = {}
        if rank_coordinates()["world"] == 0:
            chosen = {"selection": describe(settings.selection)}
            card = collect_run_card(run_id, args) | more | chosen
            card["limits_of_each_rank"] = settings.limits.describe()
        return cls(settings, run_id, card)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the run."""
        return self.coordinates["world"] == 0

    @property
    def complete(self) -> bool:
        """Whether as many iterations are done as `control_iter` says; the same on every rank."""
        return 0 < self.settings.control_iter <= self.collected

    def end_iteration(self) -> None:
        """Count the iteration that is now done if it was collected."""
        if clock.iteration in self.settings.selection.iterations:
            self.collected += 1

    def wants(self, identity: ModuleIdentity, layer_type: str) -> bool:
        """Whether a layer shows its tensors at this moment; the same on every rank that has it."""
        now, selection = clock.micro_batch, self.settings.selection
        if now is None or self.complete or now.iteration not in selection.iterations:
            return False
        if selection.micro_batches and now.index >= selection.micro_batches:
            return False
        key = (identity, layer_type)
        if key not in self._wanted:
            self._wanted[key] = selection.wants(identity, layer_type)
        return self._wanted[key]

    def selects(self, tensor_name: str) -> bool:
        """Whether tensors of that name are collected, by any rank."""
        return tensor_name in self.settings.selection.names

    def takes(self, tensor_name: str) -> bool:
        """Whether this rank writes tensors of that name."""
        return self._writes and self.error is None and self.selects(tensor_name)

    def save(self, tensor: torch.Tensor, **fields: Any) -> None:
        """Write one tensor, or the part that is selected; a failure or a limit ends the collection
        of this rank, not the training.
        """
        if self.error is not None:
            return
        part, where = self.settings.selection.slices.cut(tensor.detach(), fields["dims"])
        if part is None:
            return
        try:
            if self._has_room(part.numel() * part.element_size(), fields):
                self._write(own_copy(part), fields | {"slice": where})
        except (OSError, RuntimeError) as error:  # torch's writer has errors of its own
            self.error = (
                f"collection stopped after {self._writer.records} tensors: cannot write to "
                f"{self.settings.directory}: {error}; free space or name another --tensor-save-dir"
            )
            logger.error(self.error)
            self._note({"event": "failed", "why": self.error})

    def _has_room(self, size: int, fields: dict[str, Any]) -> bool:
        """Whether the limits let through a tensor of `size` bytes; from the first that they do not,
        none is.
        """
        if self.limit is None:
            limits, writer, most = self.settings.limits, self._writer, size + OVERHEAD
            why = limits.of_files(writer.records + 1, writer.bytes + most)
            why = why or limits.of_disk(self.settings.directory, most)
            if why is None:
                return True
            self.limit = (
                f"{why}: rank {self.coordinates['world']} stopped collecting at {gib(size)} of "
                f"{fields['tensor_name']} of {fields['module'] or 'a layer'}, iteration "
                f"{fields['iteration']}, micro-batch {fields['micro_batch']}"
            )
            logger.warning(
                "%s, with %d tensors, %s, written; what follows is dropped, training goes on",
                *(self.limit, writer.records, gib(writer.bytes)),
            )
            self._note({"event": "limited", "why": self.limit})
        self.dropped[0] += 1
        self.dropped[1] += size
        return False

    def _note(self, event: dict[str, Any]) -> None:
        """Say in the index that it is not complete, if the disk lets it."""
        now = {"run_id": self.run_id, "rank": self.coordinates, "wall_time": time.time()}
        with contextlib.suppress(OSError):
            self._writer.append(event | now)

    def _write(self, tensor: torch.Tensor, fields: dict[str, Any]) -> None:
        while True:
            self._counter += 1
            now = time.time()
            record = TensorRecord(
                run_id=self.run_id,
                counter=self._counter,
                timestamp=time.strftime("%Y%m%d_%H%M%S", time.localtime(now)),
                wall_time=now,
                quant_type=self.settings.quant_type,
                shape=list(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                rank=self.coordinates,
                **fields,
            )
            try:
                self._writer.write(tensor, record)
                return
            except FileExistsError:  # another run in this folder; the next number is free
                continue

    def outcome(self) -> dict[str, Any]:
        """How this rank fared, as plain values."""
        return {
            "rank": self.coordinates["world"],
            "tensors": self._writer.records,
            "bytes": self._writer.bytes,
            "error": self.error,
            "limit": self.limit,
            "dropped_tensors": self.dropped[0],
            "dropped_bytes": self.dropped[1],
        }

    def write_card(self, status: str) -> None:
        """Write the run card with how the run stands, from the first rank."""
        if self.is_first:
            ranks = self.ranks or [self.outcome()]
            outcome = {"status": status, "iterations": clock.completed, "ranks": ranks}
            outcome["error"] = next((r["error"] for r in ranks if r["error"]), None)
            outcome["limit"] = next((r["limit"] for r in ranks if r["limit"]), None)
            self._writer.write_run_card(self._card | outcome)

    def close(self) -> str | None:
        """End the collection; returns what went wrong, if anything did."""
        ranks = self.ranks or [self.outcome()]
        limited = any(rank["limit"] for rank in ranks)
        failed = any(rank["error"] for rank in ranks)
        if self.limit is not None:
            tensors, size = self.dropped
            event = {"event": "dropped", "tensors": tensors, "bytes": size, "why": self.limit}
            self._note(event)
        try:
            self.write_card("failed" if failed else "limited" if limited else "finished")
            self._writer.close()
        except OSError as error:
            self.error = self.error or f"the run card in {self.settings.directory}: {error}"
        return self.error
