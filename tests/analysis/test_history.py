"""Test that the first tensor that leaves its band is named, on made-up statistics."""

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from megatron.analysis.__main__ import main
from megatron.analysis.bands import ENOUGH, WINDOW, excursions
from megatron.analysis.cli.history_command import nothing_found
from megatron.analysis.history_figure import history_figure
from megatron.analysis.plots.style import in_style
from megatron.analysis.statistics_history import gradients_of
from megatron.collection.run_card import rank_coordinates
from megatron.collection.statistics.history import (
    OPERAND_COLUMNS,
    StatisticsSettings,
    TensorStatistics,
)
from megatron.collection.training_clock import clock

MODULES = [f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(3)]


def made_up(iterations: int = 40, *, seed: int = 1, drift: float = 1.0) -> pd.DataFrame:
    """Return statistics of three modules that fluctuate by 20% and grow by a factor per step."""
    generator = np.random.default_rng(seed)
    rows = [
        {
            "iteration": 10 * step,
            "rank": 0,
            "layer_idx": layer,
            "module": module,
            "operation": "linear",
            "gemm": "fprop",
            "tensor": "input",
            "format": "mxfp4",
            "amax": 8 * drift**step * math.exp(0.2 * generator.standard_normal()),
            "rms": drift**step * math.exp(0.2 * generator.standard_normal()),
            "sqnr_db": 19 + 0.3 * generator.standard_normal(),
        }
        for step in range(1, iterations + 1)
        for layer, module in enumerate(MODULES)
    ]
    return pd.DataFrame(rows)


def changed(table, *, iteration, layer, **values):
    """Return the table with changed numbers of one operand in one iteration."""
    row = (table.iteration == iteration) & (table.layer_idx == layer)
    return table.assign(**{name: table[name].where(~row, x) for name, x in values.items()})


@pytest.mark.parametrize("drift", [1.0, 1.03, 0.97])
@pytest.mark.parametrize("seed", range(2))
def test_noise_and_a_slow_drift_stay_in_the_band(seed, drift):
    assert excursions(made_up(seed=seed, drift=drift)).empty


@pytest.mark.parametrize(
    ("name", "value"), [("amax", 200.0), ("amax", 0.05), ("rms", 30.0), ("sqnr_db", 9.0)]
)
def test_the_first_operand_outside_its_band_comes_first(name, value):
    table = changed(made_up(), iteration=200, layer=1, **{name: value})
    table = changed(table, iteration=200, layer=2, **{name: value})
    table = changed(table, iteration=210, layer=0, **{name: value})
    found = excursions(table)
    places = list(zip(found.iteration, found.layer_idx, found.statistic, strict=True))
    assert places == [(200, 1, name), (200, 2, name), (210, 0, name)]
    row = found.iloc[0]
    assert row.value == value
    assert row.low < 0.9 * row.high
    assert not row.low <= value <= row.high
    assert row.distance > 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_amax_that_is_not_finite_leaves_at_once(value):
    table = changed(made_up(3), iteration=20, layer=2, amax=value, rms=math.nan, sqnr_db=math.nan)
    found = excursions(table)
    assert list(zip(found.iteration, found.layer_idx, found.statistic, strict=True)) == [
        (20, 2, "amax")
    ]
    assert found.distance[0] == math.inf


def test_there_is_no_band_without_history():
    table = changed(made_up(ENOUGH), iteration=10 * ENOUGH, layer=0, amax=1e6)
    assert excursions(table).empty
    zeros = {"amax": 0.0, "rms": 0.0, "sqnr_db": math.inf}
    assert excursions(changed(made_up(), iteration=10 * ENOUGH, layer=0, **zeros)).empty


def test_a_tensor_that_collapses_to_zero_leaves_its_band_once():
    """A tensor that is zero now and then, such as an idle expert's, is reported once."""
    table, zeros = made_up(60), {"amax": 0.0, "rms": 0.0, "sqnr_db": math.inf}
    for iteration in (200, 210, 300, 310 + 10 * WINDOW - 90):
        table = changed(table, iteration=iteration, layer=0, **zeros)
    found = excursions(table)
    assert found.iteration.tolist() == [200, 200]
    assert found.statistic.tolist() == ["amax", "rms"]
    assert (found.value == 0).all()
    assert (found.low > 0).all()
    assert (found.distance == math.inf).all()
    again = excursions(changed(table, iteration=300, layer=0, amax=8.0, rms=1.0, sqnr_db=19.0))
    assert again.iteration.tolist() == [200, 200, 540, 540], "the window holds no zero any more"


def written(folder, table: pd.DataFrame, *, losses: bool = True) -> None:
    """Write statistics as a run does."""
    history = TensorStatistics(
        StatisticsSettings(10, folder / "statistics"), "20260101_000000_aa", rank_coordinates(), 0
    )
    for iteration, rows in table.groupby("iteration"):
        clock.iteration = iteration
        numbers = rows.assign(values=4, nonzero=4, underflow=0.0)[list(OPERAND_COLUMNS)]
        history._write(0, list(numbers.itertuples(index=False, name=None)))
        if losses:
            history.observe(2.0, 1.0)
    assert history.close() is None


def test_the_command_names_the_tensor_and_draws_the_history(tmp_path, capsys):
    table = changed(made_up(), iteration=200, layer=1, amax=200.0)
    written(tmp_path, table)
    assert main(["history", str(tmp_path)]) == 1
    first, figure = capsys.readouterr().out.splitlines()
    assert first.startswith(
        "The first tensor that left its band: input of linear fprop in "
        "decoder.layers.1.mlp.linear_fc1 (mxfp4, rank 0), iteration 200: amax 200, band "
    )
    assert figure == f"The figure is {tmp_path / 'statistics' / 'history.png'}"
    assert (tmp_path / "statistics" / "history.png").read_bytes().startswith(b"\x89PNG")


def test_excursions_before_since_are_left_out(tmp_path, capsys):
    table = changed(made_up(), iteration=200, layer=1, amax=200.0)
    written(tmp_path, changed(table, iteration=310, layer=0, rms=30.0))
    assert main(["history", str(tmp_path), "--since", "201"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    assert "linear_fc1 (mxfp4, rank 0), iteration 310: rms 30, band " in first
    assert main(["history", str(tmp_path), "--since", "311"]) == 0
    assert main(["history", str(tmp_path), "--since", "1000"]) == 2
    assert "the last measured iteration is 400" in capsys.readouterr().err


def test_the_command_says_that_nothing_was_unusual(tmp_path, capsys):
    written(tmp_path, made_up())
    output = tmp_path / "figures" / "a.png"
    assert main(["history", str(tmp_path / "statistics"), "--output", str(output)]) == 0
    assert "No tensor left its band in 40 measured iterations." in capsys.readouterr().out
    assert output.exists()


def test_the_command_says_that_too_few_iterations_were_measured(tmp_path, capsys):
    written(tmp_path, made_up(ENOUGH))
    assert main(["history", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"No tensor left its band in {ENOUGH} measured iterations."
    assert lines[1].startswith("All were searched for values that are not finite only, because")


@pytest.mark.parametrize(
    ("measured", "since", "lines"),
    [
        (range(2, 26, 2), 1, ("in 12 measured iterations.", "The first 8 were searched")),
        (range(2, 26, 2), 10, ("in 8 measured iterations from iteration 10 on.", "The first 4 w")),
        (range(2, 26, 2), 18, ("in 4 measured iterations from iteration 18 on.",)),
        (range(2, 26, 2), 24, ("in 1 measured iteration from iteration 24 on.",)),
        ([7], 1, ("in 1 measured iteration.", "It was searched")),
    ],
)
def test_only_measured_iterations_count(measured, since, lines):
    """Iterations 2, 4, ... are measured; from the ninth on, 8 earlier ones make a band."""
    found = nothing_found([*measured], since)
    assert len(found) == len(lines)
    assert found[0].endswith(lines[0])
    assert all(line.startswith(begin) for line, begin in zip(found[1:], lines[1:], strict=True))


def gradients(sqnr_db) -> pd.DataFrame:
    """Return statistics of a gradient per module, each with its SQNR in all iterations."""
    table = made_up(4).assign(tensor="grad_output", gemm="wgrad")
    return table.assign(sqnr_db=[sqnr_db[layer] for layer in table.layer_idx])


def test_gradients_below_the_threshold_are_named(tmp_path, capsys):
    """An SQNR of 10 log10(3) dB is a ratio of sqrt(3), which is the threshold."""
    limit = 10 * math.log10(3)
    written(tmp_path, gradients([limit + 0.001, limit - 0.001, 0.0]))
    assert main(["history", str(tmp_path), "--most", "1"]) == 0, "only bands set the status"
    lines = capsys.readouterr().out.splitlines()
    assert "2 of 3 gradients are too noisy (ratio to noise < sqrt(3)):" in lines
    worst = "decoder.layers.2.mlp.linear_fc1 (mxfp4, rank 0): ratio 1, in 4 of 4 iterations"
    assert f"  grad_output of linear wgrad in {worst}" in lines
    assert "  and 1 more" in lines


def test_gradients_above_the_threshold_are_counted(tmp_path, capsys):
    table = gradients([math.inf, 5.0, math.nan])
    written(tmp_path, table)
    assert main(["history", str(tmp_path)]) == 0
    assert "No gradient is too noisy: in all 2, the rms is at least" in capsys.readouterr().out
    assert gradients_of(made_up(2)).empty, "an input is no gradient"


def test_an_output_that_is_no_png_or_cannot_be_written_is_refused(tmp_path, capsys):
    written(tmp_path, made_up(2))
    assert main(["history", str(tmp_path), "--output", str(tmp_path / "history.svg")]) == 2
    assert "history.svg: the name must end in .png" in capsys.readouterr().err
    (tmp_path / "folder.png").mkdir()
    assert main(["history", str(tmp_path), "--output", str(tmp_path / "folder.png")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_folder_without_statistics_is_refused(tmp_path, capsys):
    assert main(["history", str(tmp_path)]) == 2
    assert "holds no operands_*.parquet; give the folder" in capsys.readouterr().err


def test_a_trainer_that_reports_no_losses_has_a_history(tmp_path, capsys):
    table = changed(made_up(), iteration=200, layer=1, amax=200.0)
    written(tmp_path, table, losses=False)
    assert main(["history", str(tmp_path)]) == 1
    assert "iteration 200: amax 200, band " in capsys.readouterr().out
    assert (tmp_path / "statistics" / "history.png").read_bytes().startswith(b"\x89PNG")
    assert main(["history", str(tmp_path), "--since", "210"]) == 0
    text = capsys.readouterr().out
    assert "No tensor left its band in 20 measured iterations from iteration 210 on." in text
    assert main(["history", str(tmp_path), "--since", "401"]) == 2
    assert "the last measured iteration is 400" in capsys.readouterr().err


def history_of(table, losses=None) -> Figure:
    found, gradients = excursions(table), gradients_of(table)
    with in_style():
        figure = history_figure(losses, found, gradients, table.iteration.unique())
        figure.draw_without_rendering()
    return figure


def test_the_figure_shows_all_iterations_and_what_is_not_finite():
    """Without losses, the axis would show a single excursion alone, in fractions of iterations."""
    table = changed(made_up(), iteration=200, layer=1, amax=200.0)
    (bars,) = history_of(table.assign(module="a.$experts_1$")).axes
    low, high = bars.get_xlim()
    assert low < 10 < 400 < high
    assert all(tick == int(tick) for tick in bars.get_xticks())
    assert bars.collections[0].get_linewidth() >= 3, "visible, whatever the number of iterations"
    losses = pd.DataFrame({"iteration": [1, 2, 3], "loss": [2.0, math.nan, math.inf]})
    figure = history_of(made_up(1), losses.assign(grad_norm=None))
    loss, norm, bars = figure.axes
    assert [list(line.get_xdata()) for line in loss.get_lines()] == [[1, 2, 3], [2, 3]]
    assert loss.get_title(loc="right") == "✕ NaN, infinite or not reported"
    assert [text.get_text() for ax in (norm, bars) for text in ax.texts] == ["not reported", "none"]
    ratios = history_of(gradients([math.inf, math.inf, math.inf])).axes[1]
    assert list(ratios.get_lines()[1].get_xdata()) == [10, 20, 30, 40]
    assert ratios.get_title(loc="right").startswith("▴ no error; dashed: √3")


def test_losses_without_statistics_are_named_so(tmp_path, capsys):
    written(tmp_path, made_up(1))
    for path in (tmp_path / "statistics").glob("operands_*"):
        path.unlink()
    assert main(["history", str(tmp_path)]) == 2
    assert "holds losses and no statistics" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["iterations_mine.parquet", "operands_mine.parquet"])
@pytest.mark.parametrize("content", ["foreign", "damaged"])
def test_a_file_of_another_program_is_named(tmp_path, capsys, name, content):
    written(tmp_path, made_up(2))
    path = tmp_path / "statistics" / name
    if content == "foreign":
        pd.DataFrame({"iteration": [1], "loss": [2.0]}).to_parquet(path)
    else:
        path.write_bytes(b"PAR1")
    assert main(["history", str(tmp_path)]) == 2
    assert f"[ERROR] {path} is damaged or was not written by --tensor-" in capsys.readouterr().err
