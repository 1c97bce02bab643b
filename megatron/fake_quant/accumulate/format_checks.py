"""Refuse combinations of a format and an accumulator that no matrix unit computes.

An example is a format with blocks of 32 values in a unit that applies no block scales.
"""

import torch

from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.element_types import check_accepted
from megatron.fake_quant.block_scaling import WHOLE_AXIS
from megatron.fake_quant.elements import HiFloat8
from megatron.fake_quant.formats import Format
from megatron.fake_quant.matmul.operand import Operand

#: 16-bit element types; one of them stands for tensors whose dtype is not yet known.
HALVES = ("bfloat16", "float16")


def check_operands(accumulator: Accumulator, a: Operand, b: Operand) -> None:
    """Refuse an accumulator whose unit cannot multiply operands in these formats.

    A high-precision operand passes if the unit multiplies any 16-bit type. Whether the unit
    multiplies the model's dtype is checked when the model is known; see `recipe_check.py`.

    Raises:
        ValueError: if the accumulator is refused; the message gives the reason.
    """
    if not accumulator.simulated:
        return
    for operand in (a, b):
        if operand.split != "none":
            raise ValueError(
                f"the accumulator {accumulator.name} is for one product, and an operand with the "
                f"split {operand.split} makes two; remove the split or the accumulator"
            )
        if operand.format is not None and (reason := _misfit(operand.format, accumulator)):
            raise ValueError(
                f"the accumulator {accumulator.name} cannot be combined with "
                f"{operand.format.name}, {reason}"
            )
    half = next((name for name in HALVES if name in accumulator.elements), HALVES[0])
    names = [half if x.format is None else x.format.element.name for x in (a, b)]
    check_accepted(accumulator, (names[0], names[1]))


def element_name(fmt: Format | None, dtype: torch.dtype) -> str:
    """Return the name of a format's element type, or of the dtype of tensors without a format."""
    return str(dtype).removeprefix("torch.") if fmt is None else fmt.element.name


def _misfit(fmt: Format, accumulator: Accumulator) -> str | None:
    """Return why a unit cannot apply a format's scales or multiply HiFloat8, or None if it can."""
    scaling = fmt.scaling
    if isinstance(fmt.element, HiFloat8) and accumulator.elements:
        return (
            "because no description of a matrix unit that multiplies HiFloat8 is public; use the "
            "accumulator fp32"
        )
    if scaling is None or scaling.size is None:
        return None
    if scaling.alternative is not None:
        return "whose blocks choose between two element types; no described unit does this"
    if not scaling.one_scale:
        return "whose blocks have finer scales inside, which no described unit applies"
    if fmt.outer_size not in (None, WHOLE_AXIS):
        return (
            "whose outer scales differ along the reduction axis; choose outer-tensor or outer-row"
        )
    if scaling.size == WHOLE_AXIS:
        return None
    size, own = accumulator.scale_block, accumulator.scale_type
    if size is None:
        return (
            "which has block scales: this unit applies none; choose a unit that does (blackwell_mx "
            "for E8M0 scales, blackwell_nvfp4 for E4M3 scales, hopper_fp8_promote128 for blocks "
            "of 128), or a format with one scale per tensor or row"
        )
    if scaling.size % size:
        return f"which has one scale per {scaling.size} values: this unit takes one per {size}"
    if own not in ("fp32", _block_scale(fmt)):
        return f"which has {fmt.block_scale} block scales: this unit applies {str(own).upper()}"
    return None


def _block_scale(fmt: Format) -> str:
    """Return the number type of a format's block scales, such as e8m0.

    A headroom does not change the type, because the sums are divided by the headroom instead.
    """
    return str(fmt.block_scale).lower()
