"""Round values to an element type in any of the rounding modes.

`round_to` looks up the rule for an element type and a rounding mode, and refuses a mode that has no
rule. To add a mode, add it to `ROUNDINGS` in `rounding_modes.py` and to `roundings` of each element
type in `elements.py` that supports it, and add its rule here. The fused kernels and the statistics
implement certain modes; formats with any other mode are computed by `reference.py`, which calls
`round_to`.
"""

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from megatron.fake_quant import hifloat8
from megatron.fake_quant.elements import CodedElement, ElementFormat, HiFloat8, TableElement
from megatron.fake_quant.float32_bits import INFINITY, MANTISSA_BITS, power_of_two_bits
from megatron.fake_quant.random_bits import RANDOM_BITS
from megatron.fake_quant.rounding_modes import Rounding

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  #: dtypes that can be quantized

Rule: TypeAlias = Callable[..., Tensor]


def round_to(
    x: Tensor,
    element: CodedElement,
    rounding: Rounding = "nearest",
    *,
    random: Tensor | None = None,
    source: torch.dtype = torch.float32,
) -> Tensor:
    """Round float32 `x` to values of the element type, and return a new float32 tensor.

    A NaN stays a NaN. Values beyond the largest number saturate unless the element type overflows
    to Inf.

    Args:
        x: values to round, of any shape.
        element: element type to round to.
        rounding: one of the element type's rounding modes.
        random: for stochastic rounding, integers from 0 to 2^24 - 1 in the shape of `x`. A value is
            rounded up in magnitude with a probability equal to its distance from the neighbor
            below, relative to the spacing, in steps of 2^-24. This is exact unless `x` is so small
            that the distance needs more bits; then the probability is too low by less than a step.
        source: dtype that `x` came from, for hybrid rounding.

    Raises:
        ValueError: if the element type does not support the rounding mode.
    """
    round_by, rules = _RULES[type(element)]
    check_rounding(rounding, rules, f"the element type {element.name}")
    return round_by(x, element, rules[rounding], random, source)


def check_rounding(rounding: str, implemented: Iterable[str], where: str) -> None:
    """Raise ValueError if a rounding mode is not in `implemented`.

    The message names the modes that `where` implements.
    """
    if rounding not in implemented:
        raise ValueError(
            f"{where} does not implement the rounding mode {rounding!r}; it has "
            f"{', '.join(implemented)}: choose one of these, or add the mode to rounding.py"
        )


def _round_element(
    x: Tensor, element: ElementFormat, rule: Rule, random: Tensor | None, source: torch.dtype
) -> Tensor:
    """Round `x` to an `ElementFormat`, whose spacing is a power of two in each binade.

    Clearing the mantissa of a float leaves the power of two at or below it. This power, clamped to
    the range from 2^emin to 2^emax and divided by 2^mantissa_bits, is the spacing of the element
    type at the value. (A float32 subnormal loses all its bits and is raised to 2^emin like every
    small value.) Dividing by a power of two is exact, so rounding to an integer is the only
    rounding.
    """
    ulp_bits = x.view(torch.int32) & INFINITY
    ulp_bits.clamp_(power_of_two_bits(element.emin), power_of_two_bits(element.emax))
    ulp_bits.sub_(element.mantissa_bits << MANTISSA_BITS)
    ulp = ulp_bits.view(torch.float32)
    steps = rule(torch.div(x, ulp), element, random)
    rounded = steps.mul_(ulp).clamp_(-element.max, element.max)
    return rounded.masked_fill_(rounded == 0, 0.0) if element.twos_complement else rounded


def _round_to_table(
    x: Tensor, element: TableElement, rule: Rule, random: Tensor | None, source: torch.dtype
) -> Tensor:
    """Round `x` to the values of a table, with the thresholds that `rule` returns for them.

    A value becomes the number after the last threshold that is below it.
    """
    values = torch.tensor(element.values, dtype=torch.float32, device=x.device)
    position = torch.searchsorted(rule(values), x.contiguous())
    return values[position].masked_fill_(x.isnan(), torch.nan)


def midpoints(values: Tensor) -> Tensor:
    """Return the midpoints between neighboring values, rounded to float32 as in bitsandbytes."""
    exact = values.double()
    return ((exact[1:] + exact[:-1]) / 2).float()


def _nearest(steps: Tensor, element: ElementFormat, random: Tensor | None) -> Tensor:
    """Round `steps`, which are in units of the element type's spacing, to the nearest integers."""
    if element.ties == "even":
        return steps.round_()
    whole = steps.trunc()
    # The difference `steps - whole` is exact. Adding 1/2 and then truncating would round the
    # float32 just below 1/2 up to 1.
    up = (steps - whole).abs_() >= 0.5
    return torch.where(up, whole + steps.sign(), whole)


def _stochastic(steps: Tensor, element: ElementFormat, random: Tensor | None) -> Tensor:
    """Round `steps`, which are in units of the spacing, to neighboring integers at random."""
    assert random is not None
    whole = steps.trunc()
    up = (steps - whole).abs_().mul_(1 << RANDOM_BITS) >= random + 1
    return torch.where(up, whole + steps.sign(), whole)


#: Rounding function and its rule for each rounding mode, keyed by the class of the element type.
_RULES: Mapping[type, tuple[Callable[..., Tensor], Mapping[Rounding, Rule]]] = MappingProxyType(
    {
        ElementFormat: (
            _round_element,
            {"nearest": _nearest, "stochastic": _stochastic, "eden": _nearest},
        ),
        TableElement: (_round_to_table, {"nearest": midpoints}),
        HiFloat8: (
            hifloat8.round_between_neighbors,
            {
                "nearest": hifloat8.nearest_up,
                "stochastic": hifloat8.stochastic_up,
                "hybrid": hifloat8.hybrid_up,
            },
        ),
    }
)


def check_tensor(x: Tensor, what: str) -> None:
    """Raise ValueError unless `x` is a dense tensor of a supported dtype.

    The message names the accepted types, layouts or dtypes; `what` is the verb in the message.
    """
    if not isinstance(x, Tensor):
        raise ValueError(
            f"cannot {what} a {type(x).__name__}; give a torch.Tensor (torch.fx.symbolic_trace "
            "passes proxies: use torch.export or make_fx, which pass tensors)"
        )
    # Dynamo cannot trace `x.layout` in a backward pass. There, the fake kernels of the operators
    # check the layout.
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
