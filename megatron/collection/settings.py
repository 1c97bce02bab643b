"""Read all flags of the tensor collection: what to collect, where, when and how much."""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.collection.flag_file import FlagFile
from megatron.collection.flags import Reader, by_reader
from megatron.collection.iteration_windows import check_in_run, how_many
from megatron.collection.limits import Limits
from megatron.collection.ring_buffer import RingSettings
from megatron.collection.run_card import collection_folder, rank_coordinates
from megatron.collection.selection import Selection, describe
from megatron.fake_quant import policy

TIMEOUT = 10  #: default timeout of a collective operation, in minutes
#: maximum time between synchronizations of the ranks while a rank waits for its disk, in seconds
TURN = 30.0
#: Environment variables in which a launcher sets the number of ranks per machine.
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


@dataclass(frozen=True)
class Settings:
    """Settings of the collection on one rank."""

    directory: Path
    quant_type: str
    control_iter: int  #: number of iterations to collect; 0 for no limit
    selection: Selection
    limits: Limits  #: this rank's share of the limits
    #: Settings of the ring buffer; None to write all selected iterations.
    ring: RingSettings | None = None
    #: File that switches the collection on and off; None if the collection is always on.
    flag_file: FlagFile | None = None
    timeout: float = math.inf  #: timeout of a collective operation, in seconds

    @property
    def longest_wait(self) -> float:
        """Maximum time that training may wait for the disk in one iteration, in seconds.

        It is half of the timeout, because the other ranks meanwhile wait for this rank.
        """
        return self.timeout / 2

    @property
    def turn(self) -> float:
        """Maximum time between synchronizations while a rank waits for its disk, in seconds."""
        return min(self.timeout / 4, TURN)

    def describe(self) -> dict[str, Any]:
        """Return the collection's settings as plain values, for the run card."""
        return {
            "selection": describe(self.selection),
            "limits_of_each_rank": self.limits.describe(),
            "ring": None if self.ring is None else self.ring.describe(),
            "flag_file": None if self.flag_file is None else str(self.flag_file.path),
        }


def read_settings(
    args: dict[str, Any],
    *,
    save_dir: str | None,
    control_iter: int | None,
    flags: dict[str, Any],
    iteration: int = 0,
) -> Settings:
    """Create this rank's collection settings from the arguments of `session.configure`.

    Args:
        args: arguments of the run; `padded_vocab_size` sharpens the detection of loss spikes in
            the first iterations.
        save_dir: folder of the tensors; None for the default.
        control_iter: number of iterations to collect; None for the default.
        flags: other flags of `megatron.collection.flags`, by name.
        iteration: number of iterations completed before this run.

    Raises:
        ValueError: if a value is invalid, or two values exclude each other.
    """
    quant_type = policy.current().quant_type
    world_size = args.get("world_size") or rank_coordinates()["world_size"]
    values = by_reader(flags)
    chosen = Selection.parse(
        num_layers=args.get("num_layers"), world_size=world_size, **values[Reader.SELECTION]
    )
    ring = RingSettings.parse(**values[Reader.RING])
    if ring is not None:
        ring = ring.with_vocabulary(args.get("padded_vocab_size"))
    flag_file = FlagFile.parse(**values[Reader.FLAG_FILE])
    if control_iter is not None and control_iter < 0:
        raise ValueError(
            f"--control-iter is {control_iter}; give 0 for no limit or a positive number"
        )
    if ring is not None and control_iter:
        raise ValueError(
            f"--control-iter {control_iter} and --collect-ring {ring.iterations}: a ring is "
            "collected until an event occurs; leave --control-iter out"
        )
    if control_iter is None and (ring or flag_file):
        control_iter = 0
    control_iter = how_many(control_iter, chosen.iterations, iteration)
    check_in_run(chosen.iterations, control_iter, iteration, args.get("train_iters"))
    return Settings(
        directory=collection_folder(save_dir),
        quant_type=quant_type,
        control_iter=control_iter,
        selection=chosen,
        limits=Limits.parse(**values[Reader.LIMITS]).share(
            chosen.ranks.count(world_size), _on_machine(world_size)
        ),
        ring=ring,
        flag_file=flag_file,
        timeout=60.0 * (args.get("distributed_timeout_minutes") or TIMEOUT)
        if world_size > 1
        else math.inf,
    )


def _on_machine(world_size: int) -> int:
    """Return the number of ranks on this machine, as set by torchrun, mpirun or srun.

    Without these launchers, assume one rank per GPU, or all ranks if there is no GPU.
    """
    for name in LOCAL_SIZES:
        if (value := os.environ.get(name, "")).isdecimal():
            return max(1, min(int(value), world_size))
    return min(world_size, torch.cuda.device_count() or world_size)


def enabled_by_environment() -> bool:
    """Return whether TENSOR_SAVE_ENABLED switches the collection on.

    Raises:
        ValueError: if the value of the variable means neither yes nor no.
    """
    value = os.environ.get("TENSOR_SAVE_ENABLED", "").strip().lower()
    if value not in ("", "0", "false", "no", "off", "1", "true", "yes", "on"):
        raise ValueError(
            f"environment variable TENSOR_SAVE_ENABLED is {value!r}; use true or false"
        )
    return value in ("1", "true", "yes", "on")
