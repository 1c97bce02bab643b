"""The formats bf16 and fp16, which are casts of torch."""

import ml_dtypes
import numpy as np
import pytest
import torch

from megatron.fake_quant import fake_quantize

from .inputs import assert_same, every_bfloat16, every_float16, random_bit_patterns


@pytest.mark.parametrize(
    ("name", "x", "expected"),
    [
        ("bf16", 1 + 2**-8, 1.0),  # half-way from 1 to 1 + 2^-7, to even
        ("bf16", 1 + 3 * 2**-8, 1 + 2**-6),
        ("bf16", 3.4e38, torch.inf),  # above the overflow threshold, 2^128 - 2^119
        ("bf16", 2**-134, 0.0),  # half of the smallest subnormal
        ("bf16", 3 * 2**-134, 2**-132),
        ("fp16", 1 + 2**-11, 1.0),
        ("fp16", 65519.0, 65504.0),
        ("fp16", 65520.0, torch.inf),
        ("fp16", 2**-25, 0.0),
        ("fp16", 3 * 2**-25, 2**-23),
    ],
)
def test_named_casts(name, x, expected):
    assert fake_quantize(torch.tensor([x, -x]), name).tolist() == [expected, -expected]


@pytest.mark.parametrize(
    ("name", "numpy_type"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)]
)
def test_casts_match_numpy(name, numpy_type):
    x = torch.cat([random_bit_patterns(1 << 22), every_bfloat16().float(), every_float16().float()])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.numpy().astype(numpy_type).astype(np.float32)
    assert_same(fake_quantize(x, name), expected)


def test_a_cast_to_the_own_type_changes_nothing_but_nan():
    """All formats, casts included, return one NaN; torch's casts return several."""
    for name, x in (("bf16", every_bfloat16()), ("fp16", every_float16())):
        one_nan = x.masked_fill(x.isnan(), torch.nan)
        assert torch.equal(fake_quantize(x, name).view(torch.int16), one_nan.view(torch.int16))


def test_a_cast_is_rounded_to_the_dtype_of_the_tensor():
    assert fake_quantize(torch.tensor([65504.0], dtype=torch.float16), "bf16").tolist() == [
        torch.inf
    ]
    assert fake_quantize(torch.tensor([65536.0], dtype=torch.bfloat16), "fp16").tolist() == [
        torch.inf
    ]
