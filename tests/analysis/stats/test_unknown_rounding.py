"""Test that statistics refuse a rounding mode that is declared but not implemented."""

import pytest
import torch

from megatron.analysis.stats.direct import measure_sampled
from megatron.analysis.stats.errors import Errors
from megatron.analysis.stats.format_groups import axes_of
from megatron.analysis.stats.kernels.scalar_quantizer import make_quantizer, number_of_codes
from megatron.analysis.stats.matrix_view import MatrixView
from tests.fake_quant.rounding_modes import NAMES, REFUSAL, declare_mode, in_mode

names = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def _declared(monkeypatch):
    declare_mode(monkeypatch)


@names
def test_the_count_by_class_refuses_it(name):
    with pytest.raises(ValueError, match=REFUSAL):
        make_quantizer(in_mode(name), torch.float32, 1.0)


@names
def test_the_measurement_value_by_value_refuses_it(name):
    fmt = in_mode(name)
    errors = {(fmt.name, axis): Errors(number_of_codes(fmt.element)) for axis in axes_of(fmt)}
    with pytest.raises(ValueError, match=REFUSAL):
        measure_sampled(torch.ones(64, 64), MatrixView((64, 64), 1, 64, 64, 64, 1), fmt, errors)
