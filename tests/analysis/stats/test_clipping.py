"""Check what `saturated` counts against rational arithmetic that shares no code with the program.

A value is clipped if it would round to a larger number than the format's largest in an unbounded
exponent range. `Oracle` follows the specifications: OCP Microscaling v1.0, arXiv 2509.25149 for
NVFP4, arXiv 2409.16626 for HiFloat8 and arXiv 2602.11287 for HiFloat4. Where a format prescribes
float32 arithmetic (NVFP4, scales of a tensor), numpy's float32 does each operation.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch
from gmpy2 import mpq as Fraction

from megatron.analysis.stats import direct, tensor
from megatron.analysis.stats.format_groups import group_formats
from megatron.analysis.stats.matrix_view import matrix_view_of
from megatron.fake_quant import dequantize, get_format, quantize
from tests.analysis.stats.inputs import heavy

#: Mantissa bits, largest number, and whether a tie goes away from zero.
ELEMENTS = {
    "e4m3": (3, Fraction(448), False),
    "e5m2": (2, Fraction(57344), False),
    "e3m2": (2, Fraction(28), False),
    "e2m3": (3, Fraction(15, 2), False),
    "e2m1": (1, Fraction(6), False),
    "int8": (6, Fraction(127, 64), False),
    "s1p2": (2, Fraction(7, 4), True),
    "hif8": (1, Fraction(32768), True),
    "float16": (10, Fraction(65504), False),
}
#: Element, block size and rule of formats with E8M0 scales.
MX = {
    "mxfp8": ("e4m3", 32, "floor"),
    "mxfp8:rceil": ("e4m3", 32, "rceil"),
    "mx:e5m2:b32:ceil": ("e5m2", 32, "ceil"),
    "mx:e5m2:b32:even": ("e5m2", 32, "even"),
    "mx:e4m3:b16:even": ("e4m3", 16, "even"),
    "mx:e2m1:b16:even": ("e2m1", 16, "even"),
    "mx:e3m2:b32:floor": ("e3m2", 32, "floor"),
    "mxfp6_e2m3": ("e2m3", 32, "floor"),
    "mxfp4": ("e2m1", 32, "floor"),
    "mxint8": ("int8", 32, "floor"),
}
TENSOR = {
    "fp8_e4m3": ("e4m3", 448),
    "fp8_e5m2": ("e5m2", 57344),
    "hifp8:t15": ("hif8", 15),
    "hifp8:t60000": ("hif8", 60000),
}
CASTS = {"hifp8": "hif8", "hifp8:inf": "hif8", "fp16": "float16"}
NAMES = (*MX, *TENSOR, *CASTS, "nvfp4", "hifp4")


@functools.cache
def power(exponent: int) -> Fraction:
    """Return 2^exponent."""
    return Fraction(2) ** exponent


def exponent(x: Fraction) -> int:
    """Return floor(log2 x)."""
    found = x.numerator.bit_length() - x.denominator.bit_length()
    return found if power(found) <= x else found - 1


@functools.cache
def edge_of(element: str) -> tuple[Fraction, bool]:
    """Return the edge from which magnitudes round to the number after the largest.

    The second value is true if the edge itself does.
    """
    mantissa, largest, away = ELEMENTS[element]
    step = power(exponent(largest) - mantissa)
    if element == "hif8":  # 1.5 * 2^15 is the next one; there is one bit of mantissa
        step = power(14)
    odd = (largest / step) % 2 == 1
    return largest + step / 2, away or odd


def is_clipped(scaled: Fraction, element: str) -> bool:
    """Return whether a scaled magnitude would round to the number after the largest."""
    edge, inclusive = edge_of(element)
    return scaled >= edge if inclusive else scaled > edge


def rounded(x: Fraction, bits: int) -> Fraction:
    """Return the nearest number of so many significant bits, ties to even."""
    if not x:
        return x
    step = power(exponent(x) - bits + 1)
    return round(x / step) * step  # Python rounds ties to even


def e8m0(amax: Fraction, element: str, rule: str) -> int:
    """Return the exponent of a block's scale."""
    mantissa, largest, _ = ELEMENTS[element]
    emax, e = exponent(largest), exponent(amax)
    if rule == "ceil":
        e += amax > power(e)
    elif rule == "rceil":
        e += amax > largest * power(e - emax)
    elif rule == "even":
        step = power(e - mantissa)
        e = exponent((amax / step + Fraction(1, 2)).__floor__() * step)
    return min(max(e - emax, -127), 127)


def e4m3(x: Fraction) -> Fraction:
    """Return the nearest E4M3 number, saturating."""
    step = power(max(exponent(x), -6) - 3) if x else Fraction(1)
    return min(round(x / step) * step, Fraction(448))


def hifloat4(block: list[Fraction]) -> list[bool]:
    """Return which of 64 values are clipped."""
    amax = max(block)
    e6m2 = rounded(rounded(amax * rounded(Fraction(1, 7), 8), 8), 3)
    e6m2 = min(max(e6m2, power(-48)), Fraction(3, 2) * 2**15)
    scaled = [x * rounded(1 / e6m2, 8) for x in block]
    clipped = []
    for place, value in enumerate(scaled):
        eight = scaled[place // 8 * 8 : place // 8 * 8 + 8]
        four = scaled[place // 4 * 4 : place // 4 * 4 + 4]
        e8 = max(eight) >= 4
        e16 = max(four) / 2**e8 >= 2
        clipped.append(is_clipped(value / 2 ** (e8 + e16), "s1p2"))
    return clipped


def nvfp4_scaled(blocks: list[np.ndarray]) -> list[Fraction | None]:
    """Return each value scaled for its element; None under a scale of zero."""
    f32 = np.float32
    encode = f32(2688) / max(block.max() for block in blocks)
    decode, found = f32(1) / encode, []
    for block in blocks:
        scale = e4m3(Fraction(float(block.max() * (encode * f32(1 / 6)))))
        if not scale:
            found += [None] * len(block)
            continue
        multiplier = f32(1) / (f32(float(scale)) * decode)
        found += [Fraction(float(x * multiplier)) for x in block]
    return found


def oracle(x: torch.Tensor, name: str) -> int:
    """Return how many values of a matrix are clipped, with blocks along rows."""
    return sum(clipped(x, name))


def clipped(x: torch.Tensor, name: str) -> list[bool]:
    """Return which values of a matrix are clipped, row by row, with blocks along rows."""
    magnitudes = x.float().abs().numpy()
    if name in CASTS:
        return [is_clipped(Fraction(float(v)), CASTS[name]) for v in magnitudes.flat]
    if name in TENSOR:
        element, target = TENSOR[name]
        encode = np.float32(target) / magnitudes.max()
        scaled = magnitudes * encode
        return [is_clipped(Fraction(float(v)), element) for v in scaled.flat]
    size = 16 if name == "nvfp4" else 64 if name == "hifp4" else MX[name][1]
    blocks = [row[at : at + size] for row in magnitudes for at in range(0, len(row), size)]
    if name == "nvfp4":
        return [v is not None and is_clipped(v, "e2m1") for v in nvfp4_scaled(blocks)]
    found: list[bool] = []
    for block in blocks:
        exact = [Fraction(float(v)) for v in block]
        if name == "hifp4":
            found += hifloat4([*exact, *[Fraction(0)] * (64 - len(exact))])[: len(exact)]
        elif any(exact):
            element, _, rule = MX[name]
            scale = power(e8m0(max(exact), element, rule))
            found += [is_clipped(v / scale, element) for v in exact]
        else:
            found += [False] * len(exact)
    return found


def elements_of(name: str) -> list[str]:
    """Return the elements whose edges matter for a format.

    Scales that are powers of two shift other elements' edges to values that the format's own
    element covers; other scales do not.
    """
    if name in MX:
        return [MX[name][0]]
    if name in CASTS:
        return [CASTS[name]]
    return list(ELEMENTS)


def edges(dtype: torch.dtype, name: str) -> torch.Tensor:
    """Return rows that begin with a value near a rounding edge.

    The values are, for each element, every bfloat16 in the binade of its largest number, and the
    float32 neighbors of the edges.
    """
    found = []
    for mantissa, largest, _ in map(ELEMENTS.get, elements_of(name)):
        top = power(exponent(largest))
        sixteenths = [float(top * Fraction(k, 128)) for k in range(128, 256)]
        step = top / 2**mantissa
        edge = np.float32(float(largest + step / 2))
        near = [np.nextafter(edge, np.float32(0)), edge, np.nextafter(edge, np.float32(np.inf))]
        found += [*sixteenths, *map(float, near)]
    first = torch.tensor(found)[:, None]
    # smaller values of a row also reach the edge if the first one raises the scale
    shares = torch.tensor([1.0, 0.9921875, 0.9375, -0.875, 0.8125, 0.5, 0.0, 2.0**-9] * 8)
    return (first * shares).to(dtype)


def measured(x: torch.Tensor, name: str) -> float:
    matrix = matrix_view_of(tuple(x.shape), layer_type="linear", tensor_name="input")
    _, found = tensor.measure(x, matrix, group_formats([name]))
    axis = "all" if (name, "all") in found else "row"
    numbers = found[name, axis].numbers()
    assert numbers["poisoned"] == 0
    return numbers["saturated"] * x.numel()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_saturated_counts_what_clipping_changes(name, dtype):
    for x in (edges(dtype, name), heavy((64, 96), dtype), 1000 * heavy((16, 80), dtype, 3)):
        x = torch.where(x.isfinite(), x, 0)
        assert measured(x, name) == pytest.approx(oracle(x, name), abs=1e-6)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxint8", "hifp8", "hifp8:inf", "hifp4"])
def test_the_cases_hold_clipped_values_and_values_that_round_down_to_the_largest(name):
    x = edges(torch.float32, name)
    assert 0 < oracle(x, name) < x.numel() / 2


@pytest.mark.parametrize(
    ("name", "kept", "clipped"),
    [  # ties go to even; in HiFloat8 and HiFloat4, away from zero
        ("mxfp4", 6.75, 7.0),
        ("mxfp8", 464.0, 466.0),
        ("mx:e5m2:b32:floor", 61184.0, 61440.0),
        ("mxint8", 1.9921875 - 2**-18, 1.9921875),
        ("hifp8", 40928.0, 40960.0),
        ("fp16", 65519.0, 65520.0),
    ],
)
def test_the_rounding_edge_of_each_element(name, kept, clipped):
    for value, count in ((kept, 0), (clipped, 1), (-clipped, 1)):
        assert measured(torch.tensor([[value, *[0.0] * 31]]), name) == count


def test_nvfp4_clips_nothing_of_usual_values():
    x = torch.randn(128, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert measured(x, "nvfp4") == oracle(x, "nvfp4") == 0


def test_values_under_a_scale_of_zero_underflow_and_are_not_clipped():
    x = torch.ones(2, 16)
    x[1] = 1e-9
    matrix = matrix_view_of((2, 16), layer_type="linear", tensor_name="input")
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("nvfp4", "nvfp4:sr"):
            _, found = tensor.measure(x.to(dtype), matrix, group_formats([name]))
            numbers = found[name, "row"].numbers()
            assert (numbers["underflow"], numbers["saturated"]) == (0.5, 0)


def test_stochastic_rounding_clips_what_its_draw_takes_up():
    """The probability of rounding up is the distance from the largest number, in steps."""
    x = torch.full((512, 32), 6.5)
    x[:, 0] = 7.9
    clipped = measured(x, "mxfp4:sr")
    expected = 512 * (31 * 0.25 + 0.95)
    assert abs(clipped - expected) < 5 * math.sqrt(512 * 32 * 0.2)
    assert measured(torch.full((4, 32), 6.0), "mxfp4:sr") == 0
    large = torch.tensor([[16384.0, 49152.0, 1e9, 1.0]])
    assert measured(large, "hifp8:hr") == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        *(
            "mxfp4:sr",
            "mxfp8:2d:sr",
            "mxint8:sr",
            "mx:e3m4:b16:rceil:sr",
            "nvfp4:sr",
            "nvfp4:2d:sr",
        ),
        *("hifp8:hr", "hifp8:hr:inf", "hifp8:sr", "hifp8:sr:inf", "hifp8:t60000:sr"),
        *("hifp4", "hifp4:sr", "fp8_e4m3:sr"),
    ],
)
def test_values_that_are_looked_at_one_by_one_get_the_codes_of_quantize(name, dtype):
    """The statistics round once, without an upper end, and clip the result afterwards."""
    x = heavy((70, 100), dtype, seed=5)
    x[:3] = torch.tensor([-0.0, math.inf, -math.inf, math.nan, 60000.0]).to(dtype).repeat(3, 20)
    x[3:36] *= torch.logspace(-9, 4, 33).unsqueeze(1).to(dtype)
    for axis in (0, 1):
        packed, _ = direct._quantized(x, get_format(name), axis)
        expected = quantize(x, name, axis, seed=direct.SEED)
        assert torch.equal(packed.codes, expected.codes)
        for ours, theirs in zip(
            packed.scales.parts().values(), expected.scales.parts().values(), strict=True
        ):
            assert torch.equal(ours, theirs)
        assert torch.equal(dequantize(packed).nan_to_num(1.5), dequantize(expected).nan_to_num(1.5))
