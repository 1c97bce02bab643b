"""Properties of whole formats, on tensors that hypothesis generates.

If a format lacks a property, a test gives the reason and a counterexample.
"""

import copy
import functools
import inspect
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fake_quant import FORMATS, fake_quantize, get_format, quantize
from megatron.fake_quant.elements import Cast

from . import oracle
from .inputs import assert_same

MX = ["mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8"]
MX_VARIANTS = ["mxfp8:rceil", "mxfp4:ceil", "mxfp4:even", "mxint8:even", "mx:e3m4:b16:rceil"]
VARIANTS = [*MX_VARIANTS, "nvfp4:2d", "mxfp8:2d", "hifp8:inf", "hifp8:t15", "fp8_e4m3:pow2"]
NEAREST = [*FORMATS, *VARIANTS]
CASTS = [name for name in FORMATS if isinstance(FORMATS[name].element, Cast)]

names = pytest.mark.parametrize("name", NEAREST)


@st.composite
def tensors(draw: st.DrawFn, rows: int | None = None, columns: int | None = None) -> torch.Tensor:
    """Return rows of a few multiples of 2^-12 up to 2^12, in different orders.

    Many values are half-way between two numbers, and rows differ by powers of two.
    """
    width = columns or draw(st.integers(1, 70))
    whole = st.one_of(st.integers(-(1 << 24), 1 << 24), st.integers(-64, 64).map(lambda i: i << 9))
    values = torch.tensor(draw(st.lists(whole, min_size=1, max_size=20))).float() / 2**12
    powers = draw(st.lists(st.integers(-6, 6), min_size=rows or 1, max_size=rows or 5))
    places = torch.arange(len(powers)).view(-1, 1) * 7 + torch.arange(width)
    return torch.ldexp(values[places % len(values)], torch.tensor(powers).view(-1, 1))


def examples(**strategies: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """Run a test on 40 draws, which are the same for all formats and in every run.

    Drawing takes several times as long as quantizing, so a test draws only once for all formats.
    """
    run = settings(max_examples=40, deadline=None, derandomize=True, database=None)

    def decorate(test: Callable) -> Callable:
        @functools.cache
        def drawn() -> list[dict]:
            found: list[dict] = []
            run(given(**strategies)(lambda **values: found.append(values)))()
            return found

        @functools.wraps(test)
        def on_all(**arguments):
            for values in copy.deepcopy(drawn()):
                test(**arguments, **values)

        parameters = inspect.signature(test).parameters.values()
        rest = [parameter for parameter in parameters if parameter.name not in strategies]
        on_all.__signature__ = inspect.Signature(rest)
        return on_all

    return decorate


@pytest.mark.parametrize("name", [name for name in NEAREST if name != "nf4"])
@examples(x=tensors())
def test_it_is_odd(name, x):
    assert torch.equal(fake_quantize(-x, name), -fake_quantize(x, name))


def test_nf4_is_not_odd():
    """The table of NF4 has seven negative and eight positive numbers."""
    y = fake_quantize(torch.tensor([1.0, 0.8, -1.0, -0.8]), "nf4")
    assert y[1] != -y[3]


IDEMPOTENT = [*MX, *MX_VARIANTS, "mxfp8:2d", "hifp8", "hifp8:inf", "fp8_e4m3:pow2", *CASTS]


@pytest.mark.parametrize("name", IDEMPOTENT)
@examples(x=tensors())
def test_it_is_idempotent(name, x):
    """A block's maximum may shrink, but a smaller scale represents the same values up to it."""
    once = fake_quantize(x, name)
    assert torch.equal(fake_quantize(once, name), once)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        # The scale is not a power of two, so the maximum changes by an ulp.
        ("fp8_e4m3", [1.375, 1.0]),
        ("fp8_e5m2", [1.375, 1.0]),
        ("hifp8:t15", [10.875, 1.0]),
        ("nvfp4", [8.875, 1.0]),
        # 0.25 becomes 6 * 0.0390625 = 0.234. A seventh of that, 0.0335, is rounded to the scale
        # 2^-5, whose largest number, 7 * 2^-5 = 0.219, is less than 0.234.
        ("hifp4", [0.25, 0.125]),
        # The low bits that decided the rounding are zero in the result.
        ("hifp8:hr", [17.0]),
    ],
)
def test_it_is_not_idempotent_where_the_scale_or_the_bits_change(name, values):
    once = fake_quantize(torch.tensor(values), name)
    assert not torch.equal(fake_quantize(once, name), once)


#: Formats whose blocks have finer scales of their own, and the neighbors that share one.
FINER = {"hifp4": 4, "mx9": 2, "mx6": 2, "mxfp4_macro": 32, "mxfp4_macro_oas": 32}


@pytest.mark.parametrize("name", [name for name in NEAREST if name not in FINER])
@examples(x=tensors())
def test_it_is_monotone_within_a_block(name, x):
    size = get_format(name).block_size or x.shape[1]
    rows = x[:, :size].sort(dim=1).values
    y = fake_quantize(rows, name)
    assert (y[:, 1:] >= y[:, :-1]).all()


@examples(x=tensors(columns=4))
def test_hifloat4_is_monotone_within_four_neighbors(x):
    """Other neighbors have exponents of their own."""
    assert (fake_quantize(x.sort(dim=1).values, "hifp4").diff(dim=1) >= 0).all()


@pytest.mark.parametrize("name", ["mx9", "mx6"])
@examples(x=tensors(columns=2))
def test_pair_exponents_are_monotone_within_a_pair(name, x):
    assert (fake_quantize(x.sort(dim=1).values, name).diff(dim=1) >= 0).all()


def test_pair_exponents_are_not_monotone_beyond():
    """The step of mx6 is 1/8 beside the 1, and 1/16 in the other pair."""
    x = torch.tensor([0.55, 1.0, 0.54, 0.0])
    y = fake_quantize(x, "mx6")
    assert x[0] > x[2]
    assert y[0] < y[2]


def test_macro_blocks_are_not_monotone_beyond_a_block():
    """The step at 0.7 is 1/2 with a 6 in the block, and 1/4 in a block of smaller values."""
    x = torch.zeros(64)
    x[0], x[1], x[32] = 6.0, 0.7, 0.69
    y = fake_quantize(x, "mxfp4_macro")
    assert x[1] > x[32]
    assert y[1] < y[32]


def test_hifloat4_is_not_monotone_beyond():
    """The step at 1.2 is 1 with a 7 beside it, and 1/4 without."""
    x = torch.tensor([1.2, 7.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.15])
    y = fake_quantize(x, "hifp4")
    assert x[0] > x[8]
    assert y[0] < y[8]


EQUIVARIANT = [
    name for name in NEAREST if name not in (*CASTS, "hifp8", "hifp8:inf", "amdfp4")
]  # the excluded ones have no scale; that of AMD-FP4 ends at 2^-17


@pytest.mark.parametrize("name", EQUIVARIANT)
@examples(x=tensors(), exponent=st.integers(-20, 60))
def test_it_scales_with_powers_of_two(name, x, exponent):
    if name == "hifp4":
        exponent = min(exponent, 0)  # its scales end at 2^-48 and 1.5 * 2^15
    factor = 2.0**exponent
    assert torch.equal(fake_quantize(x * factor, name), fake_quantize(x, name) * factor)


@names
@examples(x=tensors(), count=st.integers(1, 70))
def test_zeros_at_the_end_change_nothing(name, x, count):
    padded = torch.nn.functional.pad(x, (0, count))
    y = fake_quantize(padded, name)
    assert torch.equal(y[:, : x.shape[1]], fake_quantize(x, name))
    assert (y[:, x.shape[1] :] == 0).all()


@pytest.mark.parametrize("name", [name for name in NEAREST if FINER.get(name, 32) == 32])
@examples(x=tensors(columns=32), order=st.permutations(range(16)))
def test_the_order_within_a_block_does_not_matter(name, x, order):
    order = torch.tensor([*order, *range(16, 32)])
    assert torch.equal(fake_quantize(x[:, order], name), fake_quantize(x, name)[:, order])


@names
@examples(x=tensors(rows=5), order=st.permutations(range(5)))
def test_the_order_of_rows_does_not_matter(name, x, order):
    assert torch.equal(fake_quantize(x[list(order)], name), fake_quantize(x, name)[list(order)])


@pytest.mark.parametrize("name", [*MX, *MX_VARIANTS, "hifp4"])
@examples(x=tensors(rows=3, columns=64))
def test_blocks_know_nothing_of_each_other(name, x):
    """Blocks of nvfp4 are excluded, because they share a tensor scale."""
    expected = torch.stack([fake_quantize(row, name) for row in x])
    assert torch.equal(fake_quantize(x, name), expected)
    x[1] = torch.nan
    assert torch.equal(fake_quantize(x, name)[[0, 2]], expected[[0, 2]])


def scaled_table(name: str, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return x over its scales in float64, and the numbers >= 0 that exist at that scale."""
    fmt = get_format(name)
    scales = quantize(x, name).scales
    scale = np.ones(x.shape)
    if scales.blocks is not None:  # nvfp4
        assert fmt.name == "nvfp4"
        values = scales.blocks.numpy().view(oracle.ML_DTYPES["e4m3"]).astype(np.float64)
        scale = np.repeat(values, 16, axis=1)[:, : x.shape[1]]
    if scales.tensor is not None:
        scale = scale * float(scales.tensor)
    codes = oracle.hifloat8_codes()
    if fmt.element.name == "hif8":
        table = np.sort(codes[np.isfinite(codes) & (codes >= 0)])
    else:
        table = oracle.code_points(fmt.element.name)
    return scale, table


@pytest.mark.parametrize("name", ["nvfp4", "fp8_e4m3", "fp8_e5m2:pow2", "hifp8", "hifp8:t15"])
@examples(x=tensors())
def test_no_number_at_that_scale_is_nearer(name, x):
    """The error is at most half a step, unless the value saturates. (MX formats: test_mx.py.)

    Scales that are no powers of two cost a few roundings to float32, 2^-21 of the value.
    """
    y = fake_quantize(x, name).double().numpy()
    scale, table = scaled_table(name, x)
    wide = x.abs().double().numpy()
    numbers = scale[..., None] * table
    index = np.clip((numbers <= wide[..., None]).sum(-1), 1, len(table) - 1)[..., None]
    below, above = (np.take_along_axis(numbers, index - i, -1)[..., 0] for i in (1, 0))
    saturates = wide > numbers[..., -1]
    slack = 2.0**-21 * wide
    assert (np.abs(np.abs(y) - wide) <= (above - below) / 2 + slack)[~saturates].all()
    assert (np.abs(np.abs(y) - numbers[..., -1]) <= slack)[saturates].all()


@names
@examples(x=tensors(), values=st.lists(st.sampled_from([0.0, -0.0]), min_size=3, max_size=3))
def test_zeros_stay(name, x, values):
    """Zeros keep their signs if the format has a negative zero."""
    x = torch.cat([torch.tensor(values), x[0]]).view(1, -1)
    zeros = fake_quantize(x, name)[0, :3]
    if name.startswith("if4"):  # only blocks with E2M1 elements have a negative zero
        assert (zeros == 0).all()
        return
    has_negative = not name.startswith(("hifp8", "mxint", "nvint", "mx9", "mx6", "nf4"))
    assert_same(zeros, np.array(values) if has_negative else np.zeros(3))
