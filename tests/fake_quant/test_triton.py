"""The GPU kernels give the reference's bits.

Without a GPU, Triton's interpreter runs them. Triton also compiles them for an H100, and tests
search the code for instructions that would change bits. The tests marked `gpu` are the proof.
"""

import json
import statistics
import sys
import types
from functools import partial
from pathlib import Path

import pytest
import torch

import megatron.fake_quant.fused
from megatron.fake_quant import fake_quantize, get_format, reference
from megatron.fake_quant.accumulate import get_accumulator
from megatron.fake_quant.fused import dispatch
from megatron.fake_quant.matmul import products
from megatron.fake_quant.operators import amax_of
from megatron.fake_quant.quantize import checked
from megatron.fake_quant.scalings.tensor_scale import local_amax
from tests.subprocesses import environment, run

from .accumulator_operands import ACCUMULATOR_NAMES, by_reference, first_sums, operands
from .accumulator_operands import bits as number_bits
from .inputs import random_bits_at_every_scale
from .kernel_inputs import CPU_NAMES, INPUTS, NAMES, SEED, bits, layouts

#: Triton has wheels for Linux alone; torch 2.9 and older contain one that is not used.
pytest.importorskip("triton", minversion=".".join(map(str, dispatch.TRITON)))
#: formats without a GPU kernel, which the reference computes
OTHERS = (
    *("bf16", "fp16", "hifp4", "if4", "mixfp4", "mxfp4_macro", "nf4"),
    *("nv:e2m1:row:e4m3:4over6-mae", "mx:e2m1:tensor:rceil:sr"),
)
OURS = [
    name for name in [*NAMES, *CPU_NAMES] if not name.startswith(OTHERS) and ":eden" not in name
]
#: formats whose kernels leave out the scale of the tensor or of whole rows
APART = [f"{name}|apart" for name in ("nvfp4:sr", "fp8_e4m3", "hifp8:t15", "fp8_rowwise")]
names = pytest.mark.parametrize("name", OURS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def work(*arguments: str, cache: Path) -> dict:
    """Return the output of triton_worker.py."""
    command = [sys.executable, "-m", "tests.fake_quant.triton_worker", *arguments]
    result = run(command, env=environment(TRITON_CACHE_DIR=cache))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


# By the interpreter.


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    return work("compare", *OURS, *APART, cache=tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", [*OURS, *APART])
def test_interpreted_the_bits_are_the_reference_s(name, differences):
    assert differences[name] == []


@pytest.mark.parametrize("name", [*ACCUMULATOR_NAMES, "several tiles and batches"])
def test_interpreted_an_accumulator_has_the_bits_of_the_reference(name, differences):
    assert differences["accumulators"][name] == 0


def test_interpreted_the_amax_and_the_scales_of_a_product_are_those_of_torch(differences):
    assert differences["unlike torch"] == {"amax": 0, "scaled": 0}


# By the compiler.


@pytest.fixture(scope="module")
def without_device(tmp_path_factory):
    return work("compile", cache=tmp_path_factory.mktemp("triton"))


@pytest.fixture(scope="module")
def compiled(without_device):
    return without_device["compiled"]


def test_the_code_for_an_h100_has_nothing_that_changes_bits(compiled):
    assert compiled
    for name, code in compiled.items():
        assert code["forbidden"] == [], name


@pytest.mark.parametrize(
    "name",
    [
        "nvfp4",
        "nvfp4:2d:sr",
        "nvfp4:outer-1x128",
        "nvfp4:4over6-mae",
        "amdfp4:outer-tensor",
        "fp8_block",
        "hifp8:sr:t15",
        "fp8_e4m3:pow2",
    ],
)
def test_it_divides_as_ieee_says_where_it_divides(name, compiled):
    assert "div.rn.f32" in compiled[name]["operations"]
    assert "div.rn.f32" not in compiled["mxfp8"]["operations"]


@pytest.mark.parametrize(
    "name",
    [
        "mxfp8",
        "mxfp4",
        "mxfp4:head3/4",
        "mx6",
        "mx9",
        "nvfp4:2d:sr",
        "nvint4:outer-none",
        "amdfp4:outer-tensor",
        "fp8_block",
        "fp8_block:2d",
        "hifp8",
        "mxfp4:sr",
    ],
)
def test_memory_is_read_and_written_16_bytes_at_a_time(name, compiled):
    scalar = {"ld.global.b32", "div.rn.f32"}  # the tensor's maximum
    found = {o for o in compiled[name]["operations"] if not o.startswith("atom")} - scalar
    assert found == {"ld.global.v4.b32", "st.global.v4.b32"}


def test_the_compiler_keeps_the_bits_of_nan_in_float16(compiled):
    """It folded the replacement of NaN into the conversion, for which GPUs have other bits."""
    for name in ("mxint8:sr", "mxfp6_e2m3", "hifp8:hr:inf"):
        assert compiled[name]["half_nan"], name


def test_a_later_launch_is_like_the_first(without_device):
    """A later launch bypasses Triton's binder, so it must pass all arguments itself."""
    for name, (first, second, unaligned) in without_device["launched"].items():
        assert len(first) == (2 if name.startswith("nvfp4") else 1)
        assert second == first
        assert unaligned == first


# What a CUDA tensor gets.


@pytest.fixture
def on_cuda():
    """A stand-in for a CUDA tensor with the attributes that `find` reads."""
    dispatch._gpu.cache_clear()
    yield types.SimpleNamespace(is_cuda=True, device=torch.device("cuda"), numel=lambda: 1)
    dispatch._gpu.cache_clear()


def test_they_are_what_a_cuda_tensor_gets(on_cuda, monkeypatch):
    from megatron.fake_quant.fused import triton_launch

    monkeypatch.setattr(triton_launch, "check", lambda: None)
    for name in OURS:
        assert dispatch.find(on_cuda, get_format(name)) is triton_launch.fake_quantize
    refused = ("mx:e4m3:b16385:floor", "mx:e4m3:b129:floor:2d", "nvfp4:eden")
    rows = ("nv:e2m1:row:e4m3:outer-tensor", "nv:e2m1:row:e4m3:outer-none:4over6-mae")
    for name in (*refused, *OTHERS, *rows):
        assert dispatch.find(on_cuda, get_format(name)) is None
    monkeypatch.setenv(dispatch.VARIABLE, "0")
    assert dispatch.find(on_cuda, get_format("mxfp8")) is None


def test_without_triton_the_reference_does_the_work(on_cuda, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in ("launch", "plans", "blocks", "elementwise", "scales", "bits"):
        module = f"triton_{module}"
        monkeypatch.delitem(sys.modules, f"megatron.fake_quant.fused.{module}", raising=False)
        monkeypatch.delattr(megatron.fake_quant.fused, module, raising=False)
    assert dispatch.find(on_cuda, get_format("mxfp8")) is None


def test_where_triton_cannot_launch_the_reference_does_the_work_and_says_so(on_cuda, monkeypatch):
    from megatron.fake_quant.fused import triton_launch

    def check() -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton_launch, "check", check)
    with pytest.warns(UserWarning, match="find C compiler.*several times slower.*install gcc"):
        assert dispatch.find(on_cuda, get_format("mxfp8")) is None


def test_an_older_triton_is_not_used_and_a_warning_says_so(on_cuda, monkeypatch):
    """Older releases flush subnormals in divisions, or their launchers take different arguments."""
    monkeypatch.setattr("triton.__version__", "3.5.1")
    with pytest.warns(
        UserWarning, match=r"Triton 3\.5\.1 is older than 3\.6.*several times slower"
    ):
        assert dispatch.find(on_cuda, get_format("mxfp8")) is None


# On a GPU.


@pytest.mark.gpu
@names
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_the_bits_are_the_reference_s(name, dtype):
    fmt = get_format(name)
    seed = SEED if fmt.rounding == "stochastic" else None
    for kind, make in INPUTS.items():
        values = make().to(dtype)
        on_gpu = layouts(values.cuda())
        for layout_name, x in layouts(values).items():
            y = on_gpu[layout_name]
            kernel = dispatch.find(y, fmt)
            assert kernel is not None
            for axis in range(-x.ndim, 0):
                if fmt.height > 1 and (x.ndim < 2 or axis < -2):
                    continue
                _, layout = checked(x, fmt, axis)
                expected = reference.fake_quantize(x, fmt, layout, seed)
                found = kernel(y, fmt, layout, seed)
                assert torch.equal(bits(found.cpu()), bits(expected)), (kind, layout_name, axis)
                assert found.stride() == expected.stride(), (kind, layout_name, axis)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ACCUMULATOR_NAMES)
def test_on_a_gpu_an_accumulator_has_the_bits_of_the_reference(name):
    unit = get_accumulator(name)
    a, b = (side.flat() for side in operands(unit, 3 * unit.step + 5))
    on_gpu = [
        side._replace(
            elements=side.elements.cuda(),
            scales=None if side.scales is None else side.scales.cuda(),
        )
        for side in (a, b)
    ]
    kernel = dispatch.find_multiplication(on_gpu[0].elements, on_gpu[1].elements)
    assert kernel is not None
    for start in (None, first_sums((1, a.elements.shape[1], b.elements.shape[1]))):
        ours = kernel(*on_gpu, unit, start=None if start is None else start.cuda())
        assert torch.equal(number_bits(ours.cpu()), number_bits(by_reference(a, b, unit, start)))


def same_on_gpu(x, name, axis, amax=None):
    """Assert that the kernel gives the bits of the reference."""
    fmt, layout = checked(x, name, axis)
    seed = SEED if fmt.rounding == "stochastic" else None
    expected = reference.fake_quantize(x, fmt, layout, seed, amax=amax)
    y = x.cuda()
    found = dispatch.find(y, fmt)(y, fmt, layout, seed, amax=amax)
    assert torch.equal(bits(found.cpu()), bits(expected))


@pytest.mark.gpu
@names
def test_on_a_gpu_values_of_every_scale_have_the_reference_s_bits(name):
    x = random_bits_at_every_scale(128)
    same_on_gpu(x, name, 1)
    same_on_gpu(x.view(1 << 10, 1 << 12), name, 0)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "mx:e4m3:row:rceil",
        "fp8_rowwise",
        "fp8_rowwise:sr",
        "nvfp4:outer-row",
        "nvfp4:outer-1x128",
        "amdfp4:outer-row:sr",
    ],
)
@pytest.mark.parametrize("shape", [(3, 40001), (5003, 67), (2, 3, 16388), (7, 1300, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_several_programs_share_the_maximum_of_a_row(name, shape, dtype):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    x.view(-1)[1005] = torch.nan
    for axis in range(len(shape)):
        same_on_gpu(x, name, axis)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4:4over6-mae", "amdfp4:outer-tensor", "fp8_e4m3"])
def test_on_a_gpu_the_amax_may_be_given(name):
    x = torch.randn(64, 300, generator=torch.Generator().manual_seed(1))
    same_on_gpu(x, name, 1, amax=torch.tensor(0.7))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    [
        "mxfp8",
        "mxfp4:sr",
        "mx9",
        "nvfp4",
        "nvfp4:4over6-mae",
        "nvfp4:outer-1x128",
        "amdfp4",
        "fp8_block",
        "fp8_rowwise",
        "hifp8:hr",
        "fp8_e4m3",
    ],
)
@pytest.mark.parametrize("count", [1, 31, 4096, 32769])
def test_on_a_gpu_small_and_unaligned_tensors_too(name, count):
    x = torch.randn(count + 1, generator=torch.Generator().manual_seed(count))[1:]
    y = torch.empty(count + 1, device="cuda")[1:].copy_(x)
    on_cpu, on_gpu = (
        fake_quantize(t, name, generator=torch.Generator().manual_seed(0)) for t in (x, y)
    )
    assert torch.equal(bits(on_gpu.cpu()), bits(on_cpu))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_the_amax_is_that_of_the_cpu(dtype):
    for make in INPUTS.values():
        values = make().to(dtype)
        for x in layouts(values).values():
            assert torch.equal(amax_of(x.cuda()).cpu(), local_amax(x))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize("scales", [(None, 3.7), (1e-30, 3.7), (0.1, None)])
def test_on_a_gpu_a_product_is_scaled_as_on_the_cpu(dtype, alpha, scales):
    x = torch.randn(100, 300, generator=torch.Generator().manual_seed(1)) * 1e3
    scale_a, scale_b = (None if s is None else torch.tensor(s) for s in scales)
    on_gpu = [None if s is None else s.cuda() for s in (scale_a, scale_b)]
    scaled = dispatch.find_scaling(x.cuda(), *on_gpu)
    found = scaled(x.cuda(), alpha, *on_gpu, dtype).cpu()
    assert torch.equal(bits(found), bits(products._times(x, alpha, scale_a, scale_b).to(dtype)))


def milliseconds(call) -> float:
    """Return the median time of several rounds of consecutive launches."""
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(5):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 5)
    return statistics.median(times)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "hifp8", "nvfp4", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("axis", [0, 1])
def test_on_a_gpu_memory_bounds_the_time(name, dtype, axis):
    """The kernels reach 80 % of a copy's bandwidth; a scale of the tensor takes another read.

    The matrix is so large that the kernels take longer than their launches from Python.
    """
    x = torch.randn(16384, 8192, device="cuda").to(dtype)
    ours, copy = partial(fake_quantize, x, get_format(name), axis), x.clone
    for call in (ours, copy):
        milliseconds(call)  # compiles, and warms up
    passes = 3 if get_format(name).has_tensor_scale else 2
    assert passes / 2 * milliseconds(copy) / milliseconds(ours) >= 0.8
