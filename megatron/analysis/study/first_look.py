"""Study the formats on a small part of a dump, within seconds, for `quick_analysis.png`.

The part is chosen in the same way every time: one run, its first iteration, the first micro-batch
of this iteration and, if the model is large, a few layers at equal distances. The numbers are the
same as those of `python -m megatron.analysis study` for these tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from megatron.analysis.store import TensorStore
from megatron.analysis.study.candidates import candidates_of
from megatron.analysis.study.engine import Study, study
from megatron.analysis.study.gradients import gradients_of, rule
from megatron.analysis.study.passes import find_passes
from megatron.analysis.study.proposal import layers_text
from megatron.analysis.study.verdict import by_candidate, cells, losses, ranking, weakest
from megatron.fake_quant.quant_type import UNQUANTIZED, parse_type
from megatron.tensor_record import OF_ITERATION

#: Maximum number of multiplications for all candidates together, which take about 20 s on two
#: cores. At least one layer is studied.
MOST_PRODUCTS = 10**12
FORMATS = ("mxfp8", "mxfp4", "nvfp4", "hifp8")  #: formats that are always compared


def default_formats(store: TensorStore) -> list[str]:
    """Return `FORMATS`, followed by other formats that the dump's quantization types use.

    Operands in high precision, such as those of bf16 runs, add no format.
    """
    formats = list(FORMATS)
    for name in store.records["quant_type"].dropna().unique():
        formats += [other for other in formats_of(str(name)) if other not in formats]
    return formats


def formats_of(quant_type: str) -> list[str]:
    """Return the formats of a quantization type; none for a recipe, which may have any number."""
    try:
        assigned = parse_type(quant_type)
    except ValueError:
        return []
    return list(dict.fromkeys(fmt.name for fmt in assigned.values() if fmt is not None))


@dataclass(frozen=True)
class FirstLook:
    """Comparison of formats by the errors of matmul results, on a part of a dump."""

    result: Study
    own: str  #: format of the run whose tensors are studied; empty if it has none or several
    sample: str  #: description of the part that was studied, for a caption

    @property
    def cells(self) -> pd.DataFrame:
        """Table of SQNR and bits per value by candidate, place and layer; see `verdict.cells`."""
        return cells(self.result.rows)

    def sentences(self) -> list[str]:
        """Return a summary of the comparison in up to four sentences.

        The first sentence gives the median of each format. The next ones state where the run's
        format and the weakest format lose most; if gradients are too noisy, a sentence that lists
        them replaces the one on the run's format. The last sentence counts what is left out, such
        as attention with dropout.
        """
        table = self.cells
        summary = by_candidate(table)
        names = [name for name in dict.fromkeys((self.own, weakest(summary))) if name]
        texts = [losses(table, self.result.budgets, name) for name in names]
        gradients = gradients_of(table)
        if gradients["flagged"].any():
            texts = [texts[-1], rule(gradients)]
        if self.result.left_out:
            # drop the description in parentheses, which is too long for a picture
            reasons = [
                f"{reason.partition(' (')[0]}: {count}"
                for reason, count in sorted(self.result.left_out.items())
            ]
            texts.append(f"Left out: {'; '.join(reasons)}.")
        return [ranking(table, summary, self.result.rows), *texts]


def first_look(
    store: TensorStore, formats: Sequence[str], *, workers: int | None = None
) -> FirstLook:
    """Study the formats on a part of a dump.

    Raises:
        ValueError: if the dump has no matmul whose operands can be studied; the message gives the
            reason.
    """
    candidates = candidates_of(formats, [])
    records, sample = part_of(store, len(candidates))
    result = study(store, candidates, select=records, workers=workers, budget=False)
    if cells(result.rows).empty:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in result.left_out.items())
        raise ValueError(f"no matmul can be studied: {reasons or 'no readable operands'}")
    own = formats_of(str(result.rows["quant_type"].iloc[0]))
    return FirstLook(result, own[0] if len(own) == 1 else "", sample)


def part_of(store: TensorStore, candidates: int) -> tuple[pd.DataFrame, str]:
    """Choose the part of a dump to study, and return its records and a description of it.

    The run is the first one without quantization or, if there is none, the first run: the later
    tensors of a quantized run also carry the errors of its earlier matmuls.
    """
    records = store.records
    known = records[records["run_id"].notna() & records["iteration"].notna()]
    passes = find_passes(store, known).passes
    if not passes:
        raise ValueError("no operands of a matmul were collected")
    rows = [of_pass.first for of_pass in passes]
    plain = [row for row in rows if str(row.quant_type).lower() in UNQUANTIZED]
    run, quant_type = (plain or rows)[0].run_id, (plain or rows)[0].quant_type
    iteration, micro_batch = min(
        (row.iteration, row.micro_batch) for row in rows if row.run_id == run
    )
    products: dict[int, int] = {}
    for of_pass, row in zip(passes, rows, strict=True):
        if (row.run_id, row.iteration, row.micro_batch) == (run, iteration, micro_batch):
            layer = int(row.layer_idx)
            products[layer] = products.get(layer, 0) + of_pass.products
    layers = _layers(products, candidates)
    select: Any = (
        (known["run_id"] == run)
        & (known["iteration"] == iteration)
        & (
            (known["micro_batch"] == micro_batch)
            | known["micro_batch"].isna()
            | known["tensor_name"].isin(OF_ITERATION)
        )
        & known["layer_idx"].isin(layers)
    )
    sample = f"{quant_type} run {run}, iteration {iteration}, micro-batch {micro_batch}"
    if len(layers) < len(products):
        sample += f", {layers_text(layers)} of {len(products)}"
    return known[select], sample


def _layers(products: dict[int, int], candidates: int) -> list[int]:
    """Return the layers to study: all of them, or a few at equal distances.

    Args:
        products: number of multiplications of each layer.
        candidates: number of candidates.
    """
    layers = sorted(products)
    total = candidates * sum(products.values())
    count = len(layers) * MOST_PRODUCTS // max(total, 1)
    if count >= len(layers):
        return layers
    at = np.linspace(0, len(layers) - 1, max(count, 1)).round().astype(int)
    return [layers[i] for i in at]
