"""Test that the index has the loss and the gradient norm of each iteration, in few lines."""

import json
import math

import pandas as pd
import pytest
import torch

from megatron.analysis.dump.loss_curve import loss_curve
from megatron.collection import session, session_end
from megatron.collection.loss_log import LossLog
from megatron.collection.training_clock import MicroBatch, clock
from tests.collection.samples import events, save


def test_every_iteration_is_in_the_index_before_the_ring_is_written(fresh_saver, tmp_path):
    session.configure(save_tensors=True, save_dir=str(tmp_path), collect_ring=1, iteration=4)
    values = [(2.0, 1.0), (1.5, None), (None, None), (math.nan, math.inf), (3.0, 1)]
    for loss, grad_norm in values:
        session.begin_iteration()
        clock.micro_batch = MicroBatch(clock.iteration, 0)
        save(torch.ones(2, 3, 4))
        session.end_iteration()
        session.observe(loss, grad_norm)
    session_end.close()
    written = events(tmp_path)
    assert [event["event"] for event in written] == ["trained", "trained", "kept", "trained"]
    assert written[1]["loss"] == [1.5, "nan"], "strict readers of JSON do not accept NaN"
    for event in written:
        json.dumps(event, allow_nan=False)
    table = loss_curve(written)
    assert table["iteration"].tolist() == [5, 6, 8, 9], "nothing is known about iteration 7"
    pd.testing.assert_series_equal(
        table["loss"], pd.Series([2.0, 1.5, math.nan, 3.0]), check_names=False
    )
    assert table["grad_norm"].tolist()[2:] == [math.inf, 1.0]
    assert table["finite"].tolist() == [True, True, False, True]


def test_only_the_first_rank_writes(fresh_saver, tmp_path):
    coordinates = {"world": 1, "world_size": 2}
    session.configure(save_tensors=True, save_dir=str(tmp_path), coordinates=coordinates)
    session.begin_iteration()
    session.end_iteration()
    session.observe(2.0, 1.0)
    session_end.close()
    assert events(tmp_path) == []


@pytest.mark.parametrize(("seconds", "most"), [(1e-4, 110), (10.0, 40_000)])
def test_a_long_run_writes_few_events(seconds, most):
    """A reader refuses an index with more than 100,000 events."""
    written, time = [], [0.0]

    def append(event, *, patience=1.0):
        written.append(event)

    log = LossLog(append, lambda: time[0])
    iterations = 100_000 if seconds < 1 else 40 * 86400 // 10
    for iteration in range(1, iterations + 1):
        time[0] += seconds
        log.add(iteration, 1.0, 1.0)
    log.flush()
    assert sum(len(event["iterations"]) for event in written) == iterations
    assert len(written) <= most


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"iterations": 3, "loss": 1.0, "grad_norm": 1.0},
        {"iterations": [True, "3", -1, 2.0], "loss": [1.0] * 4, "grad_norm": [1.0] * 4},
        {"iterations": [1], "loss": [], "grad_norm": [1.0]},
    ],
)
def test_a_damaged_event_has_no_numbers(event):
    assert loss_curve([{"event": "trained", **event}, {"event": 3}]).empty


def test_strange_numbers_are_unknown():
    event = {"event": "trained", "iterations": [1, 2, 1], "run_id": "a"}
    event |= {"loss": [1.0, "1.0", 10**400], "grad_norm": [True, [], "-inf"]}
    table = loss_curve([event])
    assert table["iteration"].tolist() == [1, 2]
    assert table["loss"].isna().all()
    assert table["grad_norm"].tolist()[0] == -math.inf
