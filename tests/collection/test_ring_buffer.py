"""Test the ring, which writes the last iterations after an unusual one, and the flag file."""

import json
import math

import pytest
import torch

from megatron.collection import session, session_end
from megatron.collection.limits import GIB
from megatron.collection.loss_spikes import ENOUGH, WINDOW, Jumps, LossSpikeDetector
from megatron.collection.training_clock import MicroBatch, clock
from megatron.tensor_record import read_events
from tests.collection.samples import records, save

pytestmark = pytest.mark.usefixtures("fresh_saver")

SIZE = 24 * 4  #: bytes of a tensor that `save` saves


def train(loss: float = 2.0, grad_norm: float | None = 1.0, tensors: int = 1) -> str | None:
    """Run one iteration."""
    session.begin_iteration()
    clock.micro_batch = MicroBatch(clock.iteration, 0)
    for _ in range(tensors):
        save(torch.full((2, 3, 4), float(clock.iteration)))
    session.end_iteration()
    return session.observe(loss, grad_norm)


def configure(folder, **flags) -> None:
    session.configure(save_tensors=True, save_dir=str(folder), **flags)


def events(folder):
    (index,) = folder.glob("index_*.jsonl")
    return [event for event in read_events(index) if event["event"] != "trained"]


def saved_iterations(folder) -> list[int]:
    found = records(folder)
    for record in found:
        tensor = torch.load(folder / record["file"], weights_only=True)["tensor"]
        assert tensor.unique().tolist() == [record["iteration"]], "memory was not reused too early"
    return [record["iteration"] for record in found]


def test_what_came_before_a_loss_spike_survives(tmp_path):
    configure(tmp_path, collect_ring=3)
    for _ in range(20):
        assert train() is None
    assert list(tmp_path.glob("*.pt")) == [], "nothing is written without an event"
    said = train(loss=3.0)
    assert said.startswith("loss 3, 1.5 times the level before at iteration 21")
    assert "the ring is kept (event 1 of 3)" in said
    assert saved_iterations(tmp_path) == [19, 20, 21]
    assert [r["counter"] for r in records(tmp_path)] == [1, 2, 3], "discarded ones have no number"
    (event,) = events(tmp_path)
    assert (event["event"], event["iterations"]) == ("kept", [19, 20, 21])
    assert not session.finished(), "training continues"


@pytest.mark.parametrize(("every", "says"), [(1, False), (2, True)])
def test_a_jump_in_an_iteration_that_is_not_collected_is_said(tmp_path, every, says):
    configure(tmp_path, collect_ring=2, collect_every=every)
    for _ in range(19):
        train()
    assert ("iteration 20 was not collected, so the ring ends with 19" in train(loss=9.0)) == says
    assert saved_iterations(tmp_path) == ([17, 19] if says else [19, 20])


@pytest.mark.parametrize(
    "numbers",
    [{"loss": math.nan}, {"loss": math.inf}, {"grad_norm": math.nan}, {"grad_norm": 101.0}],
)
def test_other_things_that_are_unusual(tmp_path, numbers):
    configure(tmp_path, collect_ring=2)
    for _ in range(ENOUGH):
        train()
    assert train(**numbers)
    assert saved_iterations(tmp_path) == [ENOUGH, ENOUGH + 1]


def test_a_run_that_stays_broken_is_kept_once_each_time_it_breaks_and_then_no_more(tmp_path):
    configure(tmp_path, collect_ring=1, collect_ring_events=2)
    for _ in range(3):
        for _ in range(4):
            train(loss=math.nan)
        train()
    assert saved_iterations(tmp_path) == [1, 6]
    assert session.capture(None, "linear") is None, "nothing is copied any more"


def test_an_error_that_ends_training_keeps_the_ring(tmp_path):
    configure(tmp_path, collect_ring=2)
    for _ in range(5):
        train()
    session_end.close(aborted="ValueError: lost")
    assert [e["why"] for e in events(tmp_path)] == ["ValueError: lost"]
    assert saved_iterations(tmp_path) == [4, 5]
    (card,) = tmp_path.glob("run_*.json")
    content = json.loads(card.read_text())
    assert (content["status"], content["reason"]) == ("aborted", "ValueError: lost")
    assert content["ring"]["iterations"] == 2


def test_a_run_without_an_anomaly_writes_no_tensor(tmp_path):
    configure(tmp_path, collect_ring=2)
    for _ in range(5):
        train()
    assert session_end.settle() == []
    assert session_end.close() is None
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".jsonl"]
    assert (records(tmp_path), events(tmp_path)) == ([], [])


def test_a_ring_holds_what_memory_has_room_for(tmp_path):
    configure(tmp_path, collect_ring=5, collect_max_host_gib=7 * SIZE / GIB)
    for _ in range(8):
        train(tensors=2)
    train(loss=math.nan, tensors=2)
    assert saved_iterations(tmp_path) == [7, 7, 8, 8, 9, 9]


def test_an_iteration_that_memory_has_no_room_for_is_a_limit(tmp_path, caplog):
    configure(tmp_path, collect_ring=2, collect_max_host_gib=3 * SIZE / GIB)
    train(tensors=5)
    (said,) = caplog.messages
    assert "the ring of rank 0 holds the first part of iteration 1 only" in said
    assert train(loss=math.nan, tensors=5)
    assert saved_iterations(tmp_path) == [2, 2, 2], "what memory did hold is not lost"
    (line,) = session_end.settle()
    assert "--collect-max-host-gib lets this rank hold 288 bytes: rank 0 left out 96 byte" in line
    assert "iteration 2, micro-batch 0, and the rest; 2 tensors, 192 bytes, were dropped" in line


def test_a_ring_recovers_from_an_iteration_that_it_had_no_room_for(tmp_path, caplog):
    configure(tmp_path, collect_ring=3, collect_max_host_gib=3 * SIZE / GIB)
    for _ in range(2):
        train(tensors=5)
        for _ in range(3):
            train()
        assert train(loss=math.nan)
    assert saved_iterations(tmp_path) == [3, 4, 5, 8, 9, 10]
    session_end.settle()
    assert session_end.close() is None
    (card,) = tmp_path.glob("run_*.json")
    assert json.loads(card.read_text())["status"] == "finished", "no event kept the incomplete ones"
    assert sum("holds the first part" in m for m in caplog.messages) == 1, "one warning is logged"


def test_what_an_iteration_of_a_kept_ring_lacks_is_told_and_later_ones_are_whole(tmp_path):
    configure(tmp_path, collect_ring=2, collect_max_host_gib=3 * SIZE / GIB)
    train(loss=math.nan, tensors=5)
    train()
    train(loss=math.nan, tensors=2)
    assert saved_iterations(tmp_path) == [1, 1, 1, 2, 3, 3]
    session_end.settle()
    session_end.close()
    (card,) = tmp_path.glob("run_*.json")
    content = json.loads(card.read_text())
    assert content["status"] == "limited"
    assert (content["ranks"][0]["dropped_tensors"], content["ranks"][0]["tensors"]) == (2, 6)
    (left_out,) = [event for event in events(tmp_path) if event["event"] == "left_out"]
    assert (left_out["iteration"], left_out["tensors"], left_out["bytes"]) == (1, 2, 2 * SIZE)


def test_a_ring_that_may_write_no_more_counts_what_it_would_have_written(tmp_path):
    configure(tmp_path, collect_ring=1, collect_max_files=2)
    train(loss=math.nan, tensors=3)
    train()
    assert "iteration 3: the ring cannot be kept (event 2 of" in train(loss=math.nan, tensors=4)
    train(tensors=7)
    assert saved_iterations(tmp_path) == [1, 1]
    (line,) = session_end.settle()
    assert "--collect-max-files lets this rank write 2: rank 0 stopped collecting" in line
    assert "; 5 tensors, " in line, "tensors without an event do not count"


def test_a_signal_is_nothing_to_keep_a_ring_for(tmp_path, caplog):
    """A scheduler kills a job half a minute after it sends the signal."""
    configure(tmp_path, collect_ring=2)
    for _ in range(5):
        train()
    session_end.close(aborted="SIGTERM", interrupted=True)
    assert list(tmp_path.glob("*.pt")) == []
    (event,) = events(tmp_path)
    assert (event["event"], event["why"], event["iterations"]) == ("let_go", "SIGTERM", [4, 5])
    assert "SIGTERM: the ring of iterations [4, 5] is not kept" in caplog.messages
    (card,) = tmp_path.glob("run_*.json")
    assert json.loads(card.read_text())["status"] == "aborted"


def test_only_selected_iterations_enter_the_ring(tmp_path):
    configure(tmp_path, collect_ring=2, collect_every=3)
    for _ in range(8):
        train()
    assert train(loss=math.nan)
    assert saved_iterations(tmp_path) == [4, 7]


def test_a_trainer_that_says_nothing_of_its_iterations_is_refused(tmp_path):
    configure(tmp_path, collect_ring=2)
    session.begin_iteration()
    session.end_iteration()
    with pytest.raises(ValueError, match=r"call megatron\.core\.tensor_saver\.observe"):
        session.begin_iteration()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"collect_ring": 0}, "--collect-ring is 0; give 1 or more"),
        ({"collect_ring": 1, "collect_ring_events": 0}, "--collect-ring-events is 0; give 1"),
        ({"collect_ring": 1, "collect_loss_jump": 0.5}, "--collect-loss-jump is 0.5; give a fact"),
        ({"collect_ring": 1, "collect_grad_norm_jump": math.nan}, "-norm-jump is nan; give a"),
        ({"collect_loss_jump": 2.0}, "--collect-loss-jump 2.0 needs a ring .*; add --collect-r"),
        ({"collect_ring": 1, "control_iter": 2}, "leave --control-iter out"),
        ({"collect_flag_file": "no/such/folder/flag"}, "its folder does not exist; create"),
        ({"collect_flag_file": "/"}, "is a folder that already exists; name a file in it"),
        ({"collect_max_host_gib": 1e6}, "1e.06 is more than this machine's memory of .*; give"),
    ],
)
def test_flags_that_make_no_sense_are_refused(tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        configure(tmp_path, **flags)


def test_a_jump_is_told_from_the_fall_and_the_noise_of_a_loss():
    generator = torch.Generator().manual_seed(1)
    anomalies = LossSpikeDetector(Jumps())
    for step in range(400):
        noise = 0.05 * torch.randn((), generator=generator).item()
        loss = 3.0 + 7.0 * math.exp(-step / 50) + noise
        assert anomalies.look(step, loss, 1.0 + 10 * abs(noise)) is None
    assert anomalies.look(400, 3.5, 1.0) is None, "a sixth more is below the factor 1.2"
    assert anomalies.look(401, 3.8, 1.0)
    assert anomalies.look(402, 3.8, 1.0) is None, "it is still the same event"
    assert anomalies.look(403, 3.0, 1.0) is None
    assert anomalies.look(404, 3.0, math.inf)


def test_a_jump_that_lasts_becomes_usual():
    anomalies = LossSpikeDetector(Jumps(loss=1.5, grad_norm=0.0))
    for step in range(WINDOW):
        anomalies.look(step, 1.0, 1.0)
    assert anomalies.look(0, 2.0, 1e9), "gradient norms are ignored"
    for step in range(WINDOW):
        anomalies.look(step, 2.0, 1.0)
    assert anomalies.look(0, 2.9, 1.0) is None
    assert anomalies.look(0, 3.1, 1.0)


def test_a_file_switches_a_running_collection(tmp_path, caplog):
    flag = tmp_path / "collect_now"
    configure(tmp_path / "dump", collect_flag_file=str(flag), collect_iterations="1-9")
    for iteration in range(1, 11):
        if iteration in (3, 7):
            flag.touch()
        if iteration == 5:
            flag.unlink()
        train()
    assert saved_iterations(tmp_path / "dump") == [3, 4, 7, 8, 9]
    found = [(e["event"], e["to"], e["iteration"]) for e in events(tmp_path / "dump")]
    assert found == [("switched", "on", 3), ("switched", "off", 5), ("switched", "on", 7)]
    said = [f"collection {to} from iteration {iteration} on" for _, to, iteration in found]
    assert caplog.messages == said


def test_a_file_switches_at_the_boundary_of_an_iteration_only(tmp_path):
    flag = tmp_path / "collect_now"
    configure(tmp_path / "dump", collect_flag_file=str(flag))
    session.begin_iteration()
    clock.micro_batch = MicroBatch(1, 0)
    flag.touch()
    save()
    session.end_iteration()
    assert records(tmp_path / "dump") == []


def test_with_a_flag_file_training_stops_once_enough_is_collected_only_if_told_to(tmp_path):
    flag = tmp_path / "collect_now"
    flag.touch()
    configure(tmp_path / "dump", collect_flag_file=str(flag))
    train()
    assert not session.finished()
    configure(tmp_path / "dump", collect_flag_file=str(flag), control_iter=2)
    train()
    assert not session.finished()
    train()
    assert session.finished()
