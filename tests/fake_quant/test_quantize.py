"""`fake_quantize` itself: axes, layouts, dtypes, casts and errors."""

import numpy as np
import pytest
import torch

from megatron.fake_quant import FORMATS, fake_quantize
from megatron.fake_quant.elements import E4M3
from megatron.fake_quant.formats import Format

from . import oracle
from .inputs import assert_same, every_bfloat16, every_float16, random_bit_patterns

NAMES = [*FORMATS, "mx:e3m4:b16:rceil"]
BLOCKED = ["mxfp8", "mxfp4", "mxint8", "mx:e3m4:b16:rceil", "hifp4", "nvfp4"]
ROUNDED_TO_THE_DTYPE = [
    *("nvfp4", "nvint4", "fp8_e4m3", "fp8_e5m2", "fp8_block", "fp8_rowwise"),
    *("nf4", "if4", "if4_mae", "mixfp4", "mxfp4_macro", "mxfp4_macro_oas"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
names = pytest.mark.parametrize("name", NAMES)
blocked = pytest.mark.parametrize("name", BLOCKED)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal deviates whose rows along the first axis differ by powers of two."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    steps = torch.arange(shape[0]).remainder(17).sub(8)
    return torch.ldexp(x, steps.view(-1, *[1] * (len(shape) - 1))).to(dtype)


# Axes and layouts.


@names
@dtypes
def test_along_the_first_axis_is_along_the_last_of_the_transposed(name, dtype):
    x = normal(96, 64, dtype=dtype)
    expected = fake_quantize(x.t().contiguous(), name, axis=-1).t()
    assert torch.equal(fake_quantize(x, name, axis=0), expected)
    assert torch.equal(fake_quantize(x.t(), name, axis=1), expected.t())
    assert torch.equal(fake_quantize(x, name, axis=-2), expected)


@blocked
def test_the_axis_matters(name):
    x = normal(64, 64)
    assert not torch.equal(fake_quantize(x, name, axis=0), fake_quantize(x, name, axis=1))


@pytest.mark.parametrize("name", BLOCKED[:-1])  # the vectors of nvfp4 share a tensor scale
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("shape", [(66, 2, 1, 3), (3, 2, 2, 65), (5, 33, 2, 7), (1, 1, 1, 1)])
def test_any_axis_is_a_loop_over_its_vectors(name, axis, shape):
    x = normal(*shape)
    vectors = x.movedim(axis, -1).reshape(-1, shape[axis])
    looped = torch.stack([fake_quantize(vector, name) for vector in vectors])
    expected = looped.view(x.movedim(axis, -1).shape).movedim(-1, axis)
    assert torch.equal(fake_quantize(x, name, axis=axis), expected)


@pytest.mark.parametrize("length", [1, 15, 31, 33, 63, 100])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_ragged_last_block_is_a_shorter_block(length, axis):
    x = normal(length, 40) if axis == 0 else normal(40, length)
    rows = (x if axis == 1 else x.t()).numpy()
    pieces = [rows[:, start : start + 32] for start in range(0, length, 32)]
    exact = np.concatenate(
        [oracle.fake_quantize_mx(piece, "e2m1", "floor") for piece in pieces], axis=1
    )
    found = fake_quantize(x, "mxfp4", axis=axis)
    assert_same(found, exact if axis == 1 else exact.T)


def strided_views(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the values of a [64, 96] tensor in other memory layouts."""
    wide = torch.full((64, 200), torch.nan, dtype=x.dtype)
    wide[:, 1:193:2] = x
    offset = torch.full((64 * 96 + 3,), torch.nan, dtype=x.dtype)
    offset[3:] = x.flatten()
    return {
        "transposed": x.t().contiguous().t(),
        "every second column": wide[:, 1:193:2],
        "unaligned": offset[3:].view(64, 96),
    }


@names
@dtypes
@pytest.mark.parametrize("axis", [0, 1])
def test_the_result_does_not_depend_on_the_memory_layout(name, dtype, axis):
    x = normal(64, 96, dtype=dtype)
    expected = fake_quantize(x, name, axis=axis)
    for layout, view in strided_views(x).items():
        assert torch.equal(view, x), layout
        assert torch.equal(fake_quantize(view, name, axis=axis), expected), layout


@names
def test_an_expanded_tensor_is_read_and_never_written(name):
    row = normal(1, 64)
    for axis in (0, 1):
        copies = row.expand(32, 64)
        expected = fake_quantize(copies.contiguous(), name, axis=axis)
        assert torch.equal(fake_quantize(copies, name, axis=axis), expected)
    assert torch.equal(row, normal(1, 64))


@names
def test_the_number_of_threads_does_not_matter(name):
    x = normal(512, 512)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(fake_quantize(x, name, axis=0))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results)


@names
def test_flushing_subnormals_changes_nothing_above_them(name):
    """Blocks reach down to 2^-90. Below, a processor that flushes subnormals may change bits."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        x = torch.ldexp(normal(181, 32), torch.arange(-90, 91).view(-1, 1))
        x = torch.where(x.abs().amax(1, keepdim=True) > 2.0**-90, x, 1.0)
        flushed = fake_quantize(x, name)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flushed, fake_quantize(x, name))


# Shapes, dtypes, and tensors that must not change.


@names
@dtypes
@pytest.mark.parametrize("shape", [(0,), (0, 32), (32, 0), (3, 0, 5), (1,), (7,), (2, 3, 4, 5)])
def test_shape_and_dtype_are_kept(name, dtype, shape):
    x = torch.randn(shape).to(dtype)
    for axis in range(-len(shape), len(shape)):
        y = fake_quantize(x, name, axis=axis)
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)


@names
@dtypes
def test_the_result_is_new_memory_and_the_input_stays(name, dtype):
    x = normal(8, 64, dtype=dtype)
    before = x.clone()
    y = fake_quantize(x, name)
    y.zero_()
    assert torch.equal(x, before)
    empty = x[:0]
    assert fake_quantize(empty, name) is not empty


@names
@dtypes
def test_there_is_one_nan(name, dtype):
    """Every path returns 0x7fc00000 or its like, for any sign and payload of the input."""
    x = random_bit_patterns(1 << 12).to(dtype)
    assert x.isnan().any()
    y = fake_quantize(x, name)
    word = torch.int32 if dtype == torch.float32 else torch.int16
    found = y[y.isnan()].view(word).unique()
    assert found.tolist() == torch.tensor([torch.nan], dtype=dtype).view(word).tolist()


@names
def test_no_gradient_flows(name):
    x = normal(4, 32).requires_grad_()
    y = fake_quantize(x, name)
    assert not y.requires_grad
    assert torch.equal(y, fake_quantize(x.detach(), name))


@names
def test_a_half_precision_tensor_gives_what_its_float32_copy_gives(name):
    """The result is rounded to the tensor's dtype, which is exact for most formats.

    A scale that is not a power of two puts results between the numbers of the dtype.
    """
    for x in (every_bfloat16(), every_float16()):
        if name == "fp16" and x.dtype == torch.bfloat16:
            continue  # overflows at a different value, see the test of casts
        finite = x[x.isfinite()]
        y, y32 = fake_quantize(finite, name), fake_quantize(finite.float(), name)
        assert torch.equal(y, y32.to(x.dtype))
        kept = y.isfinite()
        assert (y32[~kept].abs() > torch.finfo(x.dtype).max).all()
        assert torch.equal(y.float()[kept], y32[kept]) == (name not in ROUNDED_TO_THE_DTYPE)


def test_float16_subnormals_have_room_for_what_the_formats_make_of_them():
    """2^-24 is the smallest float16; HiFloat8 ends at 2^-22, a block may keep 2^-24."""
    x = torch.tensor([2.0**-24, 2.0**-23, 3 * 2.0**-24, 5 * 2.0**-24], dtype=torch.float16)
    hif8 = [0.0, 2.0**-22, 2.0**-22, 2.0**-22]
    assert fake_quantize(x, "hifp8").tolist() == hif8
    assert fake_quantize(x, "mxfp8").tolist() == x.tolist()
    # amax 5 * 2^-24 has scale 2^-24 in E2M1: 1 2 3 stay, 5 is half-way from 4 to 6.
    assert fake_quantize(x, "mxfp4").tolist() == [2.0**-24, 2.0**-23, 3 * 2.0**-24, 4 * 2.0**-24]


def test_what_rounds_up_past_the_end_of_float16_is_inf():
    """65504 has scale 2^8 under RCEIL; 65504 / 2^8 = 255.9 becomes 256 in E4M3, which is 65536."""
    x = torch.tensor([65504.0, 1.0], dtype=torch.float16)
    assert fake_quantize(x, "mx:e4m3:b32:rceil").tolist() == [torch.inf, 1.0]
    assert fake_quantize(x.float(), "mx:e4m3:b32:rceil").tolist() == [65536.0, 1.0]
    assert fake_quantize(x, "mxfp8").tolist() == [448 * 2.0**7, 1.0]


# Formats without a name, and errors.


def test_an_element_without_scales_is_a_direct_cast():
    fmt = Format("raw e4m3", E4M3)
    x = torch.tensor([17.0, 1000.0, -1e-9, torch.nan])
    assert fake_quantize(x, fmt)[:3].tolist() == [16.0, 448.0, 0.0]
    assert fake_quantize(x, fmt)[3].isnan()


def test_a_number_without_dimensions():
    assert fake_quantize(torch.tensor(1.0625), "hifp8") == 1.125
    assert fake_quantize(torch.tensor(1.001), "bf16") == 1.0
    with pytest.raises(
        ValueError, match=r"'mxfp8' scales blocks along an axis, but .* x.reshape\(1\)"
    ):
        fake_quantize(torch.tensor(1.0), "mxfp8")


@names
@pytest.mark.parametrize("axis", [-3, 2, 7])
def test_an_axis_out_of_range_is_refused(name, axis):
    message = (
        rf"axis {axis} is out of range for a tensor of shape \(4, 32\); choose one from -2 to 1"
    )
    with pytest.raises(ValueError, match=message):
        fake_quantize(torch.ones(4, 32), name, axis=axis)


@names
@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.complex64, torch.bool])
def test_other_dtypes_are_refused(name, dtype):
    message = rf"cannot quantize a tensor of {dtype}; give one of float32, bfloat16, float16, for"
    with pytest.raises(ValueError, match=message):
        fake_quantize(torch.ones(32, dtype=dtype), name)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="unknown format 'mxfp5'"):
        fake_quantize(torch.ones(32), "mxfp5")


@pytest.mark.gpu
@names
@dtypes
@pytest.mark.parametrize("axis", [0, 1])
def test_a_gpu_gives_the_same_bits(name, dtype, axis):
    x = torch.cat([random_bit_patterns(1 << 14).view(-1, 64), normal(64, 64)]).to(dtype)
    on_cpu, on_gpu = fake_quantize(x, name, axis=axis), fake_quantize(x.cuda(), name, axis=axis)
    assert_same(on_gpu.cpu().float(), on_cpu.float().numpy())


@pytest.mark.parametrize("fmt", [None, 8, b"mxfp8", torch.float16])
def test_an_object_that_is_not_a_format_is_refused(fmt):
    with pytest.raises(ValueError, match="is not a format; give a Format, or a name such as"):
        fake_quantize(torch.ones(4), fmt)


@pytest.mark.parametrize(
    "seed", [-1, 1 << 62, 10**40, 1.5, "7", torch.tensor(7.0), torch.tensor([7])], ids=str
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_seed_out_of_range_is_refused_on_every_path(seed, device):
    x = torch.ones(4, 32, device=device)
    with pytest.raises(ValueError, match=r"the seed .*; give an integer from 0 to 2\^62 - 1"):
        fake_quantize(x, "mxfp8:sr", seed=seed)


#: Formats whose results scale with powers of two, except at the ends of float32; True if results
#: can be beyond float32. Macro blocks and 4/6, whose results do not scale, are compared with
#: rational arithmetic in test_vectors.py.
NEAR_THE_TOP = {
    "mxfp8": False,
    "mxfp8:rceil": True,
    "mxfp8:ceil": True,
    "mxfp8:even": True,
    "mxfp4:top7.25": True,
    "mxfp4:head3/4": True,
    "mxfp6_e2m3:ceil": True,
    "mx6": False,
    "nvfp4": False,
    "nvfp4:head16/17": True,
    "nvfp4:eden": True,
    "fp8_e4m3": False,
    "fp8_e4m3:pow2": True,
    "fp8_e4m3:head3/4": False,
    "hifp8:t15": False,
    "hifp8:t15:pow2": True,
    "hifp8:hr:t224": True,
    "fp8_block": False,
    "fp8_block:ue8m0": True,
    "fp8_rowwise:head3/4": False,
}


@pytest.mark.parametrize("name", NEAR_THE_TOP)
def test_a_result_is_inf_only_if_codes_times_scales_are_beyond_float32(name):
    """The exact product is that of a tensor 2^-32 times as large, times 2^32 in float64."""
    largest, beyond = float(np.finfo(np.float32).max), False
    ratios = torch.randn(4, 128, generator=torch.Generator().manual_seed(31)).clamp(-2, 2) / 2
    ratios[:, 0] = 1
    for step in range(33):
        x = (ratios.double() * (largest * (1 - step / 64))).float()
        small = fake_quantize(x * 2.0**-32, name, seed=5).double()
        exact = small * 2.0**32
        assert_same(fake_quantize(x, name, seed=5), exact.float().numpy())
        beyond |= bool((exact.abs() > largest).any())
        assert small.isfinite().all()
    assert beyond == NEAR_THE_TOP[name]
