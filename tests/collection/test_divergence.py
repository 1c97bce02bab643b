"""Replay the runs of benchmarks/divergence.py: only planted jumps are found, and all of them."""

import math
from pathlib import Path

import numpy as np
import pytest

from megatron.collection.loss_spikes import Jumps, LossSpikeDetector
from tests.subprocesses import REPO

DATA = Path(__file__).parents[1] / "data" / "divergence.npz"
CURVES = {name: curve.tolist() for name, curve in np.load(DATA).items()}
PLANTED = [name for name in CURVES if name.startswith("planted/")]
ORDINARY = [name for name in CURVES if name.startswith("ordinary/")]
VOCABULARY = 2048  #: tokens of the default corpus


def found(name: str) -> list[int]:
    """Return the iterations, counted from 1, at which the detector finds something unusual."""
    detector = LossSpikeDetector(Jumps(vocabulary=VOCABULARY))
    return [
        iteration
        for iteration, (loss, norm) in enumerate(CURVES[name], 1)
        if detector.look(iteration, loss, None if norm == -1 else norm)
    ]


def jump_of(name: str) -> int:
    """Return the first iteration with a loss that is not finite or 20% above that of the twin.

    The twin is the ordinary run that starts with the same losses.
    """
    curve = [loss for loss, _ in CURVES[name]]
    (twin,) = [
        losses
        for run in ORDINARY
        if run.startswith("ordinary/seed")
        and (losses := [loss for loss, _ in CURVES[run]])[0] == pytest.approx(curve[0], rel=1e-6)
    ]
    pairs = zip(curve, twin, strict=False)
    return next(
        iteration
        for iteration, (loss, expected) in enumerate(pairs, 1)
        if not math.isfinite(loss) or loss > 1.2 * expected
    )


def test_there_are_twenty_runs_of_each_kind_and_faults_from_iteration_2_to_200():
    assert (len(PLANTED), len(ORDINARY)) == (20, 20)
    iterations = [int(name.split("_")[1]) for name in PLANTED]
    assert (min(iterations), max(iterations)) == (2, 200)


@pytest.mark.parametrize("name", PLANTED)
def test_the_ring_holds_the_jump_and_the_iteration_before(name):
    """A ring of two iterations is enough if the jump is found in its own iteration."""
    assert found(name)[0] == jump_of(name)


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_run_is_never_unusual(name):
    assert found(name) == []


def test_the_page_shows_the_runs_of_the_data():
    page = (REPO / "docs" / "results" / "divergence.md").read_text(encoding="utf-8")
    assert "The jump is kept in 20 of 20 runs." in page
    assert "The ring is written in 0 of 20 runs." in page
    for name in PLANTED:
        assert f"| {name} |" in page
