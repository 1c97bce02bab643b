"""`quantize` and `dequantize` against ml_dtypes and en_dtypes, and lossless round trips."""

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron.fake_quant import FORMATS, dequantize, fake_quantize, get_format, quantize
from megatron.fake_quant.code_points import (
    code_values,
    decode,
    encode,
    nan_code,
    pack_nibbles,
    unpack_nibbles,
)
from megatron.fake_quant.elements import ELEMENTS, S1P2, Cast, HiFloat8
from megatron.fake_quant.matmul.hadamard import Hadamard
from megatron.fake_quant.names import get_element

from . import oracle
from .inputs import every_bfloat16, random_bit_patterns, rows_at_every_scale, with_special_blocks

VARIANTS = [
    "mxfp8:rceil",
    "mxfp4:2d",
    "mxfp6_e2m3:even:sr",
    "mx:e3m4:b16:ceil",
    "mx:e2m0:b8:floor",
    "nvfp4:2d",
    "nvfp4:sr",
    "hifp8:hr",
    "hifp8:inf",
    "hifp8:t15",
    "hifp8:sr:t224:pow2",
    "hifp4:sr",
    "fp8_e4m3:pow2",
    "fp8_e5m2:sr",
    "nv:e2m1:column:e4m3",
    "mx:e4m3:tensor:even:sr",
]
NAMES = [*FORMATS, *VARIANTS]
names = pytest.mark.parametrize("name", NAMES)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(21)


def assert_round_trip(x: torch.Tensor, name: str, axis: int = -1) -> None:
    """Assert that a round trip keeps every bit, NaN and the signs of zeros included."""
    expected = fake_quantize(x, name, axis, generator=seeded())
    found = dequantize(quantize(x, name, axis, generator=seeded()))
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    word = torch.int32 if x.dtype == torch.float32 else torch.int16
    assert torch.equal(found.view(word), expected.view(word))


@names
@dtypes
def test_dequantized_it_is_what_fake_quantize_gives(name, dtype):
    """The inputs are rows at every scale, random bits, NaN, Inf and zeros."""
    x = torch.cat([rows_at_every_scale(64), random_bit_patterns(1 << 16).view(-1, 64)])
    x = with_special_blocks(x).to(dtype)
    for axis in (0, 1):
        assert_round_trip(x, name, axis)
        for rows in (x[900:1100], x[1500:1501]):
            assert_round_trip(rows, name, axis)


@names
@pytest.mark.parametrize("shape", [(1,), (7,), (33,), (5, 67), (3, 17, 35), (2, 1, 18, 3)])
def test_any_shape_and_axis_comes_back(name, shape):
    x = torch.randn(shape, generator=seeded())
    for axis in range(-len(shape), len(shape)):
        fmt = get_format(name)
        inside = len(shape) > 1 and axis % len(shape) >= len(shape) - 2
        if fmt.height == 1 or fmt.one_block or inside:
            assert_round_trip(x, name, axis)
            assert_round_trip(x.movedim(0, -1), name, axis)


@names
def test_a_tensor_without_dimensions(name):
    x = torch.tensor(-1.3)
    if get_format(name).block_size is None or get_format(name).one_block:
        assert_round_trip(x, name)
    else:
        with pytest.raises(ValueError, match=r"no dimensions; give it one, .* x\.reshape\(1\)"):
            quantize(x, name)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "hifp8", "fp8_e4m3", "hifp4"])
@pytest.mark.parametrize("shape", [(0,), (0, 32), (32, 0)])
def test_an_empty_tensor_is_refused(name, shape):
    with pytest.raises(ValueError, match=r"has no values to store; keep its shape instead"):
        quantize(torch.ones(shape), name)


def test_other_errors_are_those_of_fake_quantize():
    with pytest.raises(ValueError, match=r"cannot quantize a tensor of torch\.int32"):
        quantize(torch.ones(32, dtype=torch.int32), "mxfp8")
    with pytest.raises(ValueError, match="axis 1 is out of range"):
        quantize(torch.ones(32), "mxfp8", axis=1)
    with pytest.raises(ValueError, match="unknown format 'mxfp5', did you mean"):
        quantize(torch.ones(32), "mxfp5")


# The number of bytes, and their order.


@pytest.mark.parametrize(
    ("name", "codes", "scales", "nbytes"),
    [
        # Each row of a [6, 70] tensor has 3 blocks of 32, 5 of 16, or 2 of 64.
        ("mxfp8", (6, 70), (6, 3), 420 + 18),
        ("mxfp6_e3m2", (6, 70), (6, 3), 420 + 18),
        ("mxfp4", (6, 35), (6, 3), 210 + 18),
        ("mxfp4:2d", (6, 35), (1, 3), 210 + 3),
        ("mx:e2m1:b16:floor", (6, 35), (6, 5), 210 + 30),
        ("nvfp4", (6, 35), (6, 5), 210 + 30 + 4),
        ("nvfp4:2d", (6, 35), (1, 5), 210 + 5 + 4),
        ("hifp4", (6, 35), (6, 2, 4), 210 + 48),
        ("hifp8", (6, 70), None, 420),
        ("hifp8:t15", (6, 70), None, 420 + 4),
        ("fp8_e5m2", (6, 70), None, 420 + 4),
        ("bf16", (6, 70), None, 840),
    ],
)
def test_shapes_and_bytes(name, codes, scales, nbytes):
    quantized = quantize(torch.ones(6, 70), name)
    assert quantized.codes.shape == codes
    assert (None if quantized.scales.blocks is None else quantized.scales.blocks.shape) == scales
    assert quantized.nbytes == nbytes
    assert quantized.codes.is_contiguous()
    assert quantized.codes.dtype == (torch.bfloat16 if name == "bf16" else torch.uint8)
    assert (quantized.shape, quantized.axis, quantized.dtype) == ((6, 70), 1, torch.float32)
    assert quantized.format == get_format(name)


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "hifp4", "hifp8", "bf16"])
def test_the_axis_of_the_blocks_is_the_last_of_the_codes(name):
    x = torch.randn(4, 33, 6, generator=seeded())
    found, expected = quantize(x, name, axis=1), quantize(x.movedim(1, -1).contiguous(), name)
    assert torch.equal(found.codes, expected.codes)
    if found.scales.blocks is not None:
        assert torch.equal(found.scales.blocks, expected.scales.blocks)
    assert found.axis == 1


def test_a_low_nibble_comes_first():
    """E2M1 has 0 .5 1 1.5 2 3 4 6 for codes 0 to 7, and 8 more with a sign; scale 2^0 is 127."""
    quantized = quantize(torch.tensor([6.0, 0.5, -1.0, 0.0, -6.0]), "mxfp4")
    assert quantized.codes.tolist() == [0x17, 0x0A, 0x0F]
    assert quantized.scales.blocks.tolist() == [127]
    assert quantize(torch.tensor([-0.0, 7.0]), "hifp4").codes.tolist() == [0x78]


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_nibbles_are_packed_and_unpacked(count):
    codes = torch.randint(0, 16, (3, count), generator=seeded(), dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.shape == (3, (count + 1) // 2)
    assert torch.equal(unpack_nibbles(packed, count), codes)
    if count % 2:
        assert (packed[:, -1] < 16).all()


# Codes of other packages.


@pytest.mark.parametrize("name", oracle.ML_DTYPES)
def test_codes_are_those_of_ml_dtypes(name):
    """Inputs are all bfloat16 values, clamped because ml_dtypes overflows, and NaN if it exists."""
    element = get_element(name)
    x = every_bfloat16().float()
    x = x[~x.isnan()].clamp(-element.max, element.max)
    theirs = x.numpy().astype(oracle.ML_DTYPES[name])
    rounded = torch.from_numpy(theirs.astype(np.float32))
    np.testing.assert_array_equal(encode(rounded, element).numpy(), theirs.view(np.uint8))
    every_code = np.arange(1 << element.bits, dtype=np.uint8)
    meant = every_code.view(oracle.ML_DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(code_values(element).numpy(), meant)
    np.testing.assert_array_equal(decode(torch.from_numpy(every_code), element).numpy(), meant)


def test_nan_has_the_code_of_ml_dtypes():
    for name, expected in (("e4m3", 0x7F), ("e5m2", 0x7F), ("e3m2", None), ("e2m1", None)):
        assert nan_code(get_element(name)) == expected
    for name in ("fp8_e4m3", "fp8_e5m2"):
        codes = quantize(torch.tensor([1.0, torch.nan]), name).codes
        dtype = oracle.ML_DTYPES[name[4:]]
        assert np.isnan(codes.numpy().view(dtype).astype(np.float32)).tolist() == [False, True]
    assert nan_code(HiFloat8()) == 0x80


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4"])
def test_tensors_are_those_of_ml_dtypes(name):
    """Elements come from a cast of ml_dtypes, and scales are its float8_e8m0fnu."""
    x = rows_at_every_scale()[600:1000]
    quantized = quantize(x, name)
    scale = quantized.scales.blocks.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    element = get_format(name).element
    scaled = np.clip(x.double().numpy() / scale, -element.max, element.max)
    theirs = scaled.astype(np.float32).astype(oracle.ML_DTYPES[element.name]).view(np.uint8)
    codes = quantized.codes
    codes = unpack_nibbles(codes, 32) if element.bits == 4 else codes
    np.testing.assert_array_equal(codes.numpy(), theirs)


def test_int8_is_twos_complement():
    x = torch.tensor([1.0, -1.0, -1 / 64, 127 / 64, -127 / 64, 0.0, -0.0])
    codes = quantize(x, "mxint8").codes.numpy()
    assert codes.view(np.int8).tolist() == [64, -64, -1, 127, -127, 0, 0]
    values = code_values(get_element("int8")).numpy()
    np.testing.assert_array_equal(values, np.arange(256).astype(np.uint8).view(np.int8) / 64)


def test_hifloat8_codes_are_those_of_en_dtypes_and_the_table():
    en_dtypes = pytest.importorskip("en_dtypes", reason="en_dtypes has no wheel for Python 3.13")
    np.testing.assert_array_equal(code_values(HiFloat8()).numpy(), oracle.hifloat8_codes())
    x = torch.cat([every_bfloat16().float(), random_bit_patterns(1 << 18)])
    with np.errstate(invalid="ignore"):
        theirs = x.numpy().astype(en_dtypes.hifloat8).view(np.uint8)
    np.testing.assert_array_equal(quantize(x, "hifp8:inf").codes.numpy(), theirs)
    assert quantize(torch.tensor([1e9, -torch.inf]), "hifp8").codes.tolist() == [0x6E, 0xEE]


@pytest.mark.parametrize("element", [*ELEMENTS.values(), S1P2, HiFloat8(), get_element("e2m0")])
def test_every_code_comes_back(element):
    codes = torch.arange(1 << element.bits, dtype=torch.uint8)
    values = decode(codes, element)
    unused = (values == -2) & element.twos_complement
    known = values.isfinite() & ~unused
    found = encode(values[known], element)
    assert torch.equal(found, codes[known])
    distinct = torch.stack([values[known], torch.signbit(values[known]).float()])
    assert len(distinct.unique(dim=1).t()) == int(known.sum())


def test_a_cast_has_no_table_of_codes():
    with pytest.raises(ValueError, match=r"bfloat16 has no table of codes here; use x\.to"):
        code_values(Cast(torch.bfloat16))


@names
@pytest.mark.parametrize("width", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_bit_of_codes_and_scales(name, width):
    """Neither quantization nor the transforms before it depend on torch.autocast."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 64, generator=generator)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = x.to(device)
    plain = quantize(x, name, generator=seeded())
    rotated = Hadamard(16, "nvfp4").apply(x)
    with torch.autocast(device, dtype=width):
        assert (x @ x.t()).dtype == width, "autocast is in effect"
        found = quantize(x, name, generator=seeded())
        values = fake_quantize(x, name, generator=seeded())
        assert torch.equal(Hadamard(16, "nvfp4").apply(x), rotated)
    assert torch.equal(found.codes, plain.codes)
    assert found.scales.parts().keys() == plain.scales.parts().keys()
    for part, expected in plain.scales.parts().items():
        assert torch.equal(found.scales.parts()[part], expected)
    assert torch.equal(dequantize(plain), values)


@pytest.mark.parametrize("name", ["nv:int8:tensor:fp32", "nv:e2m1:tensor:fp32:pow2"])
def test_nan_that_a_format_cannot_store_is_refused(name):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dequantize(quantize(x, name)), fake_quantize(x, name))
    x[1, 2] = float("nan")
    assert fake_quantize(x, name).isnan().sum() == 1
    with pytest.raises(ValueError, match=r"contains NaN, which format .* cannot store"):
        quantize(x, name)
