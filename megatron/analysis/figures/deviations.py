"""How far the runs of a dump are from the one without quantization, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from megatron.analysis.dump.tensor_files import UnreadableTensorError

#: What two runs with the same data have in common.
SAME = ("iteration", "micro_batch", "data_rank", "layer_idx", "module", "operation", "tensor_name")
BASELINES = ("bf16", "none")
CHUNK = 1 << 22  #: values read at a time


def deviations(
    tensors: pd.DataFrame,
    load: Callable[[int], Tensor],
    bar: Callable[[Sequence[Any], str], Iterable[Any]] = lambda rows, _: rows,
) -> pd.DataFrame:
    """How far each run's tensors are from the same tensors of the unquantized run.

    Columns `quant_type`, `kind`, `layer_idx`, `iteration`, `deviation`: |x - x0| / |x0| in the
    Euclidean norm, in the last iteration that a type has in common with the unquantized run. Empty
    where no run is without quantization, or no tensor has a counterpart.

    Args:
        tensors: `Material.tensors`.
        load: the tensor of a row.
        bar: goes through rows and shows how far it is.
    """
    table = tensors
    baseline = next((name for name in BASELINES if (table["quant_type"] == name).any()), None)
    columns = ["quant_type", "kind", "layer_idx", "iteration", "deviation"]
    if baseline is None:
        return pd.DataFrame(columns=columns)
    mine = table.drop_duplicates(["quant_type", *SAME], keep="last")  # of several runs the newest
    is_base = mine["quant_type"] == baseline
    texts = mine[list(SAME)].astype("string").fillna("")
    keys = pd.Series(list(texts.itertuples(index=False, name=None)), mine.index)
    base = dict(zip(keys[is_base], mine["tensor"][is_base], strict=True))
    beside = [base.get(key) for key in keys[~is_base]]
    others = mine[~is_base].assign(base=pd.array(beside, dtype="Int64")).dropna(subset=["base"])
    last = others.groupby("quant_type")["iteration"].transform("max")
    rows = []
    for row in bar(list(others[others["iteration"] == last].itertuples()), "Comparing runs"):
        other = int(row.base)
        try:
            distance = relative_distance(load(row.tensor), load(other))
        except (UnreadableTensorError, ValueError):
            continue  # it is in the list of problems, or is only a part
        rows.append((row.quant_type, row.kind, row.layer_idx, row.iteration, distance))
    return pd.DataFrame(rows, columns=columns)


def relative_distance(x: Tensor, base: Tensor) -> float:
    """|x - base| / |base| in float64; NaN where shapes differ or base is zero."""
    if x.shape != base.shape:
        return float("nan")
    apart = size = 0.0
    flat, flat_base = x.reshape(-1), base.reshape(-1)
    for start in range(0, flat.numel(), CHUNK):
        one, reference = flat[start : start + CHUNK], flat_base[start : start + CHUNK].double()
        apart += float((one.double() - reference).square().sum())
        size += float(reference.square().sum())
    return float(np.sqrt(apart / size)) if size > 0 else float("nan")
