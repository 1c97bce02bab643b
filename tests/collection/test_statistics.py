"""Test the statistics of operands: their numbers, and files that survive a kill and a resume."""

import math
from contextlib import nullcontext

import pandas as pd
import pytest
import torch

from megatron.analysis.statistics_history import read_iterations, read_statistics
from megatron.collection import session, session_end
from megatron.collection.run_card import rank_coordinates
from megatron.collection.statistics import history, measure, parquet_files
from megatron.collection.statistics.history import StatisticsSettings, TensorStatistics
from megatron.collection.statistics.measure import Sums, joined, statistics
from megatron.collection.training_clock import clock
from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.matmul.operand import Operand


def measured(x, quantized=None):
    """Return the statistics of a tensor and, if given, of its quantized values."""
    sums = Sums(x.numel(), *measure.measure(x, quantized).tolist())
    return statistics(sums, quantized=quantized is not None)


@pytest.mark.parametrize("part", [1, 7, 1 << 24, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_statistics_are_those_of_the_definition(monkeypatch, part, dtype):
    """Test the CPU kernel (None), and torch's operations on parts of several sizes."""
    if part is not None:
        monkeypatch.setattr(measure, "PART", part)
        monkeypatch.setattr(measure, "KERNEL_DTYPES", ())
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[2, :5] = 0
    x[3, 0] = 30  # the small values of its block become zero
    quantized = fake_quantize(x, get_format("mxfp4"), axis=-1)
    wide, error = x.double(), x.double() - quantized.double()
    result = measured(x, quantized)
    assert (result.values, result.nonzero) == (384, int((x != 0).sum()))
    assert result.amax == 30
    assert result.rms == pytest.approx(float(wide.square().mean().sqrt()), rel=1e-12)
    ratio = float(wide.square().sum() / error.square().sum())
    assert result.sqnr_db == pytest.approx(10 * math.log10(ratio), abs=1e-9)
    lost = int(((x != 0) & (quantized == 0)).sum())
    assert lost > 5
    assert result.underflow == lost / result.nonzero
    assert measured(x)[4:] == (None, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_and_torch_agree_in_every_memory_order(monkeypatch, dtype):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 70, 96, generator=generator).to(dtype)
    for axes in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
        view = x.permute(axes)
        quantized = fake_quantize(view, get_format("mxfp4"), axis=-1)
        for other in (quantized, quantized.contiguous(), None):
            by_kernel = measure.measure(view, other)
            with monkeypatch.context() as patch:
                patch.setattr(measure, "KERNEL_DTYPES", ())
                by_torch = measure.measure(view, other)
            torch.testing.assert_close(by_kernel, by_torch, rtol=1e-12, atol=0)
    gaps = x[:, ::2, 1:]
    assert measured(gaps, gaps) == pytest.approx(measured(gaps.contiguous(), gaps.contiguous()))


@pytest.mark.parametrize("kernel", [True, False])
def test_corner_cases_have_values(monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(measure, "KERNEL_DTYPES", ())
    zeros = torch.zeros(2, 32)
    assert measured(zeros, zeros) == (64, 0, 0.0, 0.0, math.inf, 0.0)
    ones = torch.ones(2, 32)
    assert measured(ones, ones) == (64, 64, 1.0, 1.0, math.inf, 0.0)
    broken = ones.clone()
    broken[0, 0] = math.nan
    result = measured(broken, fake_quantize(broken, get_format("mxfp8"), axis=-1))
    assert all(map(math.isnan, (result.amax, result.rms, result.sqnr_db)))
    broken[0, 0] = math.inf
    assert measured(broken).amax == math.inf


@pytest.mark.parametrize("kernel", [True, False])
def test_zeros_that_a_nan_poisons_are_no_negative_underflow(monkeypatch, kernel):
    if not kernel:
        monkeypatch.setattr(measure, "KERNEL_DTYPES", ())
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 0], x[1, 1] = math.nan, 30, 0.01
    quantized = fake_quantize(x, get_format("mxfp4"), axis=-1)
    assert quantized[0].isnan().all(), "the whole block becomes NaN"
    result = measured(x, quantized)
    assert result.nonzero == 3
    assert result.underflow == 1 / 3


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-22, 1e25, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", [True, False])
def test_squares_beyond_the_range_of_float32(monkeypatch, scale, dtype, kernel):
    if not kernel:
        monkeypatch.setattr(measure, "KERNEL_DTYPES", ())
    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(4)) * scale).to(dtype)
    quantized = fake_quantize(x, get_format("mxfp8"), axis=-1)
    wide, error = x.double(), x.double() - quantized.double()
    result = measured(x, quantized)
    assert result.rms == pytest.approx(float(wide.square().mean().sqrt()), rel=1e-12)
    ratio = float(wide.square().sum() / error.square().sum())
    assert result.sqnr_db == pytest.approx(10 * math.log10(ratio), abs=1e-9)


def test_shards_are_joined_as_if_they_were_one_tensor():
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    quantized = fake_quantize(x, get_format("mxfp4"), axis=-1)
    halves = [
        Sums(part.numel(), *measure.measure(part, other).tolist())
        for part, other in zip(x.split(4), quantized.split(4), strict=True)
    ]
    whole, of_halves = measured(x, quantized), statistics(joined(halves), quantized=True)
    assert of_halves == pytest.approx(whole, rel=1e-6)
    broken = halves[0]._replace(amax=math.nan)
    assert math.isnan(joined([halves[1], broken]).amax)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that starts the statistics of a run."""
    monkeypatch.setattr(clock, "micro_batch", None)

    def begin(run="20260101_000000_aa", iteration=0, every=1):
        settings = StatisticsSettings(every, tmp_path / "statistics")
        return TensorStatistics(settings, run, rank_coordinates(), iteration)

    return begin


def train(statistics: TensorStatistics, iterations, value: float = 1.0):
    """Measure two operands in each iteration, and record a loss."""
    for clock.iteration in iterations:
        x = torch.full((2, 32), value)
        where = (3, "decoder.layers.3.mlp.linear_fc1")
        operand = Operand(get_format("mxfp8"))
        statistics.add_tensor(where, "linear", "weight", x)
        statistics.add_operand(
            *(where, "linear", "wgrad_c", x, operand), axis=-1, seed=None, amax=None
        )
        statistics.end_iteration()
        statistics.observe(2.0, None)


def test_a_row_has_the_place_of_its_operand(start):
    statistics = start()
    train(statistics, [7])
    assert statistics.close() is None
    table = read_statistics(statistics.settings.folder)
    assert list(table) == list(history.OPERAND_COLUMNS)
    of_weight, of_gradient = (row._asdict() for row in table.itertuples(index=False))
    place = {"iteration": 7, "rank": 0, "layer_idx": 3}
    place["module"] = "decoder.layers.3.mlp.linear_fc1"
    place["operation"] = "linear"
    expected = place | {"gemm": "wgrad", "tensor": "grad_output", "format": "mxfp8"}
    assert {name: of_gradient[name] for name in expected} == expected
    assert of_gradient["sqnr_db"] == math.inf
    expected = place | {"gemm": "all", "tensor": "weight", "format": "none"}
    assert {name: of_weight[name] for name in expected} == expected
    assert pd.isna(of_weight["sqnr_db"])
    losses = read_iterations(statistics.settings.folder)
    assert losses.iteration.tolist() == [7]
    assert losses.loss.tolist() == [2.0]
    assert pd.isna(losses.grad_norm[0])


def test_a_killed_run_loses_only_the_rows_in_memory(start, monkeypatch):
    monkeypatch.setattr(parquet_files, "ROWS", 4)
    statistics = start()
    train(statistics, range(1, 6))  # no `close`: rows of iteration 5 are in memory
    folder = statistics.settings.folder
    (folder / "operands_20260101_000000_aa_00000_000003.parquet.partial").write_bytes(b"PAR1")
    assert sorted(set(read_statistics(folder).iteration)) == [1, 2, 3, 4]


def test_old_rows_are_written_even_if_there_are_few(start, monkeypatch):
    monkeypatch.setattr(parquet_files, "SECONDS", 0.0)
    statistics = start()
    train(statistics, [1])
    assert len(read_statistics(statistics.settings.folder)) == 2


def test_a_resumed_run_replaces_the_iterations_that_it_repeats(start):
    first, second = start(), start("20260102_000000_bb", iteration=3)
    train(first, range(1, 6))
    first.close()
    train(second, range(4, 8), value=2.0)
    second.close()
    third = start("20260103_000000_cc", iteration=2)
    train(third, [3], value=4.0)
    third.flush()
    table = read_statistics(third.settings.folder)
    amaxes = table[table.gemm == "all"].set_index("iteration").amax.to_dict()
    assert amaxes == {1: 1.0, 2: 1.0, 3: 4.0}
    third.close()


def test_a_full_disk_ends_the_statistics_and_not_training(start, monkeypatch, caplog):
    statistics = start()
    train(statistics, [1])

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    statistics.flush()
    train(statistics, [2])
    assert "No space left on device" in statistics.close()
    assert caplog.text.count("training continues without statistics") == 1
    assert list(statistics.settings.folder.iterdir()) == []


def test_a_folder_without_statistics_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no operands_\*.parquet; give the folder"):
        read_statistics(tmp_path)


def test_a_number_of_iterations_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="--tensor-statistics is 0; give 1 or more"):
        StatisticsSettings.parse(tensor_statistics=0)
    assert StatisticsSettings.parse() is None


@pytest.mark.parametrize(
    ("every", "done", "train_iters", "measures"),
    [
        (10, 0, 9, False),
        (10, 0, 10, True),
        (10, 12, 19, False),
        (10, 12, 20, True),
        (10, 20, 29, False),
        (10, 19, 20, True),
        (10, 20, 20, True),  # nothing is left to train
        (10, 12, None, True),
    ],
)
def test_a_run_that_would_measure_nothing_is_refused(tmp_path, every, done, train_iters, measures):
    """Test `session.configure`, which gets the iteration of a resumed run."""
    flags = {"save_dir": str(tmp_path), "tensor_statistics": every}
    message = f"--tensor-statistics {every} measures none of the iterations"
    expected = nullcontext() if measures else pytest.raises(ValueError, match=message)
    with expected:
        session.configure({"train_iters": train_iters}, iteration=done, **flags)
    session_end.close()
