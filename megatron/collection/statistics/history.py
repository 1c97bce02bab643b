"""Collect the statistics of one rank's matmul operands, and the losses of the run.

The first micro-batch of every EVERY-th iteration is measured. An operand with a format is quantized
once more, with the same random bits as in the matmul, so the results of training are bit-identical
to those without statistics. An operand without a format is measured when the layer receives it.

If a file cannot be written, the statistics stop with a warning, and training continues. The run
then ends with an error.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.collection.run_card import collection_folder
from megatron.collection.statistics.measure import Sums, measure, statistics
from megatron.collection.statistics.parquet_files import ParquetFiles
from megatron.collection.training_clock import clock
from megatron.fake_quant.matmul.gemm_formats import SLOTS
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.quantize import fake_quantize
from megatron.fake_quant.recipe.operands import GEMMS
from megatron.optional_packages import check_installed

logger = logging.getLogger(__name__)

FOLDER = "statistics"  #: folder of the files, in the folder of the collection
UNQUANTIZED = "all"  #: value of `Place.gemm` for a tensor that no GEMM quantizes
#: Name of the GEMM and name of the operand of each slot, by operation.
OPERANDS = {
    operation: dict(
        zip(SLOTS, [(gemm, name) for gemm, names in gemms.items() for name in names], strict=True)
    )
    for operation, gemms in GEMMS.items()
}
#: Operation and name of the operand, by the layer type and tensor name in the record.
TENSORS = {
    ("linear", "input"): ("linear", "input"),
    ("linear", "weight"): ("linear", "weight"),
    ("linear", "grad_output"): ("linear", "grad_output"),
    ("attention", "query"): ("qk", "query"),
    ("attention", "key"): ("qk", "key"),
    ("attention", "value"): ("pv", "value"),
    ("attention", "attention_probs"): ("pv", "probs"),
    ("attention", "grad_output"): ("pv", "grad_output"),
}
OPERAND_COLUMNS = {
    "iteration": "int32",
    "rank": "int32",
    "layer_idx": "int32",
    **dict.fromkeys(("module", "operation", "gemm", "tensor", "format"), "string"),
    "values": "int64",
    "nonzero": "int64",
    **dict.fromkeys(("amax", "rms", "sqnr_db", "underflow"), "float32"),
}
ITERATION_COLUMNS = {"iteration": "int32", "loss": "float64", "grad_norm": "float64"}


@dataclass(frozen=True, slots=True)
class StatisticsSettings:
    """Settings of the statistics, parsed from the command-line flags."""

    every: int  #: number of iterations from one measurement to the next
    folder: Path

    @classmethod
    def parse(
        cls,
        *,
        directory: str | None = None,
        tensor_statistics: int | None = None,
        train_iters: int | None = None,
        iteration: int = 0,
    ) -> "StatisticsSettings | None":
        """Create the settings from the flags; return None without `--tensor-statistics`.

        Args:
            directory: folder of the collection; None for the default.
            tensor_statistics: value of the flag.
            train_iters: last iteration of the run, if known.
            iteration: number of iterations completed before this run.

        Raises:
            ValueError: if `tensor_statistics` is not positive, if none of the iterations that the
                run trains is measured, or if pyarrow is not installed.
        """
        if tensor_statistics is None:
            return None
        if tensor_statistics < 1:
            raise ValueError(
                f"--tensor-statistics is {tensor_statistics}; give 1 or more, or leave it out"
            )
        first = tensor_statistics * (iteration // tensor_statistics + 1)
        if train_iters and iteration < train_iters < first:
            raise ValueError(
                f"--tensor-statistics {tensor_statistics} measures none of the iterations that "
                f"this run trains, {iteration + 1} to {train_iters}; lower --tensor-statistics "
                "or leave it out, or raise --train-iters"
            )
        check_installed("pyarrow", "--tensor-statistics")
        return cls(tensor_statistics, collection_folder(directory) / FOLDER)


@dataclass(frozen=True, slots=True)
class Place:
    """A GEMM operand, and the module and format in which it is multiplied."""

    layer_idx: int
    module: str
    operation: str
    gemm: str
    tensor: str
    format: str

    @property
    def quantized(self) -> bool:
        """True if the operand has a format."""
        return self.gemm != UNQUANTIZED


class TensorStatistics:
    """History of the statistics of one rank's operands."""

    def __init__(
        self,
        settings: StatisticsSettings,
        run_id: str,
        coordinates: Mapping[str, int],
        iteration: int,
    ):
        """Prepare the history of a run that continues after `iteration`.

        Args:
            settings: settings of the statistics.
            run_id: identifier of the run, which begins with the time of its start.
            coordinates: rank and size of each parallel group.
            iteration: number of iterations completed before this run.

        Raises:
            OSError: if the folder cannot be created.
        """
        self.settings = settings
        self.failure: str | None = None  #: why the files are incomplete, or None
        self.measured = False  #: True once an iteration has been measured on this rank
        #: operands of the current iteration and their sums, in the order of the matmuls
        self.latest: list[tuple[Place, Sums]] = []
        self.coordinates = dict(coordinates)  #: rank and size of each parallel group
        self._rank = coordinates["world"]
        self._pending: list[tuple[Place, int, torch.Tensor]] = []
        settings.folder.mkdir(parents=True, exist_ok=True)
        about = {"run_id": run_id, "resumed_after": str(iteration)}
        self._files = [
            ParquetFiles(
                settings.folder,
                f"operands_{run_id}_{self._rank:05}",
                columns=OPERAND_COLUMNS,
                about=about,
            )
        ]
        if self._rank == 0:
            name = f"iterations_{run_id}"
            self._files.append(
                ParquetFiles(settings.folder, name, columns=ITERATION_COLUMNS, about=about)
            )

    def due(self, iteration: int) -> bool:
        """Return whether an iteration is measured. All ranks return the same value."""
        return iteration % self.settings.every == 0

    def wants(self) -> bool:
        """Return whether the current micro-batch is measured. All ranks return the same value."""
        now = clock.micro_batch
        return now is not None and now.index == 0 and self.due(now.iteration)

    def add_operand(
        self,
        where: tuple[int, str],
        operation: str,
        slot: str,
        x: torch.Tensor,
        operand: Operand,
        **how: Any,
    ) -> None:
        """Measure an operand that is about to be quantized.

        Args:
            where: layer number and name of the module.
            operation: linear, qk or pv.
            slot: slot of the operand, one of `gemm_formats.SLOTS`.
            x: the operand, transformed and not yet quantized.
            operand: format of the operand.
            how: `axis`, `seed` and `amax` of `fake_quantize`.
        """
        assert operand.format is not None, "only quantized operands are observed"
        if not x.numel() or self.failure is not None:
            return
        try:
            with torch.no_grad():
                measured = measure(x, fake_quantize(x, operand.format, **how))
        except torch.OutOfMemoryError as error:
            self._fail(f"the device has no memory for {slot} of {where[1]} ({error})")
            return
        place = Place(*where, operation, *OPERANDS[operation][slot], str(operand))
        self._pending.append((place, x.numel(), measured))

    def add_tensor(
        self, where: tuple[int, str], layer_type: str, tensor_name: str, x: torch.Tensor
    ) -> None:
        """Measure a tensor that is multiplied without being quantized.

        Args:
            where: layer number and name of the module.
            layer_type: "attention" or "linear".
            tensor_name: name of the tensor in records.
            x: the tensor.
        """
        target = TENSORS.get((layer_type, tensor_name))
        if target is None or not x.numel() or self.failure is not None:
            return
        operation, name = target
        place = Place(*where, operation, UNQUANTIZED, name, "none")
        self._pending.append((place, x.numel(), measure(x.detach())))

    def end_iteration(self) -> None:
        """Copy the iteration's statistics from the device, and add them to the rows to write."""
        if not self._pending:
            return
        self.measured = True
        rows = torch.stack([measured for _, _, measured in self._pending]).tolist()
        self.latest = [
            (place, Sums(values, *row))
            for (place, values, _), row in zip(self._pending, rows, strict=True)
        ]
        self._pending.clear()
        self._write(
            0,
            [
                (
                    *(clock.iteration, self._rank, place.layer_idx, place.module),
                    *(place.operation, place.gemm, place.tensor, place.format),
                    *statistics(sums, quantized=place.quantized),
                )
                for place, sums in self.latest
            ],
        )

    def abandon_iteration(self) -> None:
        """Discard the statistics of an iteration that ended with an exception."""
        self._pending.clear()

    def observe(self, loss: float | None, grad_norm: float | None) -> None:
        """Record the loss and the gradient norm of the iteration, on rank 0."""
        if self._rank == 0:
            self._write(1, [(clock.iteration, loss, grad_norm)])

    def flush(self) -> None:
        """Write all rows to disk."""
        if self.failure is None:
            try:
                for files in self._files:
                    files.flush()
            except OSError as error:
                self._fail(_reason(error))

    def close(self) -> str | None:
        """Write all rows to disk; return why the files are incomplete, or None."""
        self.flush()
        return self.failure

    def _write(self, index: int, rows: list[tuple[Any, ...]]) -> None:
        if self.failure is None:
            try:
                self._files[index].add(rows)
            except OSError as error:
                self._fail(_reason(error))

    def _fail(self, why: str) -> None:
        self.failure = f"the statistics in {self.settings.folder} are not complete: {why}"
        self._pending.clear()
        logger.warning("%s; training continues without statistics", self.failure)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
