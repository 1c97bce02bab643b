"""Apply the gradient rule of `megatron.fake_quant.gradient_rule` to the results of a study.

G is a gradient that a matmul computes from the saved operands, in float32: the result of dgrad or
wgrad of a linear layer, or of a backward GEMM of attention. E is its error with quantized operands.
For a layer, squared relative errors are averaged over iterations, micro-batches, ranks and modules
with the same short name, so the ratio is 1 / sqrt(mean(||E||² / ||G||²)).
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from megatron.analysis.study.proposal import layers_text
from megatron.fake_quant.gradient_rule import THRESHOLD

_FORWARD = " fprop"  #: end of the names of forward GEMMs, whose results are not gradients
_NAMED = 3  #: maximum number of places per candidate that the sentence lists


def gradients_of(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the ratio of each gradient to its noise, with one row per candidate, place and layer.

    The column `flagged` is true where the ratio is below √3. A gradient with NaN or Inf has the
    ratio NaN and is not flagged.

    Args:
        cells: result of `verdict.cells`.
    """
    backward = cells[~cells["place"].str.endswith(_FORWARD)]
    with np.errstate(divide="ignore"):
        ratios = 1 / np.sqrt(backward["squared"].to_numpy(np.float64))
    table = backward[["candidate", "place", "layer_idx"]].assign(gradient_to_noise=ratios)
    return table.assign(flagged=table["gradient_to_noise"] < THRESHOLD).reset_index(drop=True)


def rule(gradients: pd.DataFrame) -> str:
    """Return the verdict's sentence about the gradient rule.

    Args:
        gradients: result of `gradients_of`, with at least one row.
    """
    start = "By the gradient rule (a gradient's rms below √3 times that of its quantization noise)"
    places = gradients.drop_duplicates(["place", "layer_idx"])
    count = len(places)
    parts = []
    for name, part in gradients[gradients["flagged"]].groupby("candidate", sort=False):
        parts.append(f"{len(part)} of {count} gradients are too noisy in {name} ({_places(part)})")
    if not parts:
        return f"{start}, none of {count} gradient{'s' * (count > 1)} is too noisy."
    return f"{start}, {', and '.join(parts)}."


def _places(flagged: pd.DataFrame) -> str:
    """List the flagged places as text, noisiest first, with their layers and smallest ratio."""
    smallest = flagged.groupby("place")["gradient_to_noise"].min().sort_values(kind="stable")
    texts = []
    for place, ratio in smallest.head(_NAMED).items():
        layers = flagged.loc[flagged["place"] == place, "layer_idx"]
        texts.append(f"{place} of {layers_text(layers)}, ratio {ratio:.2g}")
    rest = len(smallest) - len(texts)
    return "; ".join(texts) + (f"; {rest} more" if rest else "")
