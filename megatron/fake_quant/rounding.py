"""Rounding to an element format, and powers of two that are exact.

Everything works on the bits of float32: `log2` and `pow` are off by one near powers of two on some
machine or other, and a number format is nothing but its behavior there.
"""

import torch
from torch import Tensor

from megatron.fake_quant.formats import ElementFormat
from megatron.fake_quant.random_bits import RANDOM_BITS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  #: that can be quantized
MANTISSA_BITS = 23
BIAS = 127
SIGN = -(1 << 31)
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000  #: its bits, and also the mask that keeps the exponent


def power_of_two_bits(exponent: int) -> int:
    """Bits of the float32 2^exponent, for exponents of normal numbers: -126 to 127."""
    return (exponent + BIAS) << MANTISSA_BITS


def round_to(x: Tensor, element: ElementFormat, random: Tensor | None = None) -> Tensor:
    """Round float32 `x` to a value of `element`; NaN stays, what is beyond the largest saturates.

    Args:
        x: of any shape; the result is a new tensor.
        element: says where half-way goes.
        random: None rounds to nearest. Integers from 0 to 2^24 - 1, of the shape of `x`, round up
            in magnitude with the probability of the distance from the value below, in steps of
            2^-24: exact, unless `x` is so small that it needs more bits, then less by under a step.

    Clearing the mantissa of a float leaves the power of two at or below it; held between `emin` and
    `emax` and divided by 2^mantissa_bits it is the spacing of the element's values there. (A
    float32 subnormal loses all its bits and is lifted to `emin` like everything small.) Dividing by
    a power of two is exact, so the rounding to an integer is the only one.
    """
    ulp_bits = x.view(torch.int32) & INFINITY
    ulp_bits.clamp_(power_of_two_bits(element.emin), power_of_two_bits(element.emax))
    ulp_bits.sub_(element.mantissa_bits << MANTISSA_BITS)
    ulp = ulp_bits.view(torch.float32)
    steps = torch.div(x, ulp)
    if random is not None:
        steps = _round_stochastically(steps, random)
    elif element.ties == "even":
        steps.round_()
    else:
        steps = _round_ties_away(steps)
    rounded = steps.mul_(ulp).clamp_(-element.max, element.max)
    return rounded.masked_fill_(rounded == 0, 0.0) if element.twos_complement else rounded


def _round_ties_away(steps: Tensor) -> Tensor:
    whole = steps.trunc()
    # The difference is exact; adding 1/2 and truncating would not be, just below 1/2.
    up = (steps - whole).abs_() >= 0.5
    return torch.where(up, whole + steps.sign(), whole)


def _round_stochastically(steps: Tensor, random: Tensor) -> Tensor:
    whole = steps.trunc()
    up = (steps - whole).abs_().mul_(1 << RANDOM_BITS) >= random + 1
    return torch.where(up, whole + steps.sign(), whole)


def check_tensor(x: Tensor, what: str) -> None:
    """Refuse anything but a dense tensor of a known dtype; `what` is the verb of the message.

    Raises:
        ValueError: if the type, layout or dtype is wrong; the message names the accepted ones.
    """
    if not isinstance(x, Tensor):
        raise ValueError(
            f"cannot {what} a {type(x).__name__}; give a torch.Tensor (torch.fx.symbolic_trace "
            "passes proxies: use torch.export or make_fx, which pass tensors)"
        )
    # Dynamo cannot trace x.layout in a backward pass; there the operators' fake rules check it.
    if x.is_nested or (not torch.compiler.is_compiling() and x.layout is not torch.strided):
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise ValueError(
            f"cannot {what} a {kind} tensor; give a dense one, such as x.to_dense(), or the parts "
            "of a nested one, x.unbind()"
        )
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise ValueError(
            f"cannot {what} a tensor of {x.dtype}; give one of {names}, for instance by x.float()"
        )
