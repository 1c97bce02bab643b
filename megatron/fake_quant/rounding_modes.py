"""Describe the rounding modes as data; `rounding.py` implements them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Rounding = Literal["nearest", "stochastic", "hybrid", "eden"]

EDEN_GROUP = 128  #: number of neighboring values whose block scales MS-EDEN corrects by one factor
EDEN_BOUND = 255.99  #: largest block scale in MS-EDEN before the correction


@dataclass(frozen=True, slots=True)
class RoundingMode:
    """Description of a rounding mode, which `rounding.py` implements."""

    suffix: str  #: suffix of a format's name that selects the mode; empty for the default mode
    description: str  #: text that `python -m megatron.fake_quant describe` prints
    random: bool = False  #: True if the mode draws random bits
    #: True if block scales are changed after the values are rounded; see `eden.py`
    corrects_scales: bool = False


# torch.compile of torch 2.6 can trace a dictionary, but not a mapping proxy.
ROUNDINGS: Mapping[Rounding, RoundingMode] = {
    "nearest": RoundingMode("", "to nearest, ties {ties}"),
    "stochastic": RoundingMode(
        "sr",
        "at random to one of the two neighbors, so that the mean result is the value itself",
        True,
    ),
    # hybrid rounding (HR), arXiv 2409.16626 section 2.3
    "hybrid": RoundingMode(
        "hr",
        "for |E| < 4 to nearest, ties {ties}; from there on by the value's own low bits (HR)",
    ),
    "eden": RoundingMode(
        "eden",
        f"to nearest, ties {{ties}}; then the scales of {EDEN_GROUP} neighbors are multiplied "
        "by sum x^2 / sum x q and rounded at random (MS-EDEN, arXiv 2601.22813); to be used "
        f"after a Hadamard transform of size {EDEN_GROUP} with random signs",
        random=True,
        corrects_scales=True,
    ),
}
