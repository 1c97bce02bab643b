"""Collects the tensors that enter and leave the matmuls of linear and attention layers.

A layer asks `capture(...)` at each forward pass: None means that nothing is collected now, and then
the layer takes the wheel's own path; otherwise it shows its tensors to the `Capture`. The schedule
moves the clock, so collection works under any trainer built on megatron-core. A trainer of ours
calls `configure` with its flags and `close` at the end; under any other the environment switches
collection on, TENSOR_SAVE_ENABLED=true and TENSOR_SAVE_DIR.

Tensors are written at once and by the calling thread: what is on disk is what the matmul saw. A
write that fails stops the collection, says so once and lets training go on; the run card then says
`failed`, and `close` returns the message, with which our trainer exits non-zero.
"""

import atexit
import logging
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core._ranks import from_all_ranks, from_first_rank, together
from megatron.core._record_writer import RecordWriter, check_writable, own_copy
from megatron.core.capture import Capture
from megatron.core.collection_clock import clock
from megatron.core.layer_selection import LayerSelection
from megatron.core.module_identity import ModuleIdentity
from megatron.core.run_card import collect_run_card, rank_coordinates
from megatron.fake_quant import policy
from megatron.tensor_record import TensorRecord, safe_name

logger = logging.getLogger(__name__)

DEFAULT_DIRECTORY = "enhanced_tensor_logs"
UNNAMED = ModuleIdentity("", -1)  #: of a layer that stands in no model


@dataclass(frozen=True)
class Settings:
    """What to collect and where."""

    directory: Path
    quant_type: str
    control_iter: int
    collect_micro_batches: int
    layers: LayerSelection


class TensorSaver:
    """Decides what is collected, numbers it and hands it to the writer."""

    def __init__(
        self,
        settings: Settings,
        run_id: str,
        args: dict[str, Any],
        quantization: list[dict[str, Any]] | None = None,
    ):
        self.settings = settings
        self.error: str | None = None
        self.coordinates = rank_coordinates()
        self.run_id = run_id
        self._counter = 0
        self._card = (
            collect_run_card(run_id, args) | {"quantization": quantization} if self.is_first else {}
        )
        self._writer = RecordWriter(settings.directory, run_id, self.coordinates["world"])
        self.write_card("running")

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the run."""
        return self.coordinates["world"] == 0

    @property
    def complete(self) -> bool:
        """Whether as many iterations are done as `control_iter` says; the same on every rank."""
        return 0 < self.settings.control_iter <= clock.completed

    def wants(self, identity: ModuleIdentity) -> bool:
        """Whether a layer's tensors are collected at this moment."""
        if self.error is not None or clock.micro_batch is None or identity.is_lm_head:
            return False
        limit = self.settings.collect_micro_batches
        late = limit and clock.micro_batch.index >= limit
        return not self.complete and not late and identity.layer_idx in self.settings.layers

    def save(self, tensor: torch.Tensor, **fields: Any) -> None:
        """Write one tensor; a failure ends the collection, not the training."""
        if self.error is not None:
            return
        tensor = own_copy(tensor)
        try:
            self._write(tensor, fields)
        except (
            OSError,
            RuntimeError,
        ) as error:  # torch's writer reports a full disk as RuntimeError
            self.error = (
                f"collection stopped after {self._writer.records} tensors: cannot write to "
                f"{self.settings.directory}: {error}; free space or name another --tensor-save-dir"
            )
            logger.error(self.error)

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

    def write_card(self, status: str) -> None:
        """Write the run card with how the run stands, from the first rank."""
        if self.is_first:
            outcome = {"status": status, "error": self.error, "iterations": clock.completed}
            self._writer.write_run_card(self._card | outcome)

    def close(self) -> str | None:
        """End the collection; returns what went wrong, if anything did."""
        try:
            self.write_card("failed" if self.error else "finished")
            self._writer.close()
        except OSError as error:
            self.error = self.error or f"the run card in {self.settings.directory}: {error}"
        return self.error


_saver: TensorSaver | None = None
_configured = False


def configure(
    args: dict[str, Any] | None = None,
    *,
    save_tensors: bool = False,
    save_dir: str | None = None,
    control_iter: int = 1,
    collect_micro_batches: int = 1,
    collect_layers: str = "all",
    iteration: int = 0,
    quantization: list[dict[str, Any]] | None = None,
) -> None:
    """Fix what this run collects; collective over all ranks once the process groups exist.

    Args:
        args: the run's arguments, for the run card; `num_layers` bounds `collect_layers`.
        save_tensors: or TENSOR_SAVE_ENABLED=true.
        save_dir: used as it is; else TENSOR_SAVE_DIR, else
            `enhanced_tensor_logs/<quantization type>`.
        control_iter: iterations to collect, 0 for all.
        collect_micro_batches: of each iteration the first so many, 0 for all.
        collect_layers: `all`, or e.g. `first,last` or `0,2-4`.
        iteration: iterations done before this run (it resumes a checkpoint).
        quantization: what each matmul goes through, for the run card.

    Raises:
        ValueError: what the user can mend, on all ranks alike whichever rank met it.
    """
    global _saver, _configured
    close()
    _configured = True
    clock.reset(iteration)
    args = {} if args is None else args

    def settings() -> Settings | None:
        if not (save_tensors or enabled_by_environment()):
            return None
        quant_type = policy.current().quant_type
        default = Path(DEFAULT_DIRECTORY, safe_name(quant_type))
        found = Settings(
            directory=Path(save_dir or os.environ.get("TENSOR_SAVE_DIR") or default),
            quant_type=quant_type,
            control_iter=_not_negative("--control-iter", control_iter),
            collect_micro_batches=_not_negative("--collect-micro-batches", collect_micro_batches),
            layers=LayerSelection.parse(collect_layers, args.get("num_layers")),
        )
        check_writable(found.directory)
        return found

    wanted = together(settings)
    _check_alike(wanted is not None)
    if wanted is None:
        return
    run_id = from_first_rank(f"{time.strftime('%Y%m%d_%H%M%S')}_{secrets.token_hex(3)}")
    _saver = together(lambda: TensorSaver(wanted, run_id, args, quantization))
    if _saver.is_first:
        logger.info("saving tensors to %s (run %s)", wanted.directory, run_id)


def enabled_by_environment() -> bool:
    """What TENSOR_SAVE_ENABLED says.

    Raises:
        ValueError: it says neither yes nor no.
    """
    value = os.environ.get("TENSOR_SAVE_ENABLED", "").strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise ValueError(
            f"environment variable TENSOR_SAVE_ENABLED is {value!r}; use true or false"
        )
    return value in ("1", "true", "yes", "on")


def _not_negative(flag: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{flag} is {value}; give 0 for no limit or a positive number")
    return value


def _check_alike(enabled: bool) -> None:
    answers = from_all_ranks(enabled)
    if len(set(answers)) > 1:
        ranks = ", ".join(str(rank) for rank, answer in enumerate(answers) if answer)
        raise ValueError(
            f"saving tensors is switched on on rank(s) {ranks} of {len(answers)} only; give "
            "--save-tensors, or set TENSOR_SAVE_ENABLED alike on every machine"
        )


def configured() -> bool:
    """Whether a trainer has called `configure`."""
    return _configured


def begin_iteration() -> None:
    """The schedule starts a training iteration.

    Configures from the environment under a trainer that never did.
    """
    if not _configured:
        configure()
        atexit.register(close)
    clock.iteration += 1


def end_iteration() -> None:
    """The schedule has finished a training iteration."""
    clock.completed += 1
    clock.micro_batch = None


def set_sample_idx(sample_idx: int) -> None:
    """The trainer says which sample the micro-batch under way begins with; else it is null."""
    if clock.micro_batch is not None:
        clock.micro_batch.sample_idx = sample_idx


def capture(identity: ModuleIdentity | None, layer_type: str) -> Capture | None:
    """A layer's way in: None if nothing of it is collected now."""
    identity = identity or UNNAMED
    if _saver is None or not _saver.wants(identity):
        return None
    return Capture(_saver, identity, layer_type)


def save_tensor(
    tensor: torch.Tensor, tensor_name: str, *, layer_type: str, dims: str, **how: Any
) -> None:
    """Save one tensor from code outside of our layers, if something is being collected now.

    Args:
        tensor: what to save.
        tensor_name: one of `megatron.tensor_record.TENSOR_NAMES[layer_type]`.
        layer_type: attention or linear.
        dims: see `Capture.save`, as for the further arguments.
        how: `identity`, the layer's `ModuleIdentity`, and the keywords of `Capture.save`.
    """
    if (found := capture(how.pop("identity", None), layer_type)) is not None:
        found.save(tensor_name, tensor, dims=dims, **how)


def enabled() -> bool:
    """Whether this run collects at all."""
    return _saver is not None


def finished() -> bool:
    """Whether as many iterations as `control_iter` says are collected; the same on every rank."""
    return _saver is not None and _saver.complete


def close() -> str | None:
    """End the collection; returns what went wrong on this rank, or None."""
    global _saver
    saver, _saver = _saver, None
    return None if saver is None else saver.close()
