"""Define the number types of 8-bit block scales, E4M3, UE5M3 and E6M2, and their bytes."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from megatron.fake_quant.code_points import code_values, decode
from megatron.fake_quant.elements import E4M3, ElementFormat

E4M3_NAN = 0x7F
NAN_BYTE = 0xFF  #: byte for NaN in the unsigned scale types


@dataclass(frozen=True, slots=True)
class Float8:
    """Number type of block scales: the numbers, and the byte that stands for each."""

    element: ElementFormat
    lowest: float = 0.0  #: minimum of a scale; 0 if scales may underflow
    first: int = 0  #: code in `element` of the number that byte 0 stands for


FLOAT8: Mapping[str, Float8] = MappingProxyType(
    {
        "e4m3": Float8(E4M3),
        "ue5m3": Float8(
            ElementFormat("ue5m3", 5, 3, bias=15, max=114688.0, signed=False),
            lowest=math.ldexp(1, -17),
        ),
        # E6M2 has neither zero nor subnormal numbers. It is described as part of a wider type.
        # The first normal number of that type is stored as byte 0.
        "e6m2": Float8(
            ElementFormat("e6m2", 7, 2, bias=49, max=1.5 * (1 << 15), signed=False),
            lowest=math.ldexp(1, -48),
            first=4,
        ),
    }
)


def decoded(codes: Tensor, scale: str) -> Tensor:
    """Return the numbers that the stored bytes of scales stand for; `scale` is their type."""
    if scale == "e4m3":
        return decode(codes, E4M3)
    return unsigned_numbers(scale).to(codes.device)[codes.int()]


@functools.cache
def unsigned_numbers(scale: str) -> Tensor:
    """Return the numbers for the 256 bytes of an unsigned scale type; the last one is NaN."""
    kind = FLOAT8[scale]
    numbers = code_values(kind.element)[kind.first : kind.first + NAN_BYTE]
    return torch.cat([numbers, torch.tensor([torch.nan], dtype=torch.float32, device="cpu")])
