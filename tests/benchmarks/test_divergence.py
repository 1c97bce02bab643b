"""Test the verdict of benchmarks/divergence.py on made-up results, without training."""

import math
import sys

from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import divergence

sys.path.remove(str(REPO / "benchmarks"))

PLANT = divergence.PLANTS[0]
USUAL = [[7.6, 1.0]] * 12


def results(*, kept, curve=None, alarm=()):
    """Return the results of one planted run, whose loss jumps in iteration 3, and of its twin."""
    diverged = [[7.6, 1.0], [7.5, 1.0], [9.3, 1.0], [math.nan, math.nan]]
    planted = {"curve": curve or diverged, "kept": kept}
    return {PLANT.name: planted, PLANT.twin: {"curve": USUAL, "kept": list(alarm)}}


def test_a_kept_jump_is_shown():
    page, complaints = divergence.page(results(kept=[[1, 2, 3]]))
    assert complaints == []
    assert "The jump is kept in 1 of 1 runs. It is found in its own iteration in 1" in page
    assert f"| {PLANT.name} | 2 | 3 | 7.50, 9.3 (7.60) | 3 | 1 to 3 |" in page


def test_a_lost_jump_is_an_error():
    for kept in ([], [[3]], [[1, 2]], [[4, 5], [2, 3]]):
        page, complaints = divergence.page(results(kept=kept))
        assert complaints == [f"{PLANT.name}: the ring lacks the jump at 3: {kept}"]
        assert "The jump is kept in 0 of 1 runs" in page


def test_a_fault_without_effect_and_a_false_alarm_are_errors():
    complaints = divergence.page(results(kept=[], curve=USUAL, alarm=[[5, 6]]))[1]
    assert complaints == [
        f"{PLANT.name} did not diverge",
        f"{PLANT.twin}: the ring was written: [[5, 6]]",
    ]


def test_a_norm_that_is_unknown_is_stored_as_minus_one():
    curves = divergence.curves({"ordinary/a": {"curve": [[7.5, None], [7.25, 2.0]]}})
    assert curves["ordinary/a"].tolist() == [[7.5, -1.0], [7.25, 2.0]]


def test_there_are_forty_runs_with_names_of_their_own():
    runs = divergence.all_runs()
    assert (len(runs), len(divergence.PLANTS), len(divergence.ORDINARY)) == (40, 20, 20)
    assert all(plant.twin in runs for plant in divergence.PLANTS)
