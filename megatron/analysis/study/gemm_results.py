"""Compute the results of a matmul's GEMMs in given formats, bit for bit as a run computes them.

`results` calls the autograd function that training calls. An error budget needs three products of
each GEMM: with both operands quantized, and with only one of them. `SeparateGemm` quantizes each
operand once for all three. It handles every matmul whose GEMMs are independent of each other, and
in which nothing but torch.matmul adds up the products; see `independent`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.analysis.study.candidates import HIGH_PRECISION
from megatron.analysis.study.operands import Matmul
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import (
    ACCUMULATOR_FIELDS,
    GEMM_SLOTS,
    SLOTS,
    GemmFormats,
)
from megatron.fake_quant.matmul.mean_split import SplitMatrix, with_means
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.matmul.products import matmul as plain_matmul
from megatron.fake_quant.matmul.products import matmul_then_scale, multiply
from megatron.fake_quant.random_bits import derive_seed
from megatron.fake_quant.scalings.tensor_scale import local_amax

#: Both operands of each GEMM and their reduction axes. C is the gradient of the result.
SIDES = (
    (("a", -1), ("b", -1)),
    (("c", -1), ("b", -2)),
    (("c", -2), ("a", -2)),
)


def references(matmul: Matmul) -> list[Tensor]:
    """Return the products of the operands in float32, in the order of the GEMMs."""
    a, b = matmul.a.float(), matmul.b.float()
    products = [torch.matmul(a, b.transpose(-2, -1))]
    if matmul.c is not None:
        c = matmul.c.float()
        products += [torch.matmul(c, b), torch.matmul(c.transpose(-2, -1), a)]
    return products if matmul.alpha == 1.0 else [x.mul_(matmul.alpha) for x in products]


def results(matmul: Matmul, formats: GemmFormats, *, seed: int) -> list[Tensor]:
    """Return the results of the GEMMs in the given formats, as a run computes them."""

    def own_amax(slot: str, x: Tensor, fmt: Format) -> Tensor:
        return local_amax(x)

    backward = matmul.c is not None
    a, b = (x.detach().requires_grad_(backward) for x in (matmul.a, matmul.b))
    unnormalized = None
    if formats.unnormalized and matmul.unnormalized is not None:
        unnormalized = matmul.unnormalized()
    result = quantized_matmul(
        a,
        b,
        formats,
        alpha=matmul.alpha,
        seed=seed,
        unnormalized=unnormalized,
        amax_of=own_amax,
    )
    if matmul.c is None:
        return [result]
    return [result.detach(), *torch.autograd.grad(result, (a, b), matmul.c)]


def independent(formats: GemmFormats) -> bool:
    """Return whether `SeparateGemm` can compute the results of all GEMMs in these formats.

    It cannot if a GEMM multiplies quantized operands of another GEMM, if Hadamard signs are drawn
    at random, if P is quantized before it is divided by its row sums, or if a simulated accumulator
    sums the products.
    """
    if formats.straight_through or formats.unnormalized or formats.simulated:
        return False
    if formats.random_signs:
        return False
    return all(_is_simple(getattr(formats, slot)) for slot in SLOTS)


def _is_simple(operand: Operand) -> bool:
    fmt = operand.format
    transformed = operand.hadamard is not None or operand.split != "none"
    rotated_amax = transformed and fmt is not None and fmt.amax_source != "own"
    return operand.source == "original" and not rotated_amax


class SeparateGemm:
    """One GEMM of a matmul; its operands are quantized once and multiplied several times."""

    def __init__(self, matmul: Matmul, formats: GemmFormats, index: int):
        """Prepare the GEMM `index` of a matmul; `independent(formats)` must be true."""
        self._alpha = matmul.alpha
        self._multiply = plain_matmul if index == 0 else matmul_then_scale
        self._slots = list(GEMM_SLOTS.values())[index]
        self._operands: tuple[Operand, ...] = tuple(getattr(formats, s) for s in self._slots)
        tensors = {"a": matmul.a, "b": matmul.b, "c": matmul.c}
        self._sides: list[tuple[Tensor, int]] = []
        for name, axis in SIDES[index]:
            tensor = tensors[name]
            assert tensor is not None
            self._sides.append((tensor.detach(), axis))

    def products(self, seed: int, *, budget: bool) -> Iterator[Tensor]:
        """Yield the result and, if `budget` is true, the results with only one operand quantized.

        The latter are in the order of the operands. If one operand has no format, the result with
        only the other one quantized is the first tensor again.
        """
        quantized = [self._side(position, seed) for position in (0, 1)]
        whole = self._product(quantized)
        yield whole
        for other in (1, 0) if budget else ():
            if self._operands[other].format is None:
                yield whole
                continue
            sides = list(quantized)
            sides[other] = self._side(other, None)
            yield self._product(sides)

    def _side(self, position: int, seed: int | None) -> SplitMatrix:
        """Return an operand as the GEMM multiplies it, or unquantized if `seed` is None."""
        (x, axis), slot = self._sides[position], self._slots[position]
        operand, fmt = self._operands[position], self._operands[position].format
        fill = slot.startswith("wgrad")
        if seed is None or fmt is None:
            return unquantized(operand).quantized(x, axis=axis, fill=fill)
        drawn = derive_seed(seed, slot) if fmt.stochastic else None
        amax = None if fmt.amax_source == "own" else local_amax(x)
        return operand.quantized(x, axis=axis, seed=drawn, fill=fill, amax=amax)

    def _product(self, sides: Sequence[SplitMatrix]) -> Tensor:
        left, right = sides
        left = left if self._sides[0][1] == -1 else left.t()
        right = right.t() if self._sides[1][1] == -1 else right
        product = multiply(left, right, self._alpha, self._multiply)
        return with_means(product, left, right, self._alpha)


def unquantized(operand: Operand) -> Operand:
    """Return an operand in high precision, with its Hadamard transform.

    The transform stays, because the two operands of a GEMM need the same one.
    """
    return replace(operand, format=None, source="original", split="none")


def only(formats: GemmFormats, slots: Sequence[str]) -> GemmFormats:
    """Return the formats, changed to high precision for all operands except those in `slots`.

    Simulated accumulators are left out, because their units multiply only quantized operands.
    """
    if formats == HIGH_PRECISION:
        return formats
    rest: dict[str, Any] = {
        slot: unquantized(getattr(formats, slot)) for slot in SLOTS if slot not in slots
    }
    unnormalized = formats.unnormalized and "fprop_a" in slots
    rest |= dict.fromkeys(ACCUMULATOR_FIELDS)
    return replace(formats, **rest, unnormalized=unnormalized)
