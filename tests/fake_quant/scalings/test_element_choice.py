"""IF4 and MixFP4 against an independent definition and vectors of fouroversix."""

import numpy as np
import pytest
import torch
from gmpy2 import mpq as Fraction

from megatron.fake_quant import dequantize, fake_quantize, quantize
from megatron.fake_quant.code_points import unpack_nibbles
from megatron.fake_quant.inspect import code_point_table
from megatron.fake_quant.names import get_format
from tests.fake_quant.inputs import (
    assert_same,
    every_bfloat16,
    random_bits_at_every_scale,
    with_special_blocks,
)
from tests.fake_quant.oracle import code_points
from tests.fake_quant.uses import check_every_use

NAMES = ["if4", "if4_mae", "mixfp4"]
names = pytest.mark.parametrize("name", NAMES)
E4M3 = code_points("e4m3").astype(np.float32)
E2M1 = code_points("e2m1").astype(np.float32)
F = np.float32


def nearest(x: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Round magnitudes to the nearest number of a table, ties to the even position."""
    middles = (table[1:].astype(np.float64) + table[:-1]) / 2
    position = np.searchsorted(middles, np.abs(x))
    on_tie = (position < len(middles)) & (np.abs(x) == middles[position.clip(max=len(middles) - 1)])
    return np.copysign(table[position + (on_tie & (position % 2 == 1))], x)


def expected(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the values, elements (integers or E2M1 numbers) and scale bytes of float32 blocks."""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(1)
        special = ~np.isfinite(amax)
        largest = np.abs(x[np.isfinite(x)]).max(initial=0)
        encode = (F(2688) / largest).clip(F(2.0**-126), np.finfo(F).max) if largest else F(1)
        decode = F(1) / encode
        block = np.where(special, F(0), amax)

        def scaled(divisor: float) -> tuple[np.ndarray, np.ndarray]:
            scale = nearest(block / F(divisor) * encode, E4M3)[:, None]
            factor = (F(1) / (scale * decode)).clip(max=np.finfo(F).max)
            return scale, np.where(scale == 0, F(0), x * factor)

        def error(product: np.ndarray, shrink: np.float32) -> np.ndarray:
            difference = product * largest * shrink / F(2688) - x
            terms = np.abs(difference) if name == "if4_mae" else difference * difference
            sums = terms[:, :8] + terms[:, 8:]
            total = sums[:, 0]
            for i in range(1, 8):
                total = total + sums[:, i]
            return total

        scale, floats = scaled(6)
        number = nearest(floats, E2M1)
        if name == "mixfp4":
            other, integers = scaled(7)
            shrink = F(1)
        else:
            other, integers, shrink = scale, floats * F(7 / 6), F(6 / 7)
        integer = np.rint(integers).clip(-7, 7)
        errors = error(number * scale, F(1)), error(integer * other, shrink)
        chosen = (errors[1] <= errors[0] if name == "mixfp4" else errors[1] < errors[0])[:, None]
        values = np.where(chosen, integer * other * shrink, number * scale) * decode
        scale_bytes = np.searchsorted(E4M3, np.where(chosen, other, scale)[:, 0])
        values[special] = np.nan
        stored = np.where(special, 0x7F, scale_bytes + 128 * chosen[:, 0])
        return values, np.where(chosen, integer, number), stored


def check(x: torch.Tensor, name: str) -> None:
    values, elements, stored = expected(x.float().numpy(), name)
    y, found = fake_quantize(x, name), quantize(x, name)
    np.testing.assert_array_equal(found.scales.block()[:, 0].numpy(), stored)
    wanted = torch.from_numpy(values).to(x.dtype).float().numpy()
    np.testing.assert_array_equal(y.float().numpy(), wanted)
    assert_same(dequantize(found).float(), y.float().numpy())
    finite = np.isfinite(values).all(1)
    codes = unpack_nibbles(found.codes, 16).numpy().astype(int)
    integers = codes - 16 * (codes >= 8)
    if name == "mixfp4":
        integers = np.where(codes >= 8, 8 - codes, codes)
    floats = np.concatenate([E2M1, -E2M1])[codes]
    decoded = np.where(stored[:, None] >= 128, integers, floats)
    np.testing.assert_array_equal(decoded[finite], elements[finite])


GENERATOR = np.random.default_rng(7)
INPUTS = {
    "normal deviates": lambda: torch.from_numpy(GENERATOR.standard_normal((1 << 15, 16), F)),
    "rows of many scales": lambda: torch.from_numpy(
        GENERATOR.standard_normal((1 << 15, 16), F)
        * 2 ** GENERATOR.uniform(-20, 0, (1 << 15, 1)).astype(F)
    ),
    "halves": lambda: torch.from_numpy(GENERATOR.integers(-14, 15, (1 << 15, 16)).astype(F) / 2),
    "a million values over every binade": lambda: random_bits_at_every_scale(16, 1 << 20),
    "special blocks": lambda: with_special_blocks(
        torch.from_numpy(GENERATOR.standard_normal((64, 128), F))
    ).view(-1, 16),
    "zeros": lambda: torch.zeros(2, 16),
    "bfloat16": lambda: every_bfloat16()[every_bfloat16().isfinite()][: 65280 // 16 * 16].view(
        -1, 16
    ),
}


@names
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_it_matches_the_definition(make, name):
    check(make(), name)


@names
def test_the_choice_has_the_lower_error_in_rational_numbers(name):
    """Values are multiples of 1/4; the tensor maximum makes all operations exact, except by 6/7."""
    x = torch.from_numpy(GENERATOR.integers(-24, 25, (200, 16)).astype(F) / 4)
    x[0, 0] = 2688.0
    stored = quantize(x, name).scales.block()[1:, 0].tolist()
    for row, byte in zip(x[1:].tolist(), stored, strict=True):
        magnitudes = [abs(Fraction(value)) for value in row]
        errors = []
        for top, table in ((6, [Fraction(v) for v in E2M1.tolist()]), (7, range(8))):
            divisor = 6 if name.startswith("if4") else top
            wanted = float(max(magnitudes) / divisor)
            scale = Fraction(float(nearest(np.array([wanted]), E4M3)[0]))
            unit = scale * (Fraction(6, 7) if divisor != top else 1)
            rest = [min(abs(unit * number - value) for number in table) for value in magnitudes]
            errors.append(sum(r if name == "if4_mae" else r * r for r in rest))
        if abs(errors[0] - errors[1]) > Fraction(1, 10**5):
            assert (byte >= 128) == (errors[1] < errors[0])
        elif name == "mixfp4" and errors[0] == errors[1]:
            assert byte >= 128


@pytest.mark.parametrize(
    ("name", "scales", "codes"),
    [
        # From fouroversix's PyTorch reference, commit dadfad6, with squared and absolute errors.
        ("if4", [254, 124], [*range(7, -1, -1), *range(15, 8, -1), 0]),
        ("if4_mae", [254, 124], [*range(7, -1, -1), *range(15, 8, -1), 0]),
        # The same integers with a sign and a magnitude, and a scale of 384 instead of 448.
        ("mixfp4", [252, 124], [*range(7, -1, -1), *range(9, 16), 0]),
    ],
)
def test_named_blocks(name, scales, codes):
    """The first block has the integers from -7 to 7, the second one all E2M1 numbers."""
    numbers = [6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 6]
    x = torch.tensor([[*range(7, -8, -1), 0.5], numbers])
    found = quantize(x, name)
    assert found.scales.block().flatten().tolist() == scales
    assert unpack_nibbles(found.codes, 16)[0].tolist() == codes
    assert unpack_nibbles(found.codes, 16)[1].tolist() == [*range(7, -1, -1), *range(9, 16), 7]
    y = fake_quantize(x, name)
    assert y[0].tolist() == [*range(7, -8, -1), 0.0]
    assert torch.equal(y[1], x[1])


@names
def test_special_values_make_their_blocks_nan(name):
    x = torch.ones(4, 16)
    x[1, 7], x[2, 9], x[3] = torch.nan, -torch.inf, 0.0
    assert fake_quantize(x, name).isnan().all(1).tolist() == [False, True, True, False]
    assert quantize(x, name).scales.block()[1:3, 0].tolist() == [0x7F, 0x7F]
    assert (fake_quantize(torch.zeros(3, 16), name) == 0).all()


@names
def test_stochastic_rounding_keeps_the_choice(name):
    x = torch.from_numpy(GENERATOR.standard_normal((64, 64), F))
    found, nearest_one = quantize(x, f"{name}:sr", seed=5), quantize(x, name)
    assert torch.equal(found.scales.block(), nearest_one.scales.block())
    assert not torch.equal(found.codes, nearest_one.codes)
    mean = torch.stack([fake_quantize(x, f"{name}:sr", seed=i) for i in range(400)]).mean(0)
    assert float((mean - x).abs().mean()) < 0.2 * float((fake_quantize(x, name) - x).abs().mean())


@names
def test_the_table_of_codes_has_both_element_types(name):
    fmt = get_format(name)
    other = "e1m2" if name == "mixfp4" else "int4"
    assert [part.split("\n")[0] for part in code_point_table.markdown(fmt).split("\n\n")][::2] == [
        "e2m1",
        other,
    ]
    lines = code_point_table.as_csv(fmt).splitlines()
    assert lines[0] == "code,bits,value,element"
    assert len(lines) == 33
    assert lines[-1].endswith(other)


@names
def test_it_works_wherever_formats_are_used(name):
    check_every_use(name)
