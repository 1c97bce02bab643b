"""Define what a study compares: number formats, and recipes that set one per operand."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.format_checks import check_operands
from megatron.fake_quant.accumulate.names import get_accumulator
from megatron.fake_quant.formats import Format
from megatron.fake_quant.inspect.format_properties import bits_in_matrix
from megatron.fake_quant.matmul.gemm_formats import (
    ACCUMULATOR_FIELDS,
    GEMM_SLOTS,
    SLOTS,
    GemmFormats,
)
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.names import get_format
from megatron.fake_quant.policy import OperationPolicy
from megatron.fake_quant.quant_type import (
    DEFAULT_TYPE,
    OPERATIONS,
    UNQUANTIZED,
    gemm_formats,
)
from megatron.fake_quant.recipe import Recipe, load_recipe

HIGH_PRECISION = GemmFormats()  #: formats of a matmul whose operands are not quantized


@dataclass(frozen=True, slots=True)
class Candidate:
    """Format or recipe whose effect on each matmul is studied."""

    name: str  #: canonical name of the format, or the name of the recipe
    format: Format | None = None  #: format of all operands; None for high precision or a recipe
    recipe: Recipe | None = None
    accumulator: Accumulator | None = None  #: accumulator of all GEMMs; None for torch.matmul's

    def formats(
        self, operation: str, module: str, layer: int, *, num_layers: int, iteration: int
    ) -> GemmFormats:
        """Return the formats of a matmul's operands, as a training run would use them.

        Args:
            operation: linear, qk or pv.
            module: name of the module in the whole model.
            layer: number of the layer, from 0.
            num_layers: number of layers in the whole model.
            iteration: iteration of the run, from 1.
        """
        if self.recipe is not None:
            rules = self.recipe.rules_for(module, layer, num_layers)
            plan = OperationPolicy(operation, None, self.name, rules)
            return plan.at(iteration) or HIGH_PRECISION
        formats = HIGH_PRECISION if self.format is None else gemm_formats(operation, self.format)
        if self.accumulator is None:
            return formats
        accumulators: dict[str, Any] = dict.fromkeys(ACCUMULATOR_FIELDS, self.accumulator)
        return replace(formats, **accumulators)

    @property
    def digest(self) -> str:
        """Text that differs between candidates with different names or formats."""
        return self.name if self.recipe is None else f"{self.name} {self.recipe.digest}"


def candidates_of(
    formats: Sequence[str], recipes: Sequence[Path], accumulators: Sequence[str] = ()
) -> list[Candidate]:
    """Return the candidates for the formats, then those for the recipes, without duplicates.

    `bf16` or `none` stands for operands that are not quantized. Each format is a candidate with
    the accumulator of torch.matmul, and another one with each of `accumulators` that fits; see
    `fitting_pairs`.

    Raises:
        ValueError: if a format or accumulator is unknown, an accumulator fits none of the formats,
            a recipe is invalid, two recipes share a name, or a recipe has the name of a format.
    """
    candidates: dict[str, Candidate] = {}
    known = [None if name.lower() in UNQUANTIZED else get_format(name) for name in formats]
    pairs, _ = fitting_pairs(known, accumulators)
    for fmt in known:
        canonical = DEFAULT_TYPE if fmt is None else fmt.name
        candidates.setdefault(canonical, Candidate(canonical, fmt))
        for accumulator in (accumulator for other, accumulator in pairs if other == fmt):
            full = f"{canonical}+{accumulator.name}"
            candidates.setdefault(full, Candidate(full, fmt, accumulator=accumulator))
    loaded = [load_recipe(path) for path in dict.fromkeys(recipes)]
    names = Counter(recipe.name for recipe in loaded)
    for recipe in loaded:
        if _is_format(recipe.name):
            raise ValueError(
                f"the recipe {recipe.path} has the name of a format; rename the file, because a "
                "study names a recipe after its file"
            )
        if names[recipe.name] > 1 or recipe.name in candidates:
            raise ValueError(
                f"more than one candidate has the name {recipe.name!r}; a recipe has the name of "
                f"its file, so rename {recipe.path}"
            )
        candidates[recipe.name] = Candidate(recipe.name, recipe=recipe)
    if not candidates:
        raise ValueError("nothing to study; give --formats, --recipes or both")
    return list(candidates.values())


def _is_format(name: str) -> bool:
    try:
        return name.lower() in UNQUANTIZED or get_format(name) is not None
    except ValueError:
        return False


def fitting_pairs(
    formats: Sequence[Format | None], accumulators: Sequence[str]
) -> tuple[list[tuple[Format | None, Accumulator]], list[str]]:
    """Return the pairs of a format and an accumulator whose matrix unit multiplies that format.

    The second result lists the reason why each other pair is left out. The format None stands for
    high precision.

    Raises:
        ValueError: if an accumulator is unknown, or its unit multiplies none of the formats.
    """
    pairs, misfits = [], []
    for name in dict.fromkeys(accumulators):
        accumulator, reasons = get_accumulator(name), []
        for fmt in dict.fromkeys(formats):
            try:
                for operation in OPERATIONS:
                    operands = HIGH_PRECISION if fmt is None else gemm_formats(operation, fmt)
                    for slots in GEMM_SLOTS.values():
                        check_operands(accumulator, *(getattr(operands, slot) for slot in slots))
                pairs.append((fmt, accumulator))
            except ValueError as error:
                reasons.append(str(error))
        if len(reasons) == len(set(formats)):
            why = "; ".join(reasons) or "there is no format; give --formats"
            raise ValueError(f"the accumulator {name} cannot be studied: {why}")
        misfits += reasons
    return pairs, misfits


@functools.cache
def operand_bits(operand: Operand, rows: int, columns: int, dtype: torch.dtype) -> float:
    """Return the bits per value of an operand, including block, row and column scales.

    Args:
        operand: how the operand is quantized.
        rows: number of rows of a matrix of the operand.
        columns: number of values in a row, which is the length of the reduction axis.
        dtype: dtype of the operand if it is not quantized.
    """
    if operand.format is None:
        return 8.0 * dtype.itemsize
    return bits_in_matrix(operand.format, rows, columns)


def describe(formats: GemmFormats, index: int) -> str:
    """Return the formats of the two operands of a matmul's GEMM `index`, such as `mxfp8`.

    The two are joined by ` x ` if they differ.
    """
    first, second = (str(formats.effective(slot)) for slot in SLOTS[2 * index : 2 * index + 2])
    return first if first == second else f"{first} x {second}"
