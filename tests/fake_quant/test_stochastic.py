"""Stochastic rounding, value by value: its random bits, and what they do not depend on."""

import numpy as np
import pytest
import torch

from megatron.fake_quant import dequantize, fake_quantize, get_format, quantize

from . import oracle
from .inputs import (
    assert_same,
    by_definition,
    every_bfloat16,
    every_float16,
    random_bits_at_every_scale,
    rows_at_every_scale,
)
from .oracle_random import random_integers, seed_of
from .oracle_scaled import (
    fake_quantize_hifloat4,
    fake_quantize_nvfp4,
    fake_quantize_per_tensor,
)

MX = ["mxfp8:sr", "mxfp8_e5m2:sr", "mxfp6_e3m2:sr", "mxfp6_e2m3:sr", "mxfp4:sr", "mxint8:sr"]
NAMES = [
    *MX,
    "mxfp4:rceil:sr",
    "mx:e3m4:b16:even:sr",
    "nvfp4:sr",
    "nvfp4:2d:sr",
    "hifp8:sr",
    "hifp8:sr:inf",
    "hifp8:sr:t15",
    "hifp4:sr",
    "fp8_e4m3:sr",
    "fp8_e5m2:sr:pow2",
]
names = pytest.mark.parametrize("name", NAMES)
SEED = 20250101


def stochastic(x: torch.Tensor, name: str, seed: int = SEED, axis: int = -1) -> torch.Tensor:
    return fake_quantize(x, name, axis, generator=torch.Generator().manual_seed(seed))


# Results, compared value by value, with random bits from Philox.


def expected(x: np.ndarray, name: str, random: np.ndarray) -> np.ndarray:
    """Return the result for a float32 matrix with blocks along the last axis."""
    fmt = get_format(name)
    scaling, element = fmt.scaling, fmt.element.name
    if name.startswith("nvfp4"):
        return fake_quantize_nvfp4(x, square=fmt.square, random=random)
    if name.startswith("mx"):
        shape = (-1, scaling.size)
        blocks, bits = x.reshape(shape), random.reshape(shape)
        return oracle.fake_quantize_mx(blocks, element, scaling.rule, bits).reshape(x.shape)
    if name.startswith("hifp4"):
        groups = fake_quantize_hifloat4(x.reshape(-1, 64), random.reshape(-1, 64))
        return groups.reshape(x.shape)
    if scaling is None:
        return oracle.fake_quantize_hifloat8(x, overflow=fmt.element.overflow, random=random)
    return fake_quantize_per_tensor(
        x, element, scaling.target, pow2=scaling.power_of_two, random=random
    )


def moderate(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 2.0**12, x, 1.0).view(-1, 64)


INPUTS = {
    "every bfloat16": lambda: every_bfloat16().view(-1, 64),
    "every float16": lambda: every_float16().view(-1, 64),
    "every small bfloat16": lambda: moderate(every_bfloat16()),
    "bfloat16 over every binade": lambda: random_bits_at_every_scale(64, 1 << 20).bfloat16(),
    "a few rows": lambda: rows_at_every_scale(64)[1200:1203],
}


@names
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_each_value_is_rounded_by_its_own_random_bits(name, make):
    """Values have half precision, whose products with HiFloat4's reciprocals are exact in float32.

    The other formats are exact for float32."""
    x = make()
    if x.dtype == torch.float32 and name == "hifp4:sr":
        x = x.bfloat16()
    random = random_integers(tuple(x.shape), seed_of(SEED))
    with np.errstate(over="ignore"):
        exact = expected(x.float().numpy(), name, random).astype(np.float32)
    wanted = torch.from_numpy(exact).to(x.dtype).float().numpy()
    for found in (stochastic(x, name), by_definition(x, name, seed=seed_of(SEED))):
        assert found.dtype == x.dtype
        assert_same(found.float(), wanted)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "hifp4:sr"])
def test_float32_of_every_kind_is_rounded_by_its_own_random_bits(name):
    """HiFloat4 is excluded, because it truncates products of float32 to 24 bits."""
    x = random_bits_at_every_scale(64, 1 << 20)
    random = random_integers(tuple(x.shape), seed_of(SEED))
    with np.errstate(over="ignore"):
        wanted = expected(x.numpy(), name, random).astype(np.float32)
    assert_same(stochastic(x, name), wanted)


@pytest.mark.parametrize("name", ["mxfp4:sr", "hifp4:sr", "nvfp4:sr", "mxfp8:2d:sr"])
def test_the_bits_belong_to_the_place_in_the_tensor_not_in_the_block(name):
    """Along a different axis, blocks differ, but each value keeps its random number."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(12)).bfloat16().float()
    random = random_integers((64, 128), seed_of(SEED))
    if "2d" in name:
        assert torch.equal(stochastic(x, name, axis=0), stochastic(x, name, axis=1))
    else:
        found = stochastic(x, name, axis=0)
        assert_same(found.t(), expected(x.t().contiguous().numpy(), name, random.T.copy()))


# Properties that users rely on.


@names
def test_a_generator_makes_it_reproducible(name):
    x = torch.randn(8, 640, generator=torch.Generator().manual_seed(13))
    y = stochastic(x, name)
    assert torch.equal(stochastic(x, name), y)
    assert not torch.equal(stochastic(x, name, seed=SEED + 1), y)
    generator = torch.Generator().manual_seed(SEED)
    assert torch.equal(fake_quantize(x, name, generator=generator), y)
    assert not torch.equal(fake_quantize(x, name, generator=generator), y)
    torch.manual_seed(SEED)
    assert torch.equal(fake_quantize(x, name), y)
    assert not torch.equal(y, fake_quantize(x, name.replace(":sr", "")))


@names
@pytest.mark.parametrize("shape", [(96, 128), (512, 256)], ids=["reference", "fused"])
def test_neither_memory_layout_nor_threads_matter(name, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(14))
    for axis in (0, 1):
        y = stochastic(x, name, axis=axis)
        assert torch.equal(stochastic(x.t().contiguous().t(), name, axis=axis), y)
        assert torch.equal(stochastic(torch.stack([x, -x], -1)[..., 0], name, axis=axis), y)
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3 if threads != 3 else 1)
            assert torch.equal(stochastic(x, name, axis=axis), y)
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("name", ["hifp8:sr", "fp8_e4m3:sr", "hifp8:sr:t15"])
def test_without_blocks_the_axis_does_not_matter(name):
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(15))
    assert torch.equal(stochastic(x, name, axis=0), stochastic(x, name, axis=1))


@names
def test_what_the_format_holds_never_moves(name):
    """Numbers that rounding to nearest does not change stay unchanged."""
    x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(16))
    if get_format(name).scaling is None or name.startswith(("mx", "hifp4")):
        rows = fake_quantize(x, name.replace(":sr", ""))
        rows = rows[(fake_quantize(rows, name.replace(":sr", "")) == rows).all(1)]
        if name == "hifp4:sr":  # only scales 2^n: bf16 rounds 1 / 1.25, 1 / 1.5 and 1 / 1.75
            rows = rows[quantize(rows, "hifp4").scales.block()[:, 0, 0] % 4 == 0]
    else:  # a tensor scale of 1
        top = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "hifp8": 15.0, "nvfp4": 2688.0}
        x[:, 0] = top[name.partition(":")[0]]
        rows = fake_quantize(x, name.replace(":sr", ""))
        assert rows[0, 0] == x[0, 0]
    assert len(rows) > 100
    assert len(rows.unique()) > 10
    assert torch.equal(stochastic(rows, name), rows)


@names
def test_codes_are_those_of_the_same_call(name):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(17))
    quantized = quantize(x, name, generator=torch.Generator().manual_seed(SEED))
    assert torch.equal(dequantize(quantized), stochastic(x, name))
