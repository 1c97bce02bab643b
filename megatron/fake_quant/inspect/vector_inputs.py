"""Choose the inputs of the conformance vectors of a number format.

Each input tests one rule, such as ties or the ends of the scale's range. The inputs are computed
from the data of the format: rounding thresholds from the values of its element type, maxima of
blocks from the numbers that its scales can have. A new format with an existing scaling therefore
needs no code here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.fake_quant import scalings
from megatron.fake_quant.block_scaling import BlockScaling
from megatron.fake_quant.elements import Element
from megatron.fake_quant.formats import Format
from megatron.fake_quant.inspect.format_properties import all_values, infinite_from
from megatron.fake_quant.inspect.vector_frames import (
    MOST_VALUES,
    alternative_unit,
    anchor_of,
    frame_of,
    height_of,
    matrix,
    unit_of,
    width_of,
)
from megatron.fake_quant.random_bits import random_bits
from megatron.fake_quant.scalings.float8_scales import bound
from megatron.fake_quant.special_scalings import (
    ChoiceScaling,
    GroupScaling,
    MacroScaling,
    PairScaling,
)

_MOST_CODES = 1 << 9  #: number of values of an element type above which only some are used
_FLOAT32_MAX = torch.finfo(torch.float32).max
_SMALLEST = math.ldexp(1, -149)  #: smallest positive float32
#: Values of a block whose scale is under test, divided by the largest of them.
_FRACTIONS = (1, -1, 0.5, -0.25, 0.7, -0.4, 0.3, -0.15, 0.1, 0.6, -0.9, 0.8, -0.05, 0.02, 0, -0.35)


@dataclass(frozen=True, slots=True)
class VectorInput:
    """Input of one conformance vector, and the rule that it tests."""

    name: str
    rule: str  #: reason for the vector, in one line
    x: Tensor
    axis: int = -1  #: axis along which blocks run


def vector_inputs(fmt: Format) -> list[VectorInput]:
    """Return the inputs of all vectors of a format, each with the rule that it tests."""
    makers: tuple[Callable[[Format], list[VectorInput]], ...] = (
        _element_inputs,
        _special_inputs,
        _scale_inputs,
        _tensor_inputs,
        _tie_inputs,
        _shape_inputs,
    )
    return [vector for make in makers for vector in make(fmt)]


def _numbers(element: Element) -> Tensor:
    """Return the finite numbers of an element type in ascending order.

    Of a type with many numbers, the neighbors of 0, 1, the smallest normal number and the largest
    number are returned.
    """
    every = all_values(element)
    values: Tensor = torch.unique(every[every.isfinite()])
    if len(values) <= _MOST_CODES:
        return values
    marks = torch.tensor([0, element.smallest_normal, 1, element.max])
    near = torch.searchsorted(values, torch.cat([-marks, marks])).unsqueeze(-1)
    position = (near + torch.arange(-4, 5)).clamp(0, len(values) - 1)
    chosen: Tensor = torch.unique(position)
    return values[chosen]


def _around(x: Tensor) -> Tensor:
    """Return each number of `x` between its two float32 neighbors."""
    infinity = torch.full_like(x, math.inf)
    return torch.stack([x.nextafter(-infinity), x, x.nextafter(infinity)], dim=-1).flatten()


def _element_inputs(fmt: Format) -> list[VectorInput]:
    """Return inputs that test the rounding of each element type of a format."""
    vectors = []
    for element in fmt.elements:
        frame, kind = frame_of(fmt, element), ""
        unit, limit = unit_of(fmt, frame), anchor_of(fmt)
        if len(fmt.elements) > 1:
            kind = f"_{element.name}"
            # `unit` converts numbers of `element` to values: IF4's integer n stands for 6/7 * n.
            unit, limit = alternative_unit(fmt, element), float(frame.base.max())
        numbers = _numbers(element).double()
        middles = ((numbers[1:] + numbers[:-1]) / 2).float()
        if element.ties == "away" and not element.saturates:
            middles = torch.cat([middles, torch.tensor([infinite_from(element)])])
        step = float(numbers[numbers > 0].min()) * unit
        quarters = torch.arange(-16, 17) / 4 * step
        inputs = {
            "edges": (
                _around(middles * unit),
                "the float32 numbers just below, at and just above every rounding threshold of "
                f"{element.name}; a threshold that float32 represents exactly is a tie",
            ),
            "codes": (
                (numbers * unit).float(),
                f"numbers of {element.name} times the scale, which rounding does not change",
            ),
            "subnormals": (
                _around(quarters),
                f"multiples of a quarter of the smallest number of {element.name}, and their "
                "neighbors: subnormal elements and underflow",
            ),
        }
        for name, (values, rule) in inputs.items():
            if fmt.block_size is not None:
                values = values[values.abs() <= limit]
            vectors.append(VectorInput(name + kind, rule, matrix(frame.fill(values), fmt)))
    return vectors


def _of_maxima(maxima: Sequence[float] | Tensor, fmt: Format) -> Tensor:
    """Return, for each maximum, a block whose values are fixed fractions of it."""
    size = width_of(fmt) * height_of(fmt)
    fractions = torch.tensor(_FRACTIONS).repeat(-(-size // len(_FRACTIONS)))[:size]
    return torch.as_tensor(maxima, dtype=torch.float32).unsqueeze(-1) * fractions


def _special_inputs(fmt: Format) -> list[VectorInput]:
    """Return inputs with NaN, Inf, zeros and float32 subnormal numbers."""
    plain = _of_maxima([anchor_of(fmt)] * 3, fmt)
    nan, infinity, zero = plain.clone(), plain.clone(), plain.clone()
    nan[1, 2] = math.nan
    infinity[0, 2], infinity[2, 3] = math.inf, -math.inf
    zero[1] = torch.tensor([0.0, -0.0]).repeat(plain.shape[1] // 2 + 1)[: plain.shape[1]]
    multiples = torch.tensor([1, 2, 3, 5, 1000, 4194303, 4194304, 4194305, 8388607, 8388608.0])
    subnormal = _of_maxima(multiples, fmt)
    return [
        VectorInput("nan", "one NaN in the second block", matrix(nan, fmt)),
        VectorInput(
            "infinity", "Inf in the first and -Inf in the third block", matrix(infinity, fmt)
        ),
        VectorInput(
            "zero_block", "a block of zeros of both signs beside other blocks", matrix(zero, fmt)
        ),
        VectorInput(
            "zero_tensor",
            "nothing but zeros of both signs, so that an outer scale has no maximum",
            zero[1].repeat(2, 1).reshape(-1, width_of(fmt)),
        ),
        VectorInput(
            "subnormal_block",
            "blocks of float32 subnormal numbers, up to 2^-126",
            matrix(subnormal * _SMALLEST, fmt),
        ),
        VectorInput(
            "saturation",
            "block maxima from the largest number up to twice it, then the largest float32",
            matrix(_of_maxima(_beyond(fmt), fmt), fmt),
        ),
    ]


def _beyond(fmt: Format) -> list[float]:
    """Return maxima that test whether values saturate, and from which magnitude on."""
    anchor = anchor_of(fmt)
    next_power = math.ldexp(1, math.frexp(anchor)[1])
    # HiFloat8 overflows from 1.25 times its largest number on. This number is a power of two.
    factors = torch.tensor([anchor, 1.25 * anchor, 1.5 * anchor, next_power, 2 * anchor])
    finite = [*_around(factors).tolist(), _FLOAT32_MAX / 2, _FLOAT32_MAX]
    return [x for x in finite if math.isfinite(x)]


def _scale_inputs(fmt: Format) -> list[VectorInput]:
    """Return inputs that test the scales of blocks."""
    if fmt.block_size is None:
        return []
    exponents = [*range(-149, -115), *range(-115, 115, 10), *range(115, 128)]
    ends = [math.ldexp(m, e) for e in exponents for m in (1, 1.75)]
    if fmt.one_block:
        return _whole_scales(fmt, ends)
    steps = [math.ldexp(scalings.target(fmt) or 1, -e) * m for e in range(32) for m in (1, 0.8125)]
    vectors = [
        VectorInput(
            "scale_edges",
            "block maxima just below, at and just above the numbers at which the scale changes",
            matrix(_of_maxima(_around(_scale_changes(fmt)), fmt), fmt),
        ),
        VectorInput(
            "scale_ends",
            "block maxima from the smallest to the largest float32: both ends of the scales",
            matrix(_of_maxima(ends, fmt), fmt),
        ),
    ]
    if fmt.has_outer_scale:
        vectors.append(
            VectorInput(
                "scale_underflow",
                "block maxima that fall below that of the outer scale until block scales underflow",
                matrix(_of_maxima(steps, fmt), fmt),
            )
        )
    if isinstance(fmt.scaling, GroupScaling | PairScaling):
        vectors.append(_finer_scales(fmt))
    return vectors


def _whole_scales(fmt: Format, ends: Sequence[float]) -> list[VectorInput]:
    """Return inputs, one per maximum, that test the scale of a tensor that is one block."""
    changes = _around(_scale_changes(fmt)).tolist()
    near = "just below, at or just above a number at which the scale changes"
    maxima = {
        "scale_edges": (changes, f"the largest magnitude of the tensor is {near}"),
        "scale_ends": (ends[::9], "maxima from the smallest to the largest float32"),
    }
    return [
        VectorInput(f"{name}_{i}", rule, matrix(_of_maxima([amax], fmt), fmt))
        for name, (numbers, rule) in maxima.items()
        for i, amax in enumerate(numbers)
    ]


def _scale_changes(fmt: Format) -> Tensor:
    """Return block maxima near which the block scale changes."""
    scaling, anchor = fmt.scaling, anchor_of(fmt)
    if isinstance(scaling, MacroScaling):
        steps = torch.tensor([0, 1, 2, 63, 127, 128, 254, 255])
        return torch.cat([6 / (1 + steps / 256), 7.25 / (1 + steps / 256)])
    if fmt.block_scale in ("E8M0", "FP32"):
        mantissa_bits = getattr(fmt.element, "mantissa_bits", 1)
        half_up = 1 - math.ldexp(1, -2 - mantissa_bits)
        top = getattr(scaling, "top", None) or anchor
        significands = sorted({0.5, 0.75, math.frexp(anchor)[0], half_up, math.frexp(top)[0]})
        return torch.tensor([math.ldexp(s, e) for e in (-20, -1, 1, 9) for s in significands])
    assert scaling is not None
    scales = scalings.stored_scales(scaling)
    scales = torch.unique(scales[scales.isfinite() & (scales > 0)])
    if isinstance(scaling, BlockScaling) and scaling.outer != "none":
        scales = scales[scales <= bound(scaling)]
    middles = (scales[1:] + scales[:-1]) / 2
    chosen = torch.cat([middles[:10], middles[len(middles) // 2 :][:8], middles[-8:]])
    return torch.cat([scales[:1] / 2, chosen, scales[-1:]]) * anchor


def _finer_scales(fmt: Format) -> VectorInput:
    """Return an input that tests the scale bits that neighboring values of a block share."""
    size = width_of(fmt)
    base = torch.zeros(size)
    base[0] = anchor_of(fmt)
    blocks = []
    for value in _around(torch.tensor([1.0, 2.0, 4.0])).tolist():
        block = base.clone()
        block[size // 2] = value
        block[size - 1] = -value
        blocks.append(block)
    return VectorInput(
        "finer_scales",
        "maxima of neighbors just below, at and just above the numbers at which their bits change",
        matrix(torch.stack(blocks), fmt),
    )


def _tensor_inputs(fmt: Format) -> list[VectorInput]:
    """Return inputs that test the range of an outer scale, one tensor per maximum."""
    if not fmt.has_outer_scale:
        return []
    target = scalings.target(fmt) or 1
    maxima = {
        "smallest": (_SMALLEST, "the smallest float32, whose outer scale is out of range"),
        "subnormal": (math.ldexp(1, -127), "a subnormal number, at the end of the outer scales"),
        "small": (1e-30, "1e-30, at which some definitions limit the outer scale"),
        "odd": (math.pi, "pi, so that the outer scale is rounded"),
        "target": (target, f"{target:g}, so that the outer scale is 1"),
        "largest": (_FLOAT32_MAX, "the largest float32"),
    }
    blocks = {name: _of_maxima([x, x / 3, x / 100], fmt) for name, (x, _) in maxima.items()}
    return [
        VectorInput(
            f"tensor_{name}",
            f"the largest magnitude of the tensor is {words}",
            blocks[name].reshape(-1, width_of(fmt)),
        )
        for name, (_, words) in maxima.items()
    ]


def _tie_inputs(fmt: Format) -> list[VectorInput]:
    """Return inputs for which two scales or element types of a block have (almost) equal errors."""
    search = isinstance(fmt.scaling, BlockScaling) and fmt.scaling.search != "none"
    if not (search or isinstance(fmt.scaling, ChoiceScaling)):
        return []
    contents: list[list[float]] = [
        [6],
        [6, 3, 1.5, 0.75],
        [6, 3.5],
        [6, 0.25, -0.25],
        [6, -3.5, 0.25],
        [6, 6 * 5 / 7, 6 * 3 / 7],
        [7, 5, 3, 1],
        [6, 6, 6, 6],
    ]
    blocks = []
    for content in contents:
        block = torch.zeros(width_of(fmt) * height_of(fmt))
        block[: len(content)] = torch.tensor(content)
        below = block.nextafter(torch.zeros_like(block))
        above = block.nextafter(block * 2)
        above[0] = below[0] = block[0]
        blocks += [below, block, above]
    words = "the two scales of 4/6" if search else "the two element types"
    rule = f"blocks for which {words} have equal errors, and their neighbors"
    return [VectorInput("error_ties", rule, matrix(torch.stack(blocks), fmt))]


def _noise(rows: int, columns: int, *, seed: int, span: int = 24) -> Tensor:
    """Return random float32 numbers of both signs, scaled by one power of two per row.

    The powers rise from 2^-span in the first row to 2^span in the last.
    """
    bits = random_bits((rows, columns), seed, torch.device("cpu"))
    values = (bits.float() - (1 << 23)) / (1 << 23)
    exponents = torch.linspace(-span, span, rows).round().tolist()
    powers = torch.tensor([math.ldexp(1, int(exponent)) for exponent in exponents])
    return values * powers.unsqueeze(-1)


def _shape_inputs(fmt: Format) -> list[VectorInput]:
    """Return inputs of random numbers in several shapes, axes and dtypes."""
    width = width_of(fmt)
    small = width * height_of(fmt) <= MOST_VALUES // 16
    rows = height_of(fmt) * (8 if small else 1)
    odd = (2 if small else 1) * width + 5
    noise = _noise(rows, 2 * width, seed=1)
    return [
        VectorInput("random", "random numbers, rows at different magnitudes", noise),
        VectorInput(
            "odd_length",
            "a length that the block size does not divide: the last block is shorter",
            _noise(3, odd, seed=2),
        ),
        VectorInput(
            "first_axis",
            "the first axis of a matrix; codes and scales have it last",
            _noise(odd, 3, seed=3),
            axis=0,
        ),
        VectorInput(
            "bfloat16",
            "bfloat16 numbers; results are rounded to bfloat16",
            _noise(rows, 2 * width, seed=4).bfloat16(),
        ),
        VectorInput(
            "float16",
            "float16 numbers; results are rounded to float16",
            _noise(rows, 2 * width, seed=5, span=12).half(),
        ),
    ]
