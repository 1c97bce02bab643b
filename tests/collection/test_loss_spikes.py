"""Test the rule that finds loss spikes, on recorded runs and generated curves."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest

from megatron.collection.loss_spikes import (
    ENOUGH,
    GRAD_NORM,
    LOSS,
    WINDOW,
    Jumps,
    LossSpikeDetector,
    checked_levels,
)

DATA = Path(__file__).parents[1] / "data" / "loss_curves.npz"
RESULTS = Path(__file__).parents[2] / "docs" / "results"
CURVES = {name: curve.tolist() for name, curve in np.load(DATA).items()}
ORDINARY = [name for name in CURVES if name.startswith("ordinary/")]
PLANTED = [name for name in CURVES if name.startswith("planted/")]


def iterations_found(curve, anomalies: LossSpikeDetector | None = None) -> list[int]:
    """Return the iterations, counted from 1, at which something unusual begins."""
    anomalies = anomalies or LossSpikeDetector(Jumps())
    pairs = [(x, None) if isinstance(x, float) else x for x in curve]
    return [i for i, pair in enumerate(pairs, 1) if anomalies.look(i, *pair)]


@pytest.mark.parametrize("name", ORDINARY)
def test_no_ordinary_run_is_unusual(name):
    assert len(ORDINARY) >= 40
    assert iterations_found(CURVES[name]) == []


@pytest.mark.parametrize("file", ["loss_curves.csv", "loss_curves_wikitext.csv"])
def test_no_published_run_is_unusual(file):
    rows = list(csv.reader((RESULTS / file).read_text().splitlines()))
    for column in range(1, len(rows[0])):
        assert iterations_found([float(row[column]) for row in rows[3:] if row[column]]) == []


@pytest.mark.parametrize("name", PLANTED)
def test_every_planted_divergence_is_found_at_its_jump(name):
    """A planted weight or batch shows in its iteration, and a learning rate one iteration later.

    A learning rate of 0.1 takes up to seven iterations to raise the loss by more than its noise.
    """
    kind, planted, *mild = name.removeprefix("planted/").split("_")
    first = int(planted) + (kind == "lr")
    found = iterations_found(CURVES[name])
    assert first <= found[0] <= first + (6 if mild else 0)


def test_there_are_twenty_planted_divergences_from_iteration_2_to_200():
    iterations = [int(name.split("_")[1]) for name in PLANTED]
    assert (len(iterations), min(iterations), max(iterations)) == (20, 2, 200)


@pytest.mark.parametrize("factor", [1.4, 3.0, 50.0])
@pytest.mark.parametrize("iteration", [9, 10, 20, 50, 100])
def test_a_jump_is_found_in_every_ordinary_run(iteration, factor):
    for name in ORDINARY:
        losses = [loss for loss, _ in CURVES[name]]
        around = losses[iteration - 6 : iteration - 1]
        losses[iteration - 1] = factor * max(around)
        found = iterations_found(losses)
        assert found == [iteration], name


@pytest.mark.parametrize("seed", range(20))
def test_no_made_up_curve_is_unusual(seed):
    """A steep, noisy fall to a loss near zero or far below zero raises no alarm."""
    generator = np.random.default_rng(seed)
    steps = np.arange(400)
    for floor, noise in ((3.0, 0.1), (1.0, 0.1), (0.05, 0.02), (-5.0, 0.2)):
        curve = floor + (11 - floor) * np.exp(-steps / (2 + 3 * seed))
        curve += noise * generator.standard_normal(400)
        assert iterations_found(curve.tolist()) == [], (floor, noise)
    norms = 2 * np.exp(0.5 * generator.standard_normal(400))
    assert iterations_found(list(zip(curve.tolist(), norms.tolist(), strict=True))) == []


def test_the_run_of_the_fault_is_found_at_its_first_jump():
    assert iterations_found([7.7, 7.6, 411.0, 3145.0, 2000.0, 900.0]) == [3]


@pytest.mark.parametrize(
    ("before", "enough"), [(1, 3.0), (2, 2.0), (4, 1.5), (ENOUGH, 1.25), (WINDOW, 1.25)]
)
def test_the_factor_falls_with_the_history(before, enough):
    usual = [2.0] * before
    assert iterations_found([*usual, 2 * enough + 0.01]) == [before + 1]
    assert iterations_found([*usual, 2 * enough - 0.01]) == []


def test_what_is_unusual_does_not_enter_the_medians():
    anomalies = LossSpikeDetector(Jumps())
    spikes = [50.0, math.inf, 9.0, math.nan] * 7
    assert iterations_found([2.0] * 3 + spikes, anomalies) == [4]
    assert anomalies.levels[LOSS] == [2.0] * 3
    assert iterations_found([2.0, 3.9], anomalies) == [2]


def test_a_level_that_stays_is_the_new_normal_after_32_iterations():
    anomalies = LossSpikeDetector(Jumps())
    assert iterations_found([2.0] * 10 + [4.0] * (WINDOW - 1), anomalies) == [11]
    assert anomalies.levels[LOSS] == [2.0] * 10
    assert iterations_found([4.0, 4.0, 4.9], anomalies) == []
    assert iterations_found([6.0], anomalies) == [1]


def test_a_level_that_falls_is_followed_in_three_iterations():
    assert iterations_found([8.0] * 40 + [2.0] * 3 + [4.0]) == [44]


def test_a_slow_rise_is_found():
    rising = [2.0 * 1.03**step for step in range(30)]
    found = iterations_found([2.0] * 32 + rising)
    assert found
    assert found[0] <= 32 + 12, "by then the loss has risen by a third"


def test_noise_is_no_jump_and_a_larger_jump_is_one():
    noisy = [1.0, 1.5] * 16
    assert iterations_found([*noisy, 2.5]) == []
    assert iterations_found([*noisy, 4.2]) == [33]


def test_negative_losses_are_measured_by_their_magnitude():
    assert iterations_found([-4.0] * 10 + [-3.1, -2.9]) == [12]
    assert iterations_found([-4.0] * 10 + [5.0]) == [11]


def test_a_zero_is_neither_judged_nor_learned():
    anomalies = LossSpikeDetector(Jumps())
    assert iterations_found([0.0, 2.0] * 20, anomalies) == []
    assert set(anomalies.levels[LOSS]) == {2.0}
    assert iterations_found([0.0, 3.0], anomalies) == [2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_found_at_once(value):
    assert iterations_found([value]) == [1]
    assert iterations_found([2.0] * 50 + [value] * 3 + [2.0, value]) == [51, 55]


def test_a_run_that_is_resumed_judges_its_first_iteration():
    before = LossSpikeDetector(Jumps())
    iterations_found([(2.0, 1.0)] * 20, before)
    resumed = LossSpikeDetector(Jumps(), checked_levels(before.levels))
    assert iterations_found([(2.6, 1.0)], resumed) == [1]
    assert iterations_found([(2.4, 101.0)], LossSpikeDetector(Jumps(), before.levels)) == [1]
    assert iterations_found([(2.4, 99.0)], LossSpikeDetector(Jumps(), before.levels)) == []


def test_a_resumed_run_goes_on_with_the_spike_and_its_count():
    curve = [2.0] * 10 + [4.0] * (WINDOW + 1) + [5.1]
    whole = LossSpikeDetector(Jumps())
    expected = [(whole.look(0, loss, 1.0), whole.levels) for loss in curve]
    assert [iteration for iteration, (why, _) in enumerate(expected, 1) if why] == [11, 44]
    levels = {}
    for loss, result in zip(curve, expected, strict=True):  # a checkpoint after each iteration
        resumed = LossSpikeDetector(Jumps(), checked_levels(levels))
        assert (resumed.look(0, loss, 1.0), resumed.levels) == result
        levels = resumed.levels


def test_a_resumed_run_goes_on_with_values_that_are_not_finite():
    before = LossSpikeDetector(Jumps())
    assert iterations_found([2.0, math.nan], before) == [2]
    resumed = LossSpikeDetector(Jumps(), checked_levels(before.levels))
    assert iterations_found([math.nan, 2.0, math.nan], resumed) == [3]


@pytest.mark.parametrize("first", [[7.6], [7.6, 7.5], [7.7, 7.4, 7.2]])
def test_a_loss_worse_than_uniform_guesses_is_found_from_the_second_iteration_on(first):
    """The limit is 1.125 times ln(2048) = 7.62 or a higher first loss: 8.58, or 8.66 for 7.7."""
    jumps = Jumps(vocabulary=2048)
    assert iterations_found([*first, 8.7], LossSpikeDetector(jumps)) == [len(first) + 1]
    assert iterations_found([*first, 8.5], LossSpikeDetector(jumps)) == []
    assert iterations_found([*first, 8.7]) == []


def test_a_noisy_start_below_uniform_guesses_is_normal():
    """Losses of a trained model on single sequences differ by more than the factor."""
    losses = [2.0, 3.9, 1.3, 3.2, 2.4, 1.8, 3.5]
    assert iterations_found(losses, LossSpikeDetector(Jumps(vocabulary=128_000))) == []


@pytest.mark.parametrize("start", [40.0, 25.0])
def test_a_noisy_start_above_uniform_guesses_is_normal(start):
    losses = [start, start / 2, 0.7 * start, 0.4 * start]
    assert iterations_found(losses, LossSpikeDetector(Jumps(vocabulary=2048))) == []


def test_the_vocabulary_does_not_matter_once_there_is_enough_history():
    for name in ORDINARY:
        assert iterations_found(CURVES[name], LossSpikeDetector(Jumps(vocabulary=2048))) == []
    curve = [6.0] * ENOUGH + [7.6]
    assert iterations_found(curve, LossSpikeDetector(Jumps(vocabulary=2048))) == [ENOUGH + 1]


def test_a_jump_that_stays_within_the_first_iterations_is_found():
    assert iterations_found([2.0, 3.9, 3.9, 3.9]) == [4]


def test_a_loss_that_oscillates_around_the_limit_is_one_event():
    anomalies = LossSpikeDetector(Jumps())
    assert iterations_found([2.0] * 10 + [2.6, 2.4] * 10 + [2.2], anomalies) == [11]
    assert anomalies.levels == {LOSS: [*[2.0] * 10, 2.2], GRAD_NORM: []}


@pytest.mark.parametrize(
    "stored",
    [
        7,
        {LOSS: 3.0},
        {LOSS: [math.nan]},
        {LOSS: ["2"]},
        {"another": [1.0]},
        {GRAD_NORM: [1.0] * (WINDOW + 1)},
        {f"unusual {LOSS}": [math.inf]},
    ],
)
def test_damaged_levels_are_refused(stored):
    with pytest.raises(ValueError, match="its `levels` are not lists of at most 32 finite numbers"):
        checked_levels(stored)


def test_a_factor_of_zero_switches_a_number_off():
    anomalies = LossSpikeDetector(Jumps(loss=0, grad_norm=4))
    assert iterations_found([(2.0, 1.0)] * 10 + [(1e9, 1.0), (2.0, 5.0)], anomalies) == [12]
    assert iterations_found([(2.0, 1.0), (math.nan, 1.0)], anomalies) == [2], "NaN is never usual"
