"""Test the summary and the text of a dump's statistics."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from megatron.analysis import stats
from megatron.analysis.__main__ import main
from megatron.analysis.outputs.statistics_text import format_statistics
from megatron.analysis.stats.export import summary
from megatron.analysis.stats.measure import measure_dump
from megatron.analysis.store import TensorStore
from tests.analysis.fake_dump import records, write_tensor
from tests.analysis.stats.inputs import record_of, write_shards


def write(folder, *tensors):
    """Write tensors of rows and channels, one per iteration."""
    record = next(r for r, _, _ in records(run_id="r", quant_type="bf16", layers=1))
    folder.mkdir(exist_ok=True)
    for place, x in enumerate(tensors, 1):
        own = dataclasses.replace(
            record,
            counter=place,
            iteration=place,
            shape=list(x.shape),
            global_shape=list(x.shape),
            dims="t h",
            dtype=str(x.dtype).removeprefix("torch."),
        )
        write_tensor(folder, own, x)
    return stats.compute(TensorStore(folder), ["hifp8", "fp8_e4m3"])


def shares(found, name):
    """Return the printed shares of underflow and saturation of a format."""
    line = next(line for line in summary(found).splitlines() if line.split()[:1] == [name])
    return [float(cell.removesuffix("%")) for cell in line.split()[-2:]]


def test_shares_of_all_tensors_are_of_what_they_are_shares_of(tmp_path):
    few, many = torch.zeros(1000, 64), torch.ones(1000, 64)
    few[:10] = 1e-9  # all 640 values that are not zero underflow
    nothing = torch.full((1000, 64), math.nan)
    nothing[0, 0] = 0.0
    found = write(tmp_path, few.bfloat16(), many.bfloat16(), nothing.bfloat16())
    assert found.formats.groupby("quantized_format", observed=True)["nonzero"].sum().tolist() == [
        64640,
        64640,
    ]
    underflow, saturated = shares(found, "hifp8")
    assert underflow == float(f"{100 * 640 / 64640:.3g}")
    assert saturated == 0
    # hifp8 clips 60 of the 64 + 64,000 finite values; NaN do not count
    large = torch.full((1000, 64), math.nan)
    large[0] = 1.0
    large[0, :60] = 1e38
    found = write(tmp_path / "large", large.bfloat16(), many.bfloat16())
    assert shares(found, "hifp8")[1] == float(f"{100 * 60 / 64064:.3g}")


def test_the_summary_shows_the_gain_and_the_causes_of_the_error(tmp_path):
    x, exact = torch.full((64, 64), 50000.0), torch.ones(64, 64)
    x[:, 0], x[:, 1] = 1e-9, 1.0625
    found = write(tmp_path, x.bfloat16(), exact.bfloat16())
    lines = summary(found).splitlines()
    header = next(line for line in lines if "median gain" in line)
    assert "clipping error  underflow error  grid error  underflow  saturated" in header
    line = next(line for line in lines if line.split()[:1] == ["hifp8"]).split()
    gain = found.formats.set_index("quantized_format").loc["hifp8", "gain"].median()
    # all values of 50000 are clipped to 32768; the other errors are less than 1e-6 of this one
    assert line[5:] == [f"{100 * gain:.3g}%", "100%", "<0.0001%", "<0.0001%", "0.781%", "48.4%"]
    worst = next(line for line in lines if line.endswith(".pt")).split()
    assert worst[1:4] == ["100%", "<0.0001%", "<0.0001%"]
    nothing = summary(write(tmp_path / "exact", exact.bfloat16()))
    assert next(line for line in nothing.splitlines() if "hifp8" in line).split()[5:9] == [
        *("0%", "-", "-", "-")
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dead_channels_have_values_and_nothing_but_zeros(tmp_path, dtype):
    x = torch.zeros(8, 64)
    # fewer than half of the channels are not zero, so the median of all would be 0
    x[:, :9] = torch.arange(1, 10)
    x[:, 9] = 1000.0
    x[:, 10], x[3, 11], x[2, 12], x[5, 13] = math.nan, math.nan, -math.inf, -0.0
    x = x.to(dtype)
    found = write(tmp_path / "one", x, torch.zeros(0, 64, dtype=dtype)).tensors
    assert found["channels"].tolist() == [64, 64]
    assert found["dead_channels"].tolist() == [64 - 13, 0]
    assert found["outlier_channels"].tolist() == [1, 0]
    assert found["channel_amax_ratio"][0] == 1000 / 5.5
    # shards along tokens and along channels; the first half of the tokens has no NaN and no Inf
    shards = torch.cat([torch.zeros(8, 64, dtype=dtype), x])
    for dims, axis, parts in (("t[tp] h", 0, 2), ("t h[tp]", 1, 4)):
        folder = tmp_path / dims[:2]
        folder.mkdir()
        write_shards(
            folder,
            record_of("input", dims=dims, dtype=str(dtype).removeprefix("torch.")),
            [part.contiguous() for part in shards.chunk(parts, axis)],
        )
        joined = stats.compute(TensorStore(folder), cache=tmp_path / "cache").tensors.iloc[0]
        again = stats.compute(TensorStore(folder), cache=tmp_path / "cache").tensors.iloc[0]
        for row in (joined, again):
            assert (row["channels"], row["dead_channels"]) == (64, 64 - 13)
            assert row["outlier_channels"] == 1


def test_what_is_left_out_of_tensors_is_said_by_reason(tmp_path, capsys):
    """The reasons are in the last lines of the command, and in the text of the first look."""
    x = torch.ones(4, 2, 8).bfloat16()
    part = {"of": [8, 2, 8], "start": [0, 0, 0], "step": [1, 1, 1]}
    for counter, slice_ in ((1, None), (2, part)):
        rank = {"world": 0, "world_size": 2, "tp": 0, "tp_size": 2}
        record = record_of(
            "input",
            dims="s b h[tp]",
            shape=[4, 2, 8],
            rank=rank,
            counter=counter,
            iteration=counter,
            slice=slice_,
        )
        write_tensor(tmp_path, record, x)
    store = TensorStore(tmp_path)
    missing, sliced = (
        "shards of tp 1 are missing",
        "a slice: formats with block scales are left out",
    )
    assert stats.compute(store, ["mxfp8"]).notes() == {missing: 2, sliced: 1}
    measured = measure_dump(store)
    assert measured.notes() == {missing: 2, sliced: 1}
    expected = ["Notes", f"  2 tensors: {missing}", f"  1 tensor: {sliced}"]
    text = format_statistics(store, measured, [])
    assert main(["stats", str(tmp_path), "--formats", "mxfp8", "--cache", "none"]) == 0
    printed = capsys.readouterr().out
    for lines in (text.splitlines(), printed.splitlines()):
        at = lines.index("Notes")
        assert lines[at : at + 3] == expected
    assert printed.splitlines()[-1] == expected[-1]


def test_shares_of_the_squared_error_are_weighted_by_it(tmp_path):
    """A small tensor with a clipping error does not hide a large tensor with a grid error."""
    small, large = torch.full((4, 64), 50000.0), torch.full((1000, 64), 1.0625)
    found = write(tmp_path, small.bfloat16(), (large * 8192).bfloat16())
    line = next(line for line in summary(found).splitlines() if line.split()[:1] == ["hifp8"])
    clipped = 4 * 64 * (float(torch.tensor(50000.0).bfloat16()) - 32768) ** 2
    grid = 1000 * 64 * (8704 - 8192) ** 2
    assert line.split()[6] == f"{100 * clipped / (clipped + grid):.3g}%"
