"""Multiply two matrices with the arithmetic of an accumulator."""

import torch
from torch import Tensor

from megatron.fake_quant.accumulate import reference
from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.element_types import (
    check_accepted,
    check_values,
    smallest_exponent,
)
from megatron.fake_quant.accumulate.names import get_accumulator
from megatron.fake_quant.accumulate.unit_operand import UnitOperand
from megatron.fake_quant.elements import E4M3
from megatron.fake_quant.fused import dispatch
from megatron.fake_quant.matmul.autocast import no_autocast
from megatron.fake_quant.rounding import round_to

E8M0_LARGEST = 127  #: exponent of the largest E8M0 scale; that of the smallest one is -127


def accumulated_matmul(
    a_MK: Tensor,
    b_NK: Tensor,
    accumulator: Accumulator | str,
    *,
    elements: tuple[str, str] | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return A B^T, with products summed as the matrix unit of `accumulator` sums them.

    For example, `accumulated_matmul(a, b, "hopper_fp8")` multiplies FP8 elements. The scales of
    tensors and rows are not part of the elements; multiply the result with them.

    Args:
        a_MK: elements of A, `[..., M, K]` in float32, each a number of A's element type.
        b_NK: elements of B, `[..., N, K]` in float32, with the same leading dimensions.
        accumulator: an accumulator or its name; see `python -m megatron.fake_quant accumulate`.
        elements: names of the element types of A and of B, such as ("e4m3", "e5m2"). They matter
            because subnormal elements are aligned differently. The default for both is the first
            type that the unit multiplies, or float32 for a research accumulator.
        scales: block scales of A and of B, `[..., M, ceil(K / block)]` and `[..., N, ceil(K /
            block)]` in float32, for an accumulator that applies block scales; None if all are 1.

    Returns:
        The product, `[..., M, N]` in float32, without a gradient; `quantized_matmul` has one.

    Raises:
        ValueError: if shapes or dtypes do not fit, if the unit does not multiply these element
            types or applies no block scales, or if a value is not a number of its element type.
    """
    if isinstance(accumulator, str):
        accumulator = get_accumulator(accumulator)
    elif not isinstance(accumulator, Accumulator):
        raise ValueError(
            f"{accumulator!r} is not an accumulator; pass one, or a name such as 'hopper_fp8'"
        )
    _check_shapes(a_MK, b_NK)
    _check_pair("elements", elements, str, "the names of two element types")
    _check_pair("scales", scales, Tensor, "two tensors")
    sides = (a_MK.detach().resolve_neg(), b_NK.detach().resolve_neg())
    if not accumulator.simulated and scales is not None:
        raise ValueError(_no_scales(accumulator))
    if not accumulator.simulated and elements is None:
        return _plain_matmul(*sides)
    if elements is None:
        elements = ((accumulator.elements or ("float32",))[0],) * 2
    check_accepted(accumulator, elements)
    operands = []
    for index, (x, name) in enumerate(zip(sides, elements, strict=True)):
        check_values(x, name, "AB"[index])
        scale = None
        if scales is not None:
            scale = _checked_scales(scales[index], x, accumulator, "AB"[index])
        operands.append(UnitOperand(x, smallest_exponent(name), scale))
    if not accumulator.simulated:
        return _plain_matmul(*sides)
    return multiply(operands[0], operands[1], accumulator)


def multiply(
    a: UnitOperand, b: UnitOperand, accumulator: Accumulator, *, start: Tensor | None = None
) -> Tensor:
    """Return A B^T + `start` without checking the operands.

    The accumulator must be a simulated one. Each sum begins with its value of `start`, a float32
    tensor of the result's shape, or with zero; see `scalar.dot`.
    """
    leading = a.elements.shape[:-2]
    flat_a, flat_b = a.flat(), b.flat()
    shape = (*leading, a.elements.shape[-2], b.elements.shape[-2])
    if start is not None:
        start = start.reshape(flat_a.elements.shape[0], *shape[-2:])
    kernel = dispatch.find_multiplication(flat_a.elements, flat_b.elements)
    if kernel is not None:
        return kernel(flat_a, flat_b, accumulator, start=start).reshape(shape)
    products = [
        reference.summed(
            flat_a.batch(index),
            flat_b.batch(index),
            accumulator,
            start=None if start is None else start[index],
        )
        for index in range(flat_a.elements.shape[0])
    ]
    return torch.stack(products).reshape(shape) if products else a.elements.new_zeros(shape)


def _plain_matmul(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return A B^T in float32, even where autocast would compute it in fewer bits."""
    with no_autocast(a_MK.device.type):
        return torch.matmul(a_MK, b_NK.transpose(-2, -1))


def _check_pair(name: str, pair: object, kind: type, what: str) -> None:
    if pair is None:
        return
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        size = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
        raise ValueError(
            f"{name} is a {type(pair).__name__}{size}; pass {what}, of A and of B, as a tuple"
        )
    for side in pair:
        if not isinstance(side, kind):
            raise ValueError(
                f"{name} contains a {type(side).__name__}; pass {what}, of A and of B, as a tuple"
            )


def _check_shapes(a_MK: Tensor, b_NK: Tensor) -> None:
    for name, x in (("A", a_MK), ("B", b_NK)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}; pass a float32 tensor")
        if x.dtype != torch.float32 or x.dim() < 2:
            raise ValueError(
                f"{name} is a tensor of {x.dtype} with the shape {tuple(x.shape)}; pass float32 "
                "with at least two dimensions"
            )
        if x.layout != torch.strided or x.is_meta or x.device != a_MK.device:
            raise ValueError(
                f"{name} is a {x.layout} tensor on the device {x.device}, and A is on "
                f"{a_MK.device}; pass dense tensors with values, on the same device"
            )
    if a_MK.shape[-1] != b_NK.shape[-1] or a_MK.shape[:-2] != b_NK.shape[:-2]:
        raise ValueError(
            f"A {tuple(a_MK.shape)} and B {tuple(b_NK.shape)} do not fit; A is [..., M, K] and B "
            "is [..., N, K] with equal leading dimensions"
        )


def _no_scales(accumulator: Accumulator) -> str:
    return (
        f"the accumulator {accumulator.name} applies no block scales; multiply the result with the "
        "scales of tensors or rows instead"
    )


def _checked_scales(scales: Tensor, x: Tensor, accumulator: Accumulator, operand: str) -> Tensor:
    """Return the scales of one operand, after checking their shape and values."""
    block = accumulator.scale_block
    if block is None:
        raise ValueError(_no_scales(accumulator))
    expected = (*x.shape[:-1], -(-x.shape[-1] // block))
    if scales.shape != expected or scales.dtype != torch.float32 or scales.device != x.device:
        raise ValueError(
            f"the scales of {operand} are a tensor of {scales.dtype} on {scales.device} with the "
            f"shape {tuple(scales.shape)}; the accumulator {accumulator.name} needs one float32 "
            f"per {block} elements, with the shape {expected}, on {x.device}"
        )
    _check_scale_values(scales, accumulator, operand)
    return scales.detach()


def _check_scale_values(scales: Tensor, accumulator: Accumulator, operand: str) -> None:
    """Refuse scales that are not numbers of the type that the unit applies."""
    if accumulator.scale_type == "e8m0":
        exact = torch.frexp(scales.double())
        wrong = (exact.mantissa != 0.5) | ((exact.exponent - 1).abs() > E8M0_LARGEST)
    elif accumulator.scale_type == "e4m3":
        wrong = (round_to(scales, E4M3) != scales) | (scales < 0)
    else:
        return
    wrong &= ~scales.isnan()
    if wrong.any():
        raise ValueError(
            f"the scales of {operand} contain {scales[wrong][0].item():g}, which is not "
            f"an {accumulator.scale_type.upper()} scale; pass "
            + ("powers of two" if accumulator.scale_type == "e8m0" else "nonnegative E4M3 numbers")
        )
