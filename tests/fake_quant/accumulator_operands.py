"""Operands for tests of accumulators: rows of every kind that a matrix unit treats differently."""

import math

import torch
from torch import Tensor

from megatron.fake_quant.accumulate import ACCUMULATORS, Accumulator, reference
from megatron.fake_quant.accumulate.element_types import get_element_type, smallest_exponent
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from megatron.fake_quant.elements import Cast
from megatron.fake_quant.rounding import round_to

#: Every simulated design, and spelled-out names that together use all parts of a name.
ACCUMULATOR_NAMES = (
    *(name for name, unit in ACCUMULATORS.items() if unit.simulated),
    "fda:l4:f3:m2:rne",
    "fda:l6:f20:m10:rz:p18",
    "fda:l1:f36:m23:rne",
    "fda:l16:f12:e5m10:rne:p32:pe6m9",
    "fda:l1:fx:e4m3:rz:p24:pe5m2",
)
#: Element types that have an Inf, and element types that have no NaN.
WITH_INFINITY = ("e5m2", "bfloat16", "float16", "float32")
WITHOUT_NAN = ("e3m2", "e2m3", "e2m1")
#: Largest binary exponents of the scaled rows, 6 for types that are not listed.
_FAR = {"bfloat16": 30, "float16": 12, "float32": 30, "e5m2": 12, "e5m2fnuz": 12}


def on_grid(x: Tensor, name: str) -> Tensor:
    """Round finite values to the element type with the given name."""
    element = get_element_type(name)
    if isinstance(element, Cast):
        return x.to(element.dtype).float()
    return round_to(x, element)


def element_names(accumulator: Accumulator) -> tuple[str, str]:
    """Return two element types for an accumulator, different ones if it accepts mixed types."""
    names = accumulator.elements or ("bfloat16",)
    return names[0], names[1] if accumulator.mixes and len(names) > 1 else names[0]


def rows_of_every_kind(name: str, depth: int, seed: int, *, special: bool = True) -> Tensor:
    """Return rows: normal, scaled, canceling, subnormal, large, sparse, and NaN and Inf."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, depth, generator=generator)
    far = _FAR.get(name, 6)
    exponents = torch.randint(-far, far + 1, (3, depth), generator=generator)
    scaled = torch.ldexp(torch.randn(3, depth, generator=generator), exponents)
    canceling = torch.randn(1, depth, generator=generator).repeat(2, 1)
    canceling[:, depth // 2 :] = -canceling[:, : depth - depth // 2].flip(-1)
    tiny = torch.randn(1, depth, generator=generator) * 2.0 ** smallest_exponent(name)
    large = torch.full((1, depth), get_element_type(name).max)
    sparse = torch.where(torch.rand(2, depth, generator=generator) < 0.8, 0.0, normal[:2])
    rows = [normal, scaled, normal.abs(), canceling, tiny, large, -large, sparse]
    x = on_grid(torch.cat(rows), name)
    if special and name not in WITHOUT_NAN:
        x = torch.cat([x, x[:3]])
        x[-1, depth // 3] = torch.nan
        if name in WITH_INFINITY:
            x[-2, depth // 2] = torch.inf
            x[-3, depth - 1] = -torch.inf
    return x


def operands(
    accumulator: Accumulator, depth: int, *, seed: int = 1, special: bool = True
) -> tuple[UnitOperand, UnitOperand]:
    """Return operands with rows of every kind, and with scales if the accumulator has them."""
    sides = []
    for index, name in enumerate(element_names(accumulator)):
        x = rows_of_every_kind(name, depth, seed + index, special=special)
        scales = None
        if accumulator.scale_block is not None:
            blocks = -(-depth // accumulator.scale_block)
            scales = _scales(accumulator, (x.shape[0], blocks), seed + index)
        sides.append(UnitOperand(x, smallest_exponent(name), scales))
    return sides[0], sides[1]


def _scales(accumulator: Accumulator, shape: tuple[int, int], seed: int) -> Tensor:
    """Return scales of the accumulator's type, with extreme ones in the first rows."""
    generator = torch.Generator().manual_seed(seed)
    if accumulator.scale_type == "e4m3":
        scales = on_grid(torch.randn(shape, generator=generator).abs() * 4, "e4m3")
        scales[0], scales[1, 0] = 2.0**-9, 448.0
    elif accumulator.scale_type == "e8m0":
        exponents = torch.randint(-20, 21, shape, generator=generator)
        scales = torch.ldexp(torch.ones(shape), exponents)
        scales[0], scales[1, 0] = 2.0**-127, 2.0**127
    else:
        scales = torch.randn(shape, generator=generator).exp()
    return scales


def first_sums(shape: tuple[int, ...]) -> Tensor:
    """Return numbers with which sums may begin: random, tiny and zero ones, NaN and Inf."""
    generator = torch.Generator().manual_seed(9)
    exponents = torch.randint(-8, 9, shape, generator=generator)
    start = torch.ldexp(torch.randn(shape, generator=generator), exponents)
    flat = start.view(-1)
    flat[::7], flat[3::31], flat[5::31] = 0.0, 1e-5, -2e-38
    flat[9::31], flat[11::31], flat[13::31], flat[15::31] = -0.0, -math.inf, math.nan, 1e-44
    return start


def by_reference(
    a: UnitOperand, b: UnitOperand, unit: Accumulator, start: Tensor | None = None
) -> Tensor:
    """Return the products of a batch of operands by the implementation in torch operations."""
    starts = [None] * a.elements.shape[0] if start is None else start
    return torch.stack(
        [
            reference.summed(a.batch(i), b.batch(i), unit, start=first)
            for i, first in enumerate(starts)
        ]
    )


def bits(x: Tensor) -> Tensor:
    """Return the bits of float32 values, with the same bits for every NaN."""
    return x.masked_fill(x.isnan(), torch.nan).view(torch.int32)
