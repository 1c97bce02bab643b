"""Read the statistics that `--tensor-statistics` writes during training."""

from pathlib import Path

import pandas as pd

from megatron.fake_quant.gradient_rule import GRADIENTS, THRESHOLD
from megatron.optional_packages import check_installed

#: columns that identify an operand
OPERAND = ["rank", "layer_idx", "module", "operation", "gemm", "tensor", "format"]


def read_statistics(folder: str | Path) -> pd.DataFrame:
    """Return the statistics of all operands: one row per iteration, rank and operand.

    Within an iteration of a rank, the rows are in the order of the matmuls. If a run was resumed,
    the iterations that it repeats are taken from the later run.

    Args:
        folder: folder `statistics` of the run.

    Raises:
        ValueError: if the folder holds no such file, or one that is damaged or of another kind.
    """
    return _read(Path(folder), "operands")


def read_iterations(folder: str | Path) -> pd.DataFrame:
    """Return the loss and the gradient norm, one row per iteration; see `read_statistics`.

    Raises:
        ValueError: if the folder holds no losses, for example because the trainer reported none.
    """
    return _read(Path(folder), "iterations")


def has_iterations(folder: Path) -> bool:
    """Return whether a folder holds the losses that `read_iterations` reads."""
    return any(folder.glob("iterations_*.parquet"))


def gradients_of(table: pd.DataFrame) -> pd.DataFrame:
    """Return the statistics of quantized gradients, with their ratio to the quantization noise.

    `megatron.fake_quant.gradient_rule` defines the ratio and its threshold. The column `flagged` is
    true where the ratio is below the threshold. A gradient that is not finite is not flagged.

    Args:
        table: the statistics, from `read_statistics`.
    """
    gradient = table["tensor"].astype(str) == table["operation"].astype(str).map(GRADIENTS)
    chosen = table[gradient & table["sqnr_db"].notna()]
    ratios = 10 ** (chosen["sqnr_db"].astype(float) / 20)
    return chosen.assign(gradient_to_noise=ratios, flagged=ratios < THRESHOLD)


def _read(folder: Path, name: str) -> pd.DataFrame:
    files = sorted(folder.glob(f"{name}_*.parquet"))
    if not files and has_iterations(folder):
        raise ValueError(
            f"{folder} holds losses and no statistics, because the run has not yet written a "
            "measured iteration; --tensor-statistics EVERY measures the multiples of EVERY"
        )
    if not files:
        raise ValueError(
            f"{folder} holds no {name}_*.parquet; give the folder `statistics` of a run with "
            "--tensor-statistics"
        )
    check_installed("pyarrow", f"{folder}, which holds Parquet files,")
    import pyarrow
    import pyarrow.parquet

    runs: dict[str, list[pd.DataFrame]] = {}
    starts: dict[str, int] = {}
    for path in files:
        try:
            table = pyarrow.parquet.read_table(path)
            about = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
            run, start = about["run_id"], int(about["resumed_after"])
        except (pyarrow.ArrowException, AttributeError, KeyError, ValueError) as error:
            raise ValueError(
                f"{path} is damaged or was not written by --tensor-statistics; move it out of the "
                "folder"
            ) from error
        runs.setdefault(run, []).append(table.to_pandas())
        starts[run] = start
    frames, until = [], None
    for run in sorted(runs, reverse=True):  # the name of a run begins with the time of its start
        frame = pd.concat(runs[run], ignore_index=True)
        frames.append(frame if until is None else frame[frame.iteration <= until])
        until = starts[run] if until is None else min(until, starts[run])
    table = pd.concat(frames[::-1], ignore_index=True)
    return table.sort_values("iteration", kind="stable", ignore_index=True)
