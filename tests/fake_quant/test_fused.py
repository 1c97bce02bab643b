"""The fused kernels give the reference's bits."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from threading import Barrier, get_native_id

import pytest
import torch

from megatron.fake_quant import Hadamard, fake_quantize, get_format, reference
from megatron.fake_quant.block_layout import BlockLayout
from megatron.fake_quant.fused import dispatch, numba_launch, numba_wide
from megatron.fake_quant.fused import numba_threads as team
from megatron.fake_quant.quantize import checked

from .kernel_inputs import CPU_NAMES, INPUTS, NAMES, SEED, bits, views

REPO = Path(__file__).parents[2]
names = pytest.mark.parametrize("name", [*NAMES, *CPU_NAMES])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@names
@dtypes
def test_the_bits_are_the_reference_s(name, dtype):
    fmt = get_format(name)
    seed = SEED if fmt.stochastic else None
    for kind, make in INPUTS.items():
        for layout_name, x in views(kind, make().to(dtype)).items():
            for axis in range(-x.ndim, 0):
                if fmt.height > 1 and (x.ndim < 2 or axis < -2):
                    continue
                _, layout = checked(x, fmt, axis)
                expected = reference.fake_quantize(x, fmt, layout, seed)
                found = numba_launch.fake_quantize(x, fmt, layout, seed)
                assert torch.equal(bits(found), bits(expected)), (kind, layout_name, axis)
                assert found.stride() == expected.stride(), (kind, layout_name, axis)
                assert found.dtype == dtype


@pytest.mark.parametrize("name", ["nvfp4:outer-1x64:sr", "nvfp4:outer-row"])
def test_outer_scales_of_many_groups_have_the_reference_s_bits(name, monkeypatch):
    """Groups, some with an Inf or a NaN, are quantized a few at a time; the last one is shorter."""
    monkeypatch.setattr(numba_launch, "_NEAR", 1 << 14)
    x = torch.randn(2, 1100, 33, generator=torch.Generator().manual_seed(4))
    x = torch.ldexp(x, torch.arange(1100).remainder(40).view(1, -1, 1))
    x[0, 70, 3], x[1, -1, -1] = torch.inf, torch.nan
    fmt = get_format(name)
    seed = SEED if fmt.stochastic else None
    for axis in (1, 2):
        layout = BlockLayout.of(tuple(x.shape), fmt, axis)
        expected = reference.fake_quantize(x, fmt, layout, seed)
        assert torch.equal(bits(numba_launch.fake_quantize(x, fmt, layout, seed)), bits(expected))


WIDE = ("fp8_block", "fp8_block:2d", "fp8_rowwise", "nv:e2m1:row:e4m3", "mx:int8:row:floor")


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("shape", [(300, 384), (2, 130, 8320)])
@dtypes
def test_wide_blocks_have_the_reference_s_bits(name, shape, dtype, monkeypatch):
    """Whole chunks of 128 values fill the rows; blocks have a NaN, an Inf, zeros or tiny values."""
    calls = []
    kernel = numba_wide.wide_blocks
    monkeypatch.setattr(numba_wide, "wide_blocks", lambda *args: (calls.append(1), kernel(*args)))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    x = torch.ldexp(x, torch.arange(shape[-2]).view(-1, 1).remainder(280) - 140)
    x = torch.where(torch.arange(shape[-1]).remainder(5) == 0, -x * 2.0**-12, x).to(dtype)
    x[..., 1, :], x[..., 5, 7], x[..., 140 % shape[-2], 200] = -0.0, torch.nan, -torch.inf
    x[..., 6, :140] = -1e-41
    fmt = get_format(name)
    # The address of the last tensor is not a multiple of 4 if its values have 16 bits.
    unaligned = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(shape)
    for tensor in (x, x.nan_to_num(1, 2, -2), unaligned):
        layout = BlockLayout.of(shape, fmt, -1)
        expected = reference.fake_quantize(tensor, fmt, layout, None)
        found = numba_launch.fake_quantize(tensor, fmt, layout, None)
        assert torch.equal(bits(found), bits(expected))
    assert calls


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fp8_rowwise", (2, 600, 4100)),
        ("nv:e2m1:row:e4m3:outer-row:sr", (3, 5000)),
        ("nv:e2m1:tensor:ue5m3", (7, 1803)),
    ],
)
def test_blocks_that_are_divided_have_the_reference_s_bits(name, shape):
    """Long columns and rows are quantized in parts; some have a NaN, an Inf or only zeros."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    x = torch.ldexp(x, torch.arange(shape[-1]).remainder(30) - 15)
    x[..., 0, 1], x[..., -1, -1], x[..., 2] = torch.nan, torch.inf, 0
    fmt = get_format(name)
    seed = SEED if fmt.stochastic else None
    for tensor in (x, x.nan_to_num(1, 2)):
        for axis in (-1, -2):
            layout = BlockLayout.of(shape, fmt, axis)
            expected = reference.fake_quantize(tensor, fmt, layout, seed)
            found = numba_launch.fake_quantize(tensor, fmt, layout, seed)
            assert torch.equal(bits(found), bits(expected)), axis


@dtypes
@pytest.mark.parametrize("hadamard", [Hadamard(16, "nvfp4"), Hadamard(64, 5), Hadamard(2)])
def test_rotations_have_the_reference_s_bits(hadamard, dtype, monkeypatch):
    x = torch.randn(256, 320).to(dtype)
    x[3, 4], x[9, 9], x[100] = torch.nan, -torch.inf, -0.0
    for y in (x, x.t(), x.view(4, 64, 320).permute(1, 2, 0), x[:, 64:]):
        for axis in range(y.ndim):
            if y.shape[axis] % hadamard.size:
                continue
            for transform in (hadamard.apply, hadamard.invert):
                monkeypatch.setenv(dispatch.VARIABLE, "1")
                found = transform(y, axis)
                monkeypatch.setenv(dispatch.VARIABLE, "0")
                expected = transform(y, axis)
                assert torch.equal(bits(found), bits(expected))
                assert found.stride() == expected.stride()


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4:sr", "mxfp4:2d", "hifp8:sr", "fp8_e4m3"])
@pytest.mark.parametrize("axis", [0, 1])
def test_the_number_of_threads_does_not_matter(name, axis, threads):
    x = torch.randn(700, 513)
    fmt, layout = checked(x, name, axis)
    seed = SEED if fmt.rounding == "stochastic" else None
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(numba_launch.fake_quantize(x, fmt, layout, seed))
    assert all(torch.equal(result, results[0]) for result in results)


def test_several_threads_may_call_at_once(threads):
    threads(2)
    tensors = [torch.randn(512, 512) for _ in range(8)]
    expected = [fake_quantize(x, "mxfp8") for x in tensors]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda x: fake_quantize(x, "mxfp8"), tensors))
    assert all(map(torch.equal, found, expected))


def test_torch_s_own_threads_do_the_work(threads):
    """Other threads would compete with torch's, which wait for work in a loop."""
    if "backend: OpenMP" not in torch.__config__.parallel_info() or sys.platform != "linux":
        pytest.skip("needs a torch with OpenMP threads, on Linux")
    threads(2)
    met, two = set(), Barrier(2, timeout=60)

    def work(start, stop):
        two.wait()  # so that neither can do both parts
        met.add(get_native_id())

    for _ in range(5):
        team.run(work, 2)
    assert len(met) == 2, "the threads of one team serve all calls"


def test_what_a_part_raises_is_raised(threads):
    threads(3)

    def work(start, stop):
        if start <= 4 < stop:
            raise ZeroDivisionError("part of 4")
        return start, stop

    with pytest.raises(ZeroDivisionError, match="part of 4"):
        team.run(work, 100)
    assert [range(*part) for part in team.run(work, 4)] == [range(i, i + 1) for i in range(4)]


def test_the_last_part_is_begun_first_on_request(threads):
    threads(2)
    begun, both_began = [], Barrier(2)

    def work(start, stop):
        begun.append(start)
        if start >= 6:
            both_began.wait(60)
        return start, stop

    parts = team.run(work, 8, backwards=True)
    assert [range(*part) for part in parts] == [range(i, i + 1) for i in range(8)]
    assert sorted(begun[:2]) == [6, 7]


def test_without_openmp_threads_of_our_own_do_the_work(threads, monkeypatch):
    threads(3)
    monkeypatch.setattr(team, "_openmp", lambda: None)
    found = team.run(lambda start, stop: list(range(start, stop)), 100)
    assert list(chain(*found)) == list(range(100))
    x = torch.randn(512, 512)
    threads(1)
    expected = fake_quantize(x, "mxfp8")
    threads(3)
    assert torch.equal(fake_quantize(x, "mxfp8"), expected)


def test_it_is_what_large_tensors_get():
    large, small = torch.randn(256, 256), torch.randn(255, 256)
    for name in ("mxfp8", "nvfp4:2d", "hifp8:hr", "fp8_e5m2:sr"):
        assert dispatch.find(small, get_format(name)) is None
    for name in ("mxfp8", "nvfp4:2d", "hifp8:hr", "fp8_e5m2:sr"):
        assert dispatch.find(large, get_format(name)) is numba_launch.fake_quantize
        assert dispatch.find(small, get_format(name)) is numba_launch.fake_quantize, "loaded now"
    assert dispatch.find(large, get_format("hifp4:sr")) is None


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "hifp8", "hifp4", "fp8_e4m3"])
def test_the_storage_of_the_tensor_can_still_be_resized(name):
    """Selective recomputation frees activations by resizing their storages to zero."""
    x = torch.randn(256, 256)
    for tensor in (fake_quantize(x, name), Hadamard(16).apply(x), x):
        tensor.untyped_storage().resize_(0)


def test_many_small_tensors_load_the_kernels_too(monkeypatch):
    monkeypatch.setattr(dispatch, "_left", 3 << 12)
    x, fmt = torch.randn(64, 64), get_format("mxfp8")
    assert [dispatch.find(x, fmt) is None for _ in range(4)] == [True, True, False, False]
    assert dispatch.find(torch.randn(1), fmt) is numba_launch.fake_quantize


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "0")
    assert dispatch.find(torch.randn(256, 256), get_format("mxfp8")) is None


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPO), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_numba_the_reference_does_the_work():
    code = """
import sys
sys.modules["numba"] = None
import torch
from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.fused import dispatch
x = torch.arange(1 << 16, dtype=torch.float32).view(256, 256)
assert dispatch.find(x, get_format("mxfp8")) is None
print(fake_quantize(x, "mxfp8").sum().item())
"""
    x = torch.arange(1 << 16, dtype=torch.float32).view(256, 256)
    assert float(run(code)) == fake_quantize(x, "mxfp8").sum().item()


def test_no_compiler_is_needed(tmp_path):
    """An empty PATH and an empty cache are enough: numba itself compiles everything."""
    code = """
import torch
from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.fused import dispatch
x = torch.ones(256, 256)
assert dispatch.find(x, get_format("fp8_e4m3:pow2")) is not None
print(fake_quantize(x, "fp8_e4m3:pow2").sum().item())
"""
    out = run(code, PATH=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert float(out) == 1 << 16
    assert list((tmp_path / "cache").rglob("*.nbi")), "the kernels were not cached"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path):
    not_a_folder = tmp_path / "file"
    not_a_folder.write_text("")
    code = """
import torch
from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.fused import dispatch
x = torch.ones(256, 256)
assert dispatch.find(x, get_format("hifp8")) is not None
print(fake_quantize(x, "hifp8").sum().item())
"""
    assert float(run(code, NUMBA_CACHE_DIR=str(not_a_folder), HOME=str(not_a_folder))) == 1 << 16


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_makes_threads_of_its_own():
    """A data loader's worker is forked from a process whose threads it does not inherit."""
    code = """
import os, torch
from megatron.fake_quant import fake_quantize
torch.set_num_threads(2)
x = torch.randn(512, 512)
expected = fake_quantize(x, "mxfp8")
child = os.fork()
if child == 0:
    found = fake_quantize(x, "mxfp8")
    torch.set_num_threads(1)  # torch's own operations wait for threads that stayed behind
    os._exit(0 if torch.equal(found, expected) else 3)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""
    assert run(code).strip() == "0"
