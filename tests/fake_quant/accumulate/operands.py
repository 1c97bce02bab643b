"""Operands of accumulators, as lists of numbers on the grid of an element type."""

import math

import torch
from torch import Tensor

from megatron.fake_quant.accumulate import Accumulator
from megatron.fake_quant.accumulate.element_types import get_element_type
from megatron.fake_quant.elements import Cast
from megatron.fake_quant.rounding import round_to

KINDS = ("random", "spread", "subnormal", "canceling", "zeros")


def on_grid(x: Tensor, name: str) -> Tensor:
    """Round to the element type; larger magnitudes saturate at its largest number."""
    element = get_element_type(name)
    x = x.clamp(-element.max, element.max)
    return x.to(element.dtype).float() if isinstance(element, Cast) else round_to(x, element)


def operands(
    kind: str, names: tuple[str, str], shape: tuple[int, int], random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return A and B, both with the given shape."""
    a, b = (one_operand(kind, name, shape, random) for name in names)
    half = shape[1] // 2
    if kind == "canceling":
        a[:, half : 2 * half] = a[:, :half]
        b[:, half : 2 * half] = on_grid(-b[:, :half] * (1 + 0.01 * (b[:, :half] > 1)), names[1])
    return a, b


def one_operand(kind: str, name: str, shape: tuple[int, int], random: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=random)
    if kind == "spread":
        x *= torch.exp2(torch.randint(-10, 11, shape, generator=random).float())
    elif kind == "subnormal":
        # Products of two such numbers must be above float32's smallest number.
        x *= max(get_element_type(name).smallest_normal, math.ldexp(1, -76))
    elif kind == "zeros":
        x *= torch.rand(shape, generator=random) < 0.2
    return on_grid(x, name)


def block_scales(
    accumulator: Accumulator, shape: tuple[int, int], random: torch.Generator
) -> Tensor | None:
    """Return block scales for an operand with the given shape, or None if the unit has none."""
    if accumulator.scale_block is None:
        return None
    blocks = (shape[0], -(-shape[1] // accumulator.scale_block))
    x = torch.randn(blocks, generator=random).abs()
    if accumulator.scale_type == "fp32":
        return x
    if accumulator.scale_type == "e4m3":
        return on_grid(x * torch.exp2(torch.randint(-8, 9, blocks, generator=random)), "e4m3")
    return torch.exp2(torch.randint(-20, 21, blocks, generator=random).float())
