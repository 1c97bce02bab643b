"""A rounding mode that is declared but not implemented raises; it is never rounded to nearest."""

import pytest
import torch

from megatron.fake_quant import fake_quantize, quantize, reference
from megatron.fake_quant.fused import dispatch, numba_launch
from megatron.fake_quant.quantize import checked
from megatron.fake_quant.rounding import round_to

from .rounding_modes import MODE, NAMES, REFUSAL, declare_mode, in_mode

names = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _declared(monkeypatch):
    declare_mode(monkeypatch)


@names
@pytest.mark.parametrize("size", [4, 512])  # 512 x 512 is large enough for the fused kernels
def test_fake_quantize_refuses_it(name, size):
    with pytest.raises(ValueError, match=REFUSAL):
        fake_quantize(torch.ones(size, size), in_mode(name))


@names
def test_quantize_refuses_it(name):
    with pytest.raises(ValueError, match=REFUSAL):
        quantize(torch.ones(4, 4), in_mode(name))


@names
def test_the_compiled_operator_refuses_it(name):
    compiled = torch.compile(fake_quantize, backend="eager")
    with pytest.raises(ValueError, match=REFUSAL):
        compiled(torch.ones(4, 4), in_mode(name))


@names
def test_the_reference_refuses_it(name):
    fmt, layout = checked(torch.ones(4, 4), in_mode(name), -1)
    with pytest.raises(ValueError, match=REFUSAL):
        reference.fake_quantize(torch.ones(4, 4), fmt, layout, None)


@names
def test_the_numba_kernels_refuse_it(name):
    x = torch.ones(512, 512)
    fmt, layout = checked(x, in_mode(name), -1)
    assert dispatch.find(x, fmt) is None
    with pytest.raises(ValueError, match=REFUSAL):
        numba_launch.fake_quantize(x, fmt, layout, None)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hifp4"])  # has no GPU kernel
def test_the_triton_kernels_refuse_it(name):
    triton_launch = pytest.importorskip("megatron.fake_quant.fused.triton_launch")
    with pytest.raises(ValueError, match=REFUSAL):
        triton_launch.plan(in_mode(name), (64, 64), 1, torch.float32)


@pytest.mark.parametrize("name", ["mxfp8", "hifp8"])
def test_an_element_type_refuses_it(name):
    with pytest.raises(ValueError, match=rf"element type .* {REFUSAL}, or add the mode"):
        round_to(torch.ones(4), in_mode(name).element, MODE)
