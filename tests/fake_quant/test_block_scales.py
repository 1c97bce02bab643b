"""Block scales of every kind, against float32 arithmetic that is written out here, and names."""

import numpy as np
import pytest
import torch
from gmpy2 import mpq as Fraction
from numpy.typing import NDArray

from megatron.fake_quant import dequantize, fake_quantize, get_format, quantize
from megatron.fake_quant.code_points import unpack_nibbles
from megatron.fake_quant.matmul.gemm_formats import SLOTS
from megatron.fake_quant.quant_type import gemm_formats

from .inputs import (
    assert_same,
    every_bfloat16,
    random_bit_patterns,
    rows_at_every_scale,
    with_special_blocks,
)
from .oracle import code_points, round_element, round_to_table, to_float64
from .oracle_scaled import from_blocks, to_blocks

Float32 = NDArray[np.float32]
LARGEST = np.finfo(np.float32).max
#: numbers of UE5M3: multiples of 2^-17 below 2^-14, and (1 + m / 8) * 2^(e - 15) up to 1.75 * 2^16
UE5M3 = np.array(
    [m * 2.0**-17 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 15) for e in range(1, 32) for m in range(8)][:-1]
)
INPUTS = {
    "bfloat16": lambda: every_bfloat16().float().view(256, -1),
    "shuffled": lambda: every_bfloat16()[torch.randperm(65536, generator=seeded())].view(256, -1),
    "bits": lambda: random_bit_patterns(1 << 18).view(512, -1),
    "rows": lambda: with_special_blocks(rows_at_every_scale(160)),
    "normal": lambda: torch.randn(256, 320, generator=seeded()),
    "quarters": lambda: torch.randint(-24, 25, (256, 320), generator=seeded()) / 4,
    "zeros": lambda: torch.zeros(16, 160),
}
inputs = pytest.mark.parametrize("kind", INPUTS)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(29)


def outer_maxima(blocks: Float32, rows: int, group: int | None) -> Float32:
    """Return the largest finite magnitude under the outer scale of each block.

    group: number of neighboring blocks of a row with one outer scale; None for all blocks.
    """
    amax = np.where(np.isfinite(blocks), np.abs(blocks), np.float32(0)).max(axis=1)
    if group is None:
        return np.full_like(amax, amax.max())
    table = amax.reshape(rows, -1)
    maxima = [table[:, i : i + group].max(axis=1) for i in range(0, table.shape[1], group)]
    return np.repeat(np.stack(maxima, axis=1), group, axis=1)[:, : table.shape[1]].ravel()


def encoding(maxima: Float32, target: float) -> Float32:
    with np.errstate(over="ignore", divide="ignore"):
        encode = np.minimum(np.float32(target) / maxima, LARGEST)
    return np.where(maxima == 0, np.float32(1), encode)


def e4m3_values(blocks: Float32, element: str, top: float, encode: Float32) -> Float32:
    """Return values with E4M3 scales: E4M3(amax / top * encode), then reciprocals."""
    wanted = np.abs(blocks).max(axis=1) / np.float32(top) * encode
    scale = round_element(to_float64(wanted), "e4m3").astype(np.float32)
    return scaled_values(blocks, element, scale, encode)


def scaled_values(blocks: Float32, element: str, scale: Float32, encode: Float32) -> Float32:
    decode = np.float32(1) / encode
    with np.errstate(over="ignore", divide="ignore"):
        multiplier = np.minimum(np.float32(1) / (scale * decode), LARGEST)
        scaled = to_float64(blocks * multiplier[:, None])
    codes = round_element(scaled, element).astype(np.float32)
    if element.startswith("int"):
        codes += 0.0  # two's complement has a single zero
    return codes * scale[:, None] * decode[:, None]


def ue5m3_values(blocks: Float32, target: float | None) -> Float32:
    """Return E2M1 values with UE5M3 scales, which are divisors; target: None for no outer scale."""
    outer = np.float32(1)
    if target is not None:
        outer = np.maximum(np.abs(blocks).max() / np.float32(target), np.float32(1e-30))
    wanted = np.abs(blocks).max(axis=1) / outer / np.float32(6)
    scale = round_to_table(to_float64(wanted), UE5M3, ties="even").clip(2.0**-17)
    factor = (scale.astype(np.float32) * outer)[:, None]
    return round_element(to_float64(blocks / factor), "e2m1").astype(np.float32) * factor


def float32_values(blocks: Float32, element: str, top: float) -> Float32:
    encode = encoding(np.abs(blocks).max(axis=1), top)[:, None]
    codes = round_element(to_float64(blocks * encode), element).astype(np.float32)
    return codes * (np.float32(1) / encode)


def expected(name: str, x: Float32) -> Float32:
    """Return the values of the format for a matrix; a NaN or an Inf makes its block NaN."""
    fmt = get_format(name)
    size, square = min(fmt.block_size, x.shape[1]), fmt.height > 1
    blocks = to_blocks(x, size, square=square).astype(np.float32)
    special = ~np.isfinite(blocks).all(axis=1, keepdims=True)
    finite = np.where(special, np.float32(0), blocks)
    maxima = {
        "outer-row": lambda: outer_maxima(blocks, len(x), len(blocks) // len(x)),
        "outer-1x64": lambda: outer_maxima(blocks, len(x), 4),
        "outer-1x128": lambda: outer_maxima(blocks, len(x), 8),
    }
    group = next((of for part, of in maxima.items() if part in name), None)
    amax = outer_maxima(blocks, 0, None) if group is None else group()
    one = np.ones(len(blocks), np.float32)
    values = {
        "nvint4": lambda: e4m3_values(finite, "int4", 1.75, encoding(amax, 1.75 * 448)),
        "nv:e2m3:b32:e4m3": lambda: e4m3_values(finite, "e2m3", 7.5, encoding(amax, 7.5 * 448)),
        "nvfp4:head16/17": lambda: e4m3_values(
            finite, "e2m1", 6 * 16 / 17, encoding(amax, 6 * 448 * (16 / 17))
        ),
        "nvfp4:outer-none": lambda: e4m3_values(finite, "e2m1", 6, one),
        "nvfp4:outer-none:head3/4": lambda: e4m3_values(finite, "e2m1", 4.5, one),
        "nvint4:outer-row": lambda: e4m3_values(finite, "int4", 1.75, encoding(amax, 784)),
        "nvint4:outer-1x64": lambda: e4m3_values(finite, "int4", 1.75, encoding(amax, 784)),
        "nvint4:outer-1x128": lambda: e4m3_values(finite, "int4", 1.75, encoding(amax, 784)),
        "nvint4:2d:bound256": lambda: e4m3_values(finite, "int4", 1.75, encoding(amax, 448)),
        "amdfp4": lambda: ue5m3_values(finite, None),
        "amdfp4:2d": lambda: ue5m3_values(finite, None),
        "fp8_block": lambda: float32_values(finite, "e4m3", 448),
        "fp8_block:2d": lambda: float32_values(finite, "e4m3", 448),
        "fp8_rowwise": lambda: float32_values(finite, "e4m3", 448),
        "nv:e5m2:b128:fp32:head3/4": lambda: float32_values(finite, "e5m2", 57344 * 0.75),
    }[name]()
    return from_blocks(np.where(special, np.nan, values), x.shape, size, square=square)


@inputs
@pytest.mark.parametrize(
    "name",
    [
        "nvint4",
        "nv:e2m3:b32:e4m3",
        "nvfp4:head16/17",
        "nvfp4:outer-none",
        "nvfp4:outer-none:head3/4",
        "nvint4:outer-row",
        "nvint4:outer-1x64",
        "nvint4:outer-1x128",
        "nvint4:2d:bound256",
        "amdfp4",
        "amdfp4:2d",
        "fp8_block",
        "fp8_block:2d",
        "fp8_rowwise",
        "nv:e5m2:b128:fp32:head3/4",
    ],
)
def test_values_are_those_of_float32_arithmetic(kind, name):
    x = INPUTS[kind]().float()
    values = expected(name, x.numpy())
    assert_same(fake_quantize(x, name), values)
    assert_same(dequantize(quantize(x, name)), values)
    assert_same(fake_quantize(x.t(), name, axis=0).t(), values)


@inputs
def test_ue5m3_scales_under_a_tensor_scale(kind):
    x = INPUTS[kind]().float().nan_to_num(0, posinf=0, neginf=0)
    blocks = to_blocks(x.numpy(), 16)
    values = from_blocks(ue5m3_values(blocks, 114688 * 6), x.shape, 16)
    assert_same(fake_quantize(x, "amdfp4:outer-tensor"), values)


def searched(blocks: Float32, bound: float, mode: str) -> tuple[Float32, NDArray[np.bool_]]:
    """Return the scales that a search finds, and True where they map the maximum to 4, not to 6."""
    maxima = outer_maxima(blocks, 0, None)
    encode = encoding(maxima, 6 * bound)
    base = np.abs(blocks).max(axis=1) / np.float32(6) * encode
    scales, errors = [], []
    for wanted in (base, base * np.float32(1.5)):
        scale = round_element(to_float64(wanted), "e4m3").astype(np.float32)
        with np.errstate(over="ignore", divide="ignore"):
            multiplier = np.minimum(np.float32(1) / (scale * (np.float32(1) / encode)), LARGEST)
            scaled = to_float64(blocks * multiplier[:, None])
        codes = round_element(scaled, "e2m1").astype(np.float32)
        total = np.zeros(len(blocks), np.float32)
        with np.errstate(over="ignore"):
            for i in range(blocks.shape[1]):  # one by one, each sum rounded to float32
                value = codes[:, i] * scale * maxima / np.float32(6 * bound)
                difference = value - blocks[:, i]
                total += np.abs(difference) if mode == "mae" else difference * difference
        scales.append(scale)
        errors.append(total)
    four = errors[1] < errors[0]
    return np.where(four, scales[1], scales[0]), four


@inputs
@pytest.mark.parametrize("mode", ["mae", "mse"])
@pytest.mark.parametrize("bound", [256, 448])
def test_a_search_takes_the_scale_with_the_smaller_error(kind, mode, bound):
    x = INPUTS[kind]().float().nan_to_num(0, posinf=0, neginf=0)
    blocks = to_blocks(x.numpy(), 16)
    scale, _ = searched(blocks, bound, mode)
    encode = encoding(outer_maxima(blocks, 0, None), 6 * bound)
    values = from_blocks(scaled_values(blocks, "e2m1", scale, encode), x.shape, 16)
    assert_same(fake_quantize(x, f"nvfp4:4over6-{mode}:bound{bound}"), values)


def exact_error(block: list[float], scale: float, decode: Fraction, mode: str) -> Fraction:
    """Return the error of a block under a scale, in exact arithmetic."""
    table = [Fraction(float(number)) for number in code_points("e2m1")]
    total = Fraction(0)
    for x in map(Fraction, block):
        factor = Fraction(scale) * decode
        error = min(abs(abs(x) - number * factor) for number in table)
        total += error if mode == "mae" else error * error
    return total


@pytest.mark.parametrize("mode", ["mae", "mse"])
def test_the_chosen_scale_is_the_better_one_in_exact_arithmetic(mode):
    x = torch.randn(12, 64, generator=seeded())
    blocks = to_blocks(x.numpy(), 16)
    _, four = searched(blocks, 256, mode)
    decode = Fraction(float(np.abs(blocks).max())) / (6 * 256)
    found = quantize(x, f"nvfp4:4over6-{mode}").scales.block()
    stored = found.view(torch.float8_e4m3fn).float().reshape(-1)
    base = np.abs(blocks).max(axis=1) / np.float32(6) * np.float32(1536) / np.abs(blocks).max()
    assert 0 < four.sum() < len(four)
    for block, scale, wanted in zip(blocks.tolist(), stored.tolist(), base.tolist(), strict=True):
        candidates = [round_element(np.array([wanted * f]), "e4m3")[0] for f in (1, 1.5)]
        errors = {s: exact_error(block, s, decode, mode) for s in candidates}
        assert errors[scale] <= min(errors.values()) * (1 + Fraction(1, 1 << 18))


def test_a_tie_of_a_search_goes_to_six():
    """Under both scales, the error is zero: all values are 0, or 1536 = 6 * 256 = 4 * 384."""
    x = torch.zeros(1, 16)
    for scale in quantize(x, "nvfp4:4over6-mae").scales.block().flatten().tolist():
        assert scale == 0
    x[0, 0] = 1536.0  # 6 * 256 or 4 * 384: no error under either
    assert quantize(x, "nvfp4:4over6-mae").scales.block().item() == 0x78  # 256


#: Codes and scales, as hexadecimal bytes, that the oracles computed for `pinned_input`:
#: Transformer Engine d0067d0, fouroversix dadfad6 and ALTO 74e251d.
PINNED = {
    "nvfp4:4over6-mae": (  # Transformer Engine, reference quantizer for NVFP4
        "aed4581cb6e34a0dc5623b9ed4502ca6f5692ed7f45b8ee6613b9ed4502ca6d4691ed7f45b8ee672"
        "3b9ed4502cb6e3591ed7f35b9ee6724caed4502cb6e4591d",
        "7c7c777c42474246",
    ),
    "nvfp4:4over6-mse:bound448": (  # Transformer Engine
        "bfe5692ec7f45a0ed6724cafe6613db7f5692ed7f45b8ee6724cafe5603dc7f5591dc5e24a8dc561"
        "3b9ed4502cb6e3591dc5e24a8dc5613baed4502cb6e3490d",
        "7e7e7d7e4d4d4d4d",
    ),
    "nvfp4:outer-row": (  # Transformer Engine, row-scaled
        "bfe5692ec7f45a0ed6724cafe6613db7f5692ed7f45b8ee6724cafe5603dc7f5691ed7f45b8ed672"
        "4cafe5603dc7f5691ed6f35b9ee6724cbfe6603ec7f56a1e",
        "7e7e7d7e49494948",
    ),
    "nvint4": (  # fouroversix, PyTorch path
        "e9a3501cd6924f0bc5713efab4602de7a35f1bd6924e0ac5613dfab4502ce7a34f1cd6923e0bc561"
        "3dfab4502ce7a34f1bd6923e0ac5612de9a4602cd7935f0b",
        "7e7e7d7e49494948",
    ),
    "nvfp4:4over6-mse": (  # fouroversix
        "aed4581cb6e34a0dc5623b9ed4502ca6d4591cb5e34a8dc5613b9ed4502ca6d4691ed7f45b8ee672"
        "3b9ed4502cb6e3591dc5e24a8dc5613baed4502cb6e4591d",
        "7c7c7c7c42474746",
    ),
    "amdfp4": (  # ALTO, PyTorch references
        "bfe5692ec7f45a0ed6724cafe6613dc7f5692ed7f45b8ee6724cafe6603dc7f5691ed7f45b9ee672"
        "4cafe6603dc7f56a1ed6f35b9ed6724cbfe5603dc7f56a1e",
        "7878787842424342",
    ),
    "amdfp4:outer-tensor": (  # ALTO
        "bfe5692ec7f45a0ed6724cafe6613db7f5692ed7f45b8ee6724cafe5603dc7f5691ed7f45b8ed672"
        "4cafe5603dc7f5691ed6f35b9ee6724cbfe6603ec7f56a1e",
        "fefefdfec9c9c9c8",
    ),
    "fp8_block": (  # Transformer Engine, reference of its blockwise tests
        "feef75fbdd7af8687cf372fdeb77fa007af76b7df273fce878fa5d7bf56f7ef075fbe179f9657cf4"
        "71fdec77fbd17af86a7df273fde978fa597bf66d7ef074fcae43c32e47c03bc9b941c6a345c23348"
        "be3dc8b542c51b46c13849bb3fc7b143c42b47c03ac9b941c6a944c33248be3cc8b642c50045c236"
        "48bc3ec8b243c429",
        "4992643c",
    ),
}


def pinned_input() -> torch.Tensor:
    i = torch.arange(128)
    values = ((i * 37) % 101 - 50).double() / 8
    return torch.where(i < 64, values, values * 0.01).float().view(1, 128)


@pytest.mark.parametrize("name", PINNED)
def test_codes_and_scales_are_those_of_the_oracles(name):
    found = quantize(pinned_input(), name)
    codes, scales = PINNED[name]
    assert found.codes.numpy().tobytes().hex() == codes
    assert found.scales.block().numpy().tobytes().hex() == scales


@pytest.mark.parametrize(
    ("name", "amax", "exponent"),
    [
        ("mxfp4:top7.25", 7.25, 0),
        ("mxfp4:top7.25", float(np.nextafter(np.float32(7.25), np.float32(8))), 1),
        ("mxfp4:top7.25", 7.0, 0),
        ("mxfp4:top7.25", 3.625, -1),
        ("mxfp4:top4.5", 4.75, 1),
        ("mxfp4:rceil", 6.25, 1),
        ("mxfp8:top500", 480.0, 0),
    ],
)
def test_a_top_is_what_a_block_s_maximum_must_not_exceed(name, amax, exponent):
    x = torch.zeros(32)
    x[3] = amax
    assert quantize(x, name).scales.block().item() == 127 + exponent


@inputs
def test_every_scale_with_a_top_is_the_smallest_power_that_suffices(kind):
    x = INPUTS[kind]().float()
    scales = quantize(x, "mxfp4:top7.25").scales.block()
    for amax, byte in zip(
        x.unflatten(-1, (-1, 32)).abs().amax(-1).flatten()[:512].tolist(),
        scales.flatten()[:512].tolist(),
        strict=True,
    ):
        if not np.isfinite(amax) or amax == 0:
            continue
        wanted = next(
            b
            for b in range(255)
            if Fraction(amax) <= Fraction(29, 4) * Fraction(2) ** (b - 127) or b == 254
        )
        assert byte == wanted


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4:rceil", "mxfp8", "mxfp6_e2m3"])
def test_headroom_of_powers_of_two_scales_values_down_and_up_again(name):
    x = torch.randn(64, 96, generator=seeded())
    byte = quantize(x, name).scales.block()
    found = quantize(x, f"{name}:head3/4")
    assert torch.equal(found.scales.block(), byte)
    scale = np.ldexp(1.0, byte.numpy().astype(int) - 127)[..., None]
    blocks = x.unflatten(-1, (-1, 32)).numpy()
    element = get_format(name).element.name
    rounded = round_element(to_float64(blocks * np.float32(0.75)) / scale, element) * scale
    values = rounded.astype(np.float32) * np.float32(4 / 3)
    assert_same(fake_quantize(x, f"{name}:head3/4"), values.reshape(64, 96))


def test_nothing_clips_under_a_headroom_of_16_17():
    """A scale in E4M3 is at most 1 / 17 too small, so that the maximum lands at 6 at most."""
    x = torch.randn(256, 256, generator=seeded())
    for name, clips in (("nvfp4", True), ("nvfp4:head16/17", False)):
        amax = x.unflatten(-1, (-1, 16)).abs().amax(-1)
        found = quantize(x, name)
        scale = found.scales.block().view(torch.float8_e4m3fn).double() * found.scales.whole()
        assert bool((amax / scale > 6 * (1 + 1e-6)).any()) == clips


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("nv:e2m1:b16:e4m3:4over6-mae:bound256", "nv:e2m1:b16:e4m3:4over6-mae"),
        ("nvfp4:bound448", "nvfp4"),
        ("nvfp4:bound448:4over6-mae", "nvfp4:4over6-mae:bound448"),
        ("nvfp4:sr:head16/17", "nvfp4:head16/17:sr"),
        ("nvfp4:head0.75", "nvfp4:head3/4"),
        ("nvfp4:head6/8", "nvfp4:head3/4"),
        ("nvfp4:head1", "nvfp4"),
        ("nvfp4:outer-tensor", "nvfp4"),
        ("nv:e4m3:b128:fp32:outer-none", "nv:e4m3:b128:fp32"),
        ("fp8_block:ue8m0:2d", "fp8_block:ue8m0:2d"),
        ("mxfp4:top7.25", "mxfp4:rceil:top7.25"),
        ("mxfp4:rceil:top7.25", "mxfp4:rceil:top7.25"),
        ("mxfp4:top6:rceil", "mxfp4:rceil"),
        ("NV:E2M1:B016:UE5M3:outer-none", "nv:e2m1:b16:ue5m3:outer-none"),
        ("mx:e4m3:b32x32:floor", "mx:e4m3:b32x32:floor"),
        ("nv:int3:row:e6m2", "nv:int3:row:e6m2"),
    ],
)
def test_a_spelled_out_scale_has_one_name(name, canonical):
    fmt = get_format(name)
    assert fmt.name == canonical
    assert get_format(canonical) == fmt
    assert fake_quantize(torch.ones(4, 4), fmt).shape == (4, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nv:e2m1:b16:e8m0", "unknown scale type 'e8m0'; choose one of e4m3, ue5m3, e6m2, fp32"),
        ("nv:e2m1:b0:e4m3", "a block of 0 values; choose a block size of 1 or more"),
        ("nvfp4:outer-row:2d", r"outer scales per row need whole blocks of one row .* 16 x 16"),
        (
            "nv:e2m1:b24:e4m3:outer-1x64",
            r"the blocks are 1 x 24; choose outer-tensor or outer-none",
        ),
        ("nvfp4:outer-none:bound256", "a bound applies to an outer scale, and there is none"),
        ("nvfp4:head0", "a headroom of 0; choose a fraction"),
        ("nvfp4:head17/16", "a headroom of 17/16; choose a fraction"),
        ("nvfp4:head1/0", "a headroom of 1/0; choose a fraction"),
        ("nvint4:4over6-mae", "nvint4 does not take '4over6-mae'; it takes"),
        ("amdfp4:4over6-mae", "amdfp4 does not take '4over6-mae'; it takes"),
        ("nvfp4:4over6-mae:4over6-mse", "sets the search a second time"),
        ("nvfp4:head3/4:head16/17", "sets the headroom a second time"),
        ("mxfp4:floor:top7.25", "the rule floor has no top; remove the rule or choose rceil"),
        (
            "mxfp4:top8",
            "the top 8 does not fit elements whose largest number is 6; choose one from 4 up",
        ),
        ("mxfp4:bound256", "mxfp4 does not take 'bound256'"),
        ("fp8_block:outer-row", "fp8_block does not take 'outer-row'"),
        ("fp8_rowwise:2d", "fp8_rowwise does not take '2d'"),
        ("mx:e4m3:b8xrow:floor", "unknown format"),
    ],
)
def test_parts_that_do_not_go_together_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        get_format(name)


def test_blocks_may_have_any_number_of_rows():
    x = torch.randn(20, 50, generator=seeded())
    y = fake_quantize(x, "mx:e2m1:b4x8:rceil")
    for i in range(0, 20, 4):
        for j in range(0, 50, 8):
            tile = x[i : i + 4, j : j + 8]
            alone = fake_quantize(tile.reshape(1, -1), "mx:e2m1:b32:rceil")
            assert torch.equal(y[i : i + 4, j : j + 8], alone.view_as(tile))
    assert torch.equal(fake_quantize(x.t(), "mx:e2m1:b4x8:rceil", axis=0).t(), y)
    assert quantize(x, "mx:e2m1:b4x8:rceil").scales.block().shape == (5, 7)


def test_a_quantization_type_gives_square_blocks_to_weights():
    """Activations and gradients get blocks of 1 x 128, and weights of 128 x 128."""
    for name, of_weights in (
        ("fp8_block", "fp8_block:2d"),
        ("fp8_block:ue8m0", "fp8_block:ue8m0:2d"),
        ("fp8_block:2d", "fp8_block:2d"),
        ("nvfp4", "nvfp4"),
    ):
        linear = gemm_formats("linear", get_format(name))
        weights = ("fprop_b", "dgrad_b")
        found = {slot: getattr(linear, slot).format.name for slot in SLOTS}
        assert found == {slot: of_weights if slot in weights else name for slot in SLOTS}
        attention = gemm_formats("qk", get_format(name))
        assert {getattr(attention, slot).format.name for slot in SLOTS} == {name}


def test_integers_leave_their_lowest_code_unused():
    for bits in (3, 4, 6):
        half = 1 << (bits - 2)
        x = torch.tensor([-2.0, 2.0, 1.0, -1 / half])
        quantized = quantize(x, f"mx:int{bits}:b32:floor")
        codes = unpack_nibbles(quantized.codes, 4) if bits <= 4 else quantized.codes
        wanted = [-half, half, half // 2, -1]  # in units of 2 / half: the scale is 2
        signed = [c - (1 << bits) if c >= 1 << (bits - 1) else c for c in codes.tolist()]
        assert signed[:3] == wanted[:3]
        assert fake_quantize(torch.tensor([1.999]), f"mx:int{bits}:b32:floor") == 2 - 1 / half
