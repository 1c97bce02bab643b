"""Compute how much the tensors of each run differ from the same tensors of the unquantized run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from megatron.analysis.diff.difference import Tolerance, compare
from megatron.analysis.dump.tensor_files import UnreadableTensorError

#: Columns that together identify the same tensor in different runs.
SAME = ("iteration", "micro_batch", "data_rank", "layer_idx", "module", "operation", "tensor_name")
BASELINES = ("bf16", "none")  #: quantization types of unquantized runs, in order of preference


def deviations(
    tensors: pd.DataFrame,
    load: Callable[[int], Tensor],
    bar: Callable[[Sequence[Any], str], Iterable[Any]] = lambda rows, _: rows,
) -> pd.DataFrame:
    """Return the relative distance of each tensor from its counterpart in the unquantized run.

    Each quantization type is compared in the last iteration that it shares with the unquantized
    run.

    Args:
        tensors: the table `FigureData.tensors`.
        load: function that returns the tensor with the given index in `tensors`.
        bar: function that takes the rows and a title, and returns the rows with a progress bar.

    Returns:
        A table with the columns `quant_type`, `kind`, `layer_idx`, `iteration` and `deviation`. The
        deviation is |x - x0| / |x0| in the Euclidean norm, see `relative_distance`. The table is
        empty if every run is quantized, or if no tensor has a counterpart.
    """
    baseline = next((name for name in BASELINES if (tensors["quant_type"] == name).any()), None)
    columns = ["quant_type", "kind", "layer_idx", "iteration", "deviation"]
    if baseline is None:
        return pd.DataFrame(columns=columns)
    # if several runs of a quantization type contain a tensor, the newest run is used
    newest = tensors.drop_duplicates(["quant_type", *SAME], keep="last")
    is_base = newest["quant_type"] == baseline
    texts = newest[list(SAME)].astype("string").fillna("")
    keys = pd.Series(list(texts.itertuples(index=False, name=None)), newest.index)
    base = dict(zip(keys[is_base], newest["tensor"][is_base], strict=True))
    counterparts = pd.array([base.get(key) for key in keys[~is_base]], dtype="Int64")
    others = newest[~is_base].assign(base=counterparts).dropna(subset=["base"])
    last = others.groupby("quant_type")["iteration"].transform("max")
    rows = []
    for row in bar(list(others[others["iteration"] == last].itertuples()), "Comparing runs"):
        try:
            distance = relative_distance(load(row.tensor), load(int(row.base)))
        except (UnreadableTensorError, ValueError):
            continue  # a file is corrupt (listed among the problems), or shards are missing
        rows.append((row.quant_type, row.kind, row.layer_idx, row.iteration, distance))
    return pd.DataFrame(rows, columns=columns)


def relative_distance(x: Tensor, base: Tensor) -> float:
    """Return |x - base| / |base| in the Euclidean norm, as `megatron.analysis diff` computes it.

    The result is 0 only if all values are equal; NaN equals NaN. It is infinite if one tensor has
    a NaN or Inf where the other has a different value, or if only `base` is zero.

    Raises:
        ValueError: the shapes differ.
    """
    return compare(base, x, Tolerance()).relative_error
