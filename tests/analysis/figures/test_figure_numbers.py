"""Tests of the numbers that figures compute themselves, against naive computations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from megatron.analysis.figures.attention_maps import entropy, head_errors
from megatron.analysis.figures.distributions import density, magnitude_quantiles, share_beyond
from megatron.analysis.figures.figure_data import FigureData
from megatron.analysis.figures.hifp8_analysis import (
    REGIONS,
    by_region,
    error_by_region,
    region_shares,
    regions,
)
from megatron.analysis.figures.overflow_analysis import CAUSES, cause_shares, error_causes
from megatron.analysis.figures.scale_maps import scale_map
from megatron.analysis.plots.style import power
from megatron.analysis.stats import compute
from megatron.analysis.store import TensorStore
from megatron.fake_quant import fake_quantize, quantize
from tests.analysis.fake_dump import records, write_dump, write_tensor


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4"])
def test_a_scale_map_has_the_stored_scales(name):
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    x[3, :32] = 0
    found = scale_map(x, name)
    size = 16 if name == "nvfp4" else 32
    stored = quantize(x, name, axis=-1).scales.blocks
    exponents = (
        stored.view(torch.float8_e4m3fn).double().log2()
        if name == "nvfp4"
        else stored.double() - 127
    )
    expected = exponents.numpy().copy()
    expected[3, : 32 // size] = np.nan
    np.testing.assert_array_equal(found.to_numpy(), expected)
    assert found.columns.tolist() == list(range(0, 96, size))


def test_a_scale_map_of_a_large_tensor_has_evenly_spaced_rows_with_the_whole_tensors_scale():
    x = torch.ones(100, 64)
    x[99, 63] = 1000.0  # in a row that is not sampled
    found = scale_map(x, "nvfp4", rows=30)
    assert found.index.tolist() == list(range(0, 100, 4))
    whole = quantize(x, "nvfp4", axis=-1).scales.blocks.view(torch.float8_e4m3fn).double().log2()
    np.testing.assert_array_equal(found.to_numpy(), whole.numpy()[::4])


def test_regions_of_hifloat8_add_up_and_agree_with_its_spacing():
    for name, bits in (("3 bits, 2⁻³…2³", 3), ("2 bits, 2⁴…2⁷", 2), ("1 bit, 2⁸…2¹⁵", 1)):
        first, last = REGIONS[name][1]
        assert name.partition(", ")[2] == f"{power(2, first)}…{power(2, last)}"
        step = 2.0 ** (first - bits)
        x = torch.tensor([2.0**first + step, 2.0**first + step / 4])
        assert fake_quantize(x, "hifp8").tolist() == [2.0**first + step, 2.0**first]


def test_regions_tell_what_is_lost_and_what_saturates_as_it_was_counted(tmp_path):
    record, shape, _ = next(records(run_id="r", quant_type="hifp8", layers=1))
    x = torch.full(shape, 1.0, dtype=torch.bfloat16).flatten()
    x[:6] = torch.tensor([2.0**15, 50000.0, -1e6, 2.0**-23, 2.0**-24, 0.0])
    write_tensor(tmp_path, record, x.reshape(shape))
    store = TensorStore(tmp_path)
    found = FigureData(store, compute(store, ["hifp8"]), ("hifp8",)).summed("hifp8")
    table = by_region(found, "hifp8").set_index("region")
    y = fake_quantize(x, "hifp8")
    assert y[:6].tolist() == [2.0**15, 2.0**15, -(2.0**15), 2.0**-22, 0.0, 0.0]
    assert table["values"].loc["saturated (from 1.25 · 2¹⁵)"] == 2
    assert table["values"].loc["1 bit, 2⁸…2¹⁵"] == 1
    assert table["values"].loc["lost (becomes zero)"] == 1
    assert table["values"].loc["denormal: powers of two"] == 1
    assert table["values"].sum() == x.numel() - 1  # without the zero
    assert table["error"].loc["1 bit, 2⁸…2¹⁵"] == 0
    squared = (y.double() - x.double()).square()
    assert table["error"].loc["saturated (from 1.25 · 2¹⁵)"] == pytest.approx(
        squared[1:3].sum().item()
    )
    assert region_shares(found, "hifp8")[["values", "error"]].sum().tolist() == pytest.approx(
        [1.0, 1.0]
    )


@pytest.mark.parametrize("large", [0.0, 0.25, 1.0])
def test_values_that_become_inf_are_a_region_and_all_regions_add_up(tmp_path, large):
    record, shape, _ = next(records(run_id="r", quant_type="bf16", layers=1))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).flatten()
    x = torch.where(x == 0, 1.0, x)
    count = int(large * x.numel())
    x[:count] = 2.0**17
    if large < 1:
        # 40960 is the smallest magnitude that becomes Inf; the bfloat16 below it becomes 2^15
        x[count : count + 4] = torch.tensor([-40960.0, 40704.0, 0.0, 2.0**-26])
        x[count + 4] = torch.inf  # is not a finite value
    x = x.bfloat16()
    write_tensor(tmp_path, record, x.reshape(shape))
    store = TensorStore(tmp_path)
    figure_data = FigureData(store, compute(store, ["hifp8:inf"]), ("hifp8:inf",))
    found = figure_data.summed("hifp8:inf")
    table = by_region(found, "hifp8:inf").set_index("region")
    assert "saturated (from 1.25 · 2¹⁵)" not in table.index
    values = table["values"]
    assert values.min() >= 0
    assert values.loc["becomes Inf (from 1.25 · 2¹⁵)"] == count + (large < 1)
    assert values.loc["1 bit, 2⁸…2¹⁵"] == (large < 1)
    assert values.loc["lost (becomes zero)"] == (large < 1)
    assert values.sum() == int((x.isfinite() & (x != 0)).sum())
    assert table["error"].loc["becomes Inf (from 1.25 · 2¹⁵)"] == 0
    shares = region_shares(found, "hifp8:inf")["values"]
    assert shares.min() >= 0
    assert shares.sum() == pytest.approx(1)
    for figure in (regions(figure_data, "hifp8:inf"), error_by_region(figure_data, "hifp8:inf")):
        texts = [t.get_text() for t in figure.findobj(Text)]
        assert "becomes Inf (from 1.25 · 2¹⁵)" in texts
        assert "saturated (from 1.25 · 2¹⁵)" not in texts


def test_quantiles_of_counted_patterns_are_those_of_the_values():
    x = torch.randn(20001, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    patterns = np.bincount(x.view(torch.int16).int().numpy() & 0xFFFF, minlength=1 << 16)
    found = magnitude_quantiles(patterns)
    magnitudes = np.sort(x.float().abs().numpy())
    assert found["p50"] == magnitudes[10000]
    assert found["largest"] == magnitudes[-1]


def test_a_histogram_says_how_many_values_it_leaves_out():
    x = torch.randn(20001, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[:20] *= 100
    patterns = np.bincount(x.view(torch.int16).int().numpy() & 0xFFFF, minlength=1 << 16)
    values = x.double().numpy()
    beyond = float((np.abs(values) > 12 * values.std()).mean())
    assert 0 < share_beyond(patterns) == pytest.approx(beyond)
    data = density(patterns)
    shown = float((data["density"] * (data["right"] - data["left"])).sum())
    assert shown == pytest.approx(1 - beyond)


def test_heads_have_the_error_of_their_own_probabilities():
    probs = torch.rand(2, 3, 8, 64, generator=torch.Generator().manual_seed(0))
    found = head_errors(probs, "nvfp4")
    whole = fake_quantize(probs, "nvfp4", axis=-1)  # with one scale for the tensor
    for head, sqnr in enumerate(found):
        x = probs[:, head]
        error = (whole[:, head].double() - x.double()).square().sum()
        assert sqnr == pytest.approx(float(10 * torch.log10(x.double().square().sum() / error)))
    assert entropy(torch.full((4, 8), 1 / 8)) == pytest.approx(3.0)
    assert entropy(torch.eye(4)) == 0.0


def test_each_bar_of_the_causes_is_the_mean_of_its_tensors_and_adds_up_to_one(tmp_path):
    write_dump(tmp_path, run_id="r", layers=2)
    store = TensorStore(tmp_path)
    formats = ("mxfp4", "bf16", "hifp8")
    data = FigureData(store, compute(store, formats), formats)
    figure = error_causes(data)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert [title.split(",")[0] for title in titles] == ["mxfp4", "hifp8"]  # bf16 has no error
    own = data.judged[data.judged["quantized_format"] == "mxfp4"]
    places = data.judged_places()
    table = cause_shares(own, places).pivot(index="name", columns="part", values="share")
    np.testing.assert_allclose(table.sum(axis=1), 1)
    for place in places:
        expected = own.loc[own["place"] == place, "clipping_error"].mean()
        assert table.loc[place, "clipping"] == pytest.approx(expected)
    widths = [patch.get_width() for patch in figure.axes[0].patches]
    assert len(widths) == len(places) * len(CAUSES)
    assert sum(widths) == pytest.approx(len(places))
