"""Test where and when a collection writes, and what it does if it cannot."""

import json
import os
import re

import numpy as np
import pytest
import torch

from megatron.collection import collector, rank_checks, session, session_end
from megatron.collection.background_writer import THREADS
from megatron.collection.capture import global_shape
from megatron.collection.module_identity import ModuleIdentity
from megatron.collection.training_clock import MicroBatch, clock
from megatron.fake_quant import policy
from megatron.tensor_record import parse_filename
from tests.collection.samples import LAYER, events, records, save

pytestmark = pytest.mark.usefixtures("fresh_saver")


def step(*micro_batches: int) -> None:
    """Run one iteration, and save one tensor in each micro-batch."""
    session.begin_iteration()
    for index in micro_batches:
        clock.micro_batch = MicroBatch(clock.iteration, index)
        save()
    session.end_iteration()


def test_nothing_is_written_unless_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    session.configure()
    step(0)
    assert list(tmp_path.iterdir()) == []


def test_the_default_folder_is_named_after_the_type(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy.configure(custom_quant_type="FA_mxfp4")
    session.configure(save_tensors=True)
    step(0)
    session_end.flush()
    (path,) = (tmp_path / "enhanced_tensor_logs" / "FA_mxfp4").glob("*.pt")
    assert parse_filename(path.name)["quant_type"] == "FA_mxfp4"


def test_a_flag_wins_over_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "environment"))
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "true")
    session.configure(save_dir=str(tmp_path / "flag"))
    step(0)
    assert not (tmp_path / "environment").exists()
    assert len(records(tmp_path / "flag")) == 1


@pytest.mark.parametrize(
    ("control_iter", "micro_batches", "expected"),
    [
        (1, 1, [(1, 0)]),
        (2, 1, [(1, 0), (2, 0)]),
        (1, 2, [(1, 0), (1, 1)]),
        (1, 0, [(1, 0), (1, 1), (1, 2)]),
        (0, 1, [(1, 0), (2, 0), (3, 0)]),
    ],
)
def test_how_much_is_collected(tmp_path, control_iter, micro_batches, expected):
    session.configure(
        save_tensors=True,
        save_dir=str(tmp_path),
        control_iter=control_iter,
        collect_micro_batches=micro_batches,
    )
    done = []
    for _ in range(3):
        step(0, 1, 2)
        done.append(bool(session.finished()))
    assert [(r["iteration"], r["micro_batch"]) for r in records(tmp_path)] == expected
    assert done == [0 < control_iter <= n for n in (1, 2, 3)]


@pytest.mark.parametrize(("asked", "says"), [(0, False), (2, False), (3, False), (4, True)])
def test_fewer_micro_batches_than_asked_for_are_reported_once(tmp_path, caplog, asked, says):
    session.configure(
        save_tensors=True, save_dir=str(tmp_path), control_iter=2, collect_micro_batches=asked
    )
    step(2, 0, 1)
    step(0, 1, 2)
    text = "iteration 1 has 3 micro-batches, fewer than --collect-micro-batches 4"
    assert [text in line for line in caplog.messages if "has" in line] == [True] * says


def test_a_resumed_run_counts_on(tmp_path):
    session.configure(save_tensors=True, save_dir=str(tmp_path), iteration=40)
    step(0)
    assert [r["iteration"] for r in records(tmp_path)] == [41]
    assert session.finished()


def test_outside_of_a_training_step_and_in_the_lm_head_nothing_is_collected(tmp_path):
    session.configure(save_tensors=True, save_dir=str(tmp_path))
    save()
    clock.micro_batch = MicroBatch(1, 0)
    save(identity=ModuleIdentity("output_layer", -1))
    assert records(tmp_path) == []


def test_a_layer_that_stands_in_no_model_is_collected_too(tmp_path):
    session.configure(save_tensors=True, save_dir=str(tmp_path))
    clock.micro_batch = MicroBatch(1, 0)
    save(identity=None)
    (record,) = records(tmp_path)
    assert (record["layer_idx"], record["module"]) == (-1, "")
    assert parse_filename(record["file"])["layer_idx"] == -1


def test_the_sample_is_recorded_where_the_trainer_tells_it(tmp_path):
    session.configure(save_tensors=True, save_dir=str(tmp_path))
    clock.micro_batch = MicroBatch(1, 0)
    session.set_sample_idx(96)
    save()
    assert records(tmp_path)[0]["sample_idx"] == 96


GOOD = {"tensor_name": "input", "layer_type": "linear", "dims": "s b h"}


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"tensor_name": "inputt"}, ValueError, "cannot have the name 'inputt'; choose from input"),
        ({"tensor_name": "fprop_input_codes"}, ValueError, "cannot have the name"),
        ({"layer_type": "mlp"}, ValueError, "layer_type='mlp': choose from attention, linear"),
        ({"dims": "s b"}, ValueError, "dims='s b' does not describe 3 dimensions; give one letter"),
        ({"dims": "foo bar baz"}, ValueError, "does not describe 3 dimensions"),
        ({"dims": "s b h | sum"}, ValueError, "does not describe 3 dimensions"),
        ({"dims": "s b h[xx]"}, ValueError, "no parallel group 'xx'; choose from tp, pp, dp, cp"),
        ({"dims": "s b h | partial[tp,world]"}, ValueError, "no parallel group 'world'; choose"),
        ({"identity": "fc1"}, TypeError, "identity='fc1': give a ModuleIdentity"),
        ({"operation": "fwd"}, ValueError, "operation='fwd': input belongs to 'forward'"),
        ({"phase": "zzz"}, ValueError, "phase='zzz': give 'pre'"),
        ({"format": 8}, TypeError, "format=8: give the name of a format, or None"),
        ({"tensor": np.ones((2, 3, 4))}, TypeError, "input is ndarray; give a torch.Tensor"),
        ({"tensor": torch.ones(2, 3, 4).int()}, ValueError, "give a dense floating-point tensor"),
        (
            {"tensor": torch.ones(2, 3, 4, device="meta")},
            ValueError,
            "give a dense floating-point tensor",
        ),
        (
            {"tensor": torch.ones(2, 3, 4).to_sparse()},
            ValueError,
            "give a dense floating-point tensor",
        ),
    ],
)
def test_wrong_arguments_of_other_code_are_refused(wrong, error, message, tmp_path):
    session.configure(save_tensors=True, save_dir=str(tmp_path))
    session.begin_iteration()
    clock.micro_batch = MicroBatch(clock.iteration, 0)
    arguments = {"tensor": torch.ones(2, 3, 4)} | GOOD | wrong
    with pytest.raises(error, match=re.escape(message)):
        session.save_tensor(**arguments)
    for dims in ("s b h", "s[cp:zigzag] b h[tp]", "s b h[tp:2] | partial[tp,cp]"):
        session.save_tensor(**({"tensor": torch.ones(2, 3, 4)} | GOOD | {"dims": dims}))
    session.save_tensor(torch.ones(2, 3), "grad_output", layer_type="linear", dims="t o")
    session.end_iteration()
    session_end.flush()
    saved = [record["operation"] for record in records(tmp_path)]
    assert sorted(saved) == ["backward", "forward", "forward", "forward"]


def test_ranks_that_save_to_different_folders_are_named(tmp_path, monkeypatch, caplog):
    def of_all(value):
        return [value, "/elsewhere"] if isinstance(value, str) else [value]

    monkeypatch.setattr(rank_checks, "from_all_ranks", of_all)
    session.configure(save_tensors=True, save_dir=str(tmp_path))
    assert f"to different folders ({tmp_path}, /elsewhere)" in caplog.text


def test_code_outside_our_layers_saves_a_tensor_of_its_own(tmp_path):
    session.save_tensor(torch.ones(2), "input", layer_type="linear", dims="h")  # not configured
    session.configure(save_tensors=True, save_dir=str(tmp_path), collect_tensors=["input"])
    session.begin_iteration()
    clock.micro_batch = MicroBatch(clock.iteration, 0)
    tensor = torch.arange(24.0).view(2, 3, 4)
    for name in ("input", "output"):
        session.save_tensor(
            tensor, name, layer_type="linear", dims="s b h", identity=LAYER, format="mxfp8"
        )
    session.end_iteration()
    session.save_tensor(tensor, "input", layer_type="linear", dims="s b h")  # between iterations
    (record,) = records(tmp_path)
    assert (record["tensor_name"], record["module"]) == ("input", LAYER.name)
    assert (record["format"], record["dims"], record["iteration"]) == ("mxfp8", "s b h", 1)
    saved = torch.load(tmp_path / record["file"], weights_only=True)["tensor"]
    assert torch.equal(saved, tensor)


def test_a_backward_tensor_keeps_the_micro_batch_of_its_forward(tmp_path):
    session.configure(save_tensors=True, save_dir=str(tmp_path), collect_micro_batches=0)
    outputs = []
    for index in (0, 1, 2):
        clock.micro_batch = MicroBatch(1, index)
        x = torch.full((1, 1, 2), float(index), requires_grad=True)
        capture = session.capture(LAYER, "linear")
        outputs.append(capture.watch_operand(x, "grad_input", dims="s b h", phase="post") * index)
    for output in outputs:
        output.sum().backward()
    values = {}
    for r in records(tmp_path):
        tensor = torch.load(tmp_path / r["file"], weights_only=True)["tensor"]
        values[r["micro_batch"]] = tensor.unique().tolist()
    assert values == {0: [0.0], 1: [1.0], 2: [2.0]}


def test_watching_shows_the_gradient_and_changes_nothing(tmp_path):
    session.configure(save_tensors=True, save_dir=str(tmp_path))
    clock.micro_batch = MicroBatch(1, 0)
    capture = session.capture(LAYER, "linear")
    x = torch.randn(3, 1, 4, requires_grad=True)
    y = (capture.watch_operand(x, "grad_input", dims="s b h") * 3 + x * 5).sum()
    y.backward()
    assert torch.equal(x.grad, torch.full_like(x, 8.0))
    saved = torch.load(tmp_path / records(tmp_path)[0]["file"], weights_only=True)["tensor"]
    assert torch.equal(saved, torch.full_like(x, 3.0)), "only the gradient of the watched operand"


def test_two_runs_in_one_folder_in_the_same_second_overwrite_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(session.time, "time", lambda: 1.8e9)
    for value in (1.0, 2.0):
        session.configure(save_tensors=True, save_dir=str(tmp_path))
        clock.micro_batch = MicroBatch(1, 0)
        for _ in range(3):
            save(torch.full((1, 1, 1), value))
        session_end.close()
    found = records(tmp_path)
    assert len({r["file"] for r in found}) == 6
    assert len({r["run_id"] for r in found}) == 2
    assert len(list(tmp_path.glob("run_*.json"))) == 2
    values = [
        torch.load(tmp_path / r["file"], weights_only=True)["tensor"].item()
        for r in sorted(found, key=lambda r: r["run_id"])
    ]
    assert sorted(values) == [1.0] * 3 + [2.0] * 3


def test_without_hard_links_files_are_renamed_and_still_nothing_is_overwritten(
    tmp_path, monkeypatch
):
    def no_link(*_):
        raise PermissionError("hard links are not supported")

    monkeypatch.setattr(os, "link", no_link)
    test_two_runs_in_one_folder_in_the_same_second_overwrite_nothing(tmp_path, monkeypatch)


def test_a_full_disk_ends_the_collection_and_not_the_training(small_disk, caplog):
    session.configure(
        save_tensors=True, save_dir=str(small_disk), control_iter=0, collect_keep_free_gib=0
    )
    session.begin_iteration()
    clock.micro_batch = MicroBatch(1, 0)
    for _ in range(8):
        save(torch.randn(64, 16, 64))  # 256 KiB each
    session.end_iteration()
    message = session_end.close()  # until it returns, every other thread may write one more tensor
    found = records(small_disk)
    assert 0 < len(found) < 8
    for record in found:
        torch.load(small_disk / record["file"], weights_only=True)
    assert {path.name for path in small_disk.glob("*.pt")} == {r["file"] for r in found}
    assert sum("collection stopped" in message for message in caplog.messages) == 1
    said = int(re.search(r"after (\d+) tensors", message)[1])
    assert len(found) - (THREADS - 1) <= said <= len(found)
    assert not list(small_disk.glob("*.partial"))
    (card,) = small_disk.glob("run_*.json")
    assert json.loads(card.read_text())["status"] == "failed", "space was reserved for the card"
    assert [event["event"] for event in events(small_disk)] == ["failed"]


def test_the_run_card_says_how_the_run_ended(tmp_path):
    session.configure({"seed": 7, "lr": 1e-3}, save_tensors=True, save_dir=str(tmp_path))
    (path,) = tmp_path.glob("run_*.json")
    assert json.loads(path.read_text())["status"] == "running"
    step(0)
    assert session_end.close() is None
    card = json.loads(path.read_text())
    assert (card["status"], card["iterations"], card["seed"]) == ("finished", 1, 7)
    assert card["arguments"]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("layer", "elsewhere", "fails"), [(1, False, True), (1, True, False), (0, True, True)]
)
def test_a_rank_without_selected_modules_may_collect_nothing(
    tmp_path, monkeypatch, layer, elsewhere, fails
):
    """A stage may have no selected layer if another stage has one; a stage with one must save."""
    monkeypatch.setattr(collector, "from_all_ranks", lambda value: [value, elsewhere])
    session.configure(save_tensors=True, save_dir=str(tmp_path), collect_layers="0")
    session.begin_iteration()
    clock.micro_batch = MicroBatch(1, 0)
    session.capture(ModuleIdentity("linear_fc1", layer), "linear")
    session.end_iteration()
    assert (session_end.reason_for_nothing() is not None) == fails


def test_what_ends_the_collection_at_its_end_stands_in_the_run_card(tmp_path):
    session.configure(save_tensors=True, save_dir=str(tmp_path))
    session_end.settle()
    session.current().give_up("nothing ran")
    assert session_end.close().endswith("nothing ran")
    (card,) = tmp_path.glob("run_*.json")
    card = json.loads(card.read_text())
    assert (card["status"], card["error"].rpartition(": ")[2]) == ("failed", "nothing ran")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to the tensor folder .*--tensor-save-dir"):
        session.configure(save_tensors=True, save_dir=str(tmp_path / "file" / "dump"))
    with pytest.raises(ValueError, match=r"cannot write to the tensor folder .*: it is a file; na"):
        session.configure(save_tensors=True, save_dir=str(tmp_path / "file"))


@pytest.mark.parametrize("option", ["control_iter", "collect_micro_batches"])
def test_negative_counts_are_refused(tmp_path, option):
    with pytest.raises(ValueError, match="is -1; give 0 for no limit"):
        session.configure(save_tensors=True, save_dir=str(tmp_path), **{option: -1})


def test_an_unreadable_switch_is_refused(monkeypatch):
    monkeypatch.setenv("TENSOR_SAVE_ENABLED", "perhaps")
    with pytest.raises(ValueError, match="TENSOR_SAVE_ENABLED is 'perhaps'; use true or false"):
        session.configure()
    monkeypatch.delenv("TENSOR_SAVE_ENABLED")


def test_the_global_shape_multiplies_what_is_sharded():
    coordinates = {"tp_size": 4, "cp_size": 2}
    assert global_shape([8, 2, 16], "s[cp] b h[tp]", coordinates) == [16, 2, 64]
    assert global_shape([8, 2, 16], "s b h | partial[tp]", coordinates) == [8, 2, 16]


@pytest.mark.parametrize("ring", [0, 3])
def test_an_iteration_that_failed_stops_a_collection_and_leaves_a_ring(ring, tmp_path):
    options = {"collect_ring": ring, "control_iter": 0} if ring else {"control_iter": 9}
    session.configure(save_tensors=True, save_dir=str(tmp_path), **options)
    for number, fails in ((1, False), (2, True), (2, False), (3, False)):
        session.begin_iteration(number)
        clock.micro_batch = MicroBatch(number, 0)
        save()
        if fails:
            session_end.flush()  # a collection that fails drops what threads have not written yet
            session.abandon_iteration(number - 1)
        else:
            session.end_iteration()
            session.observe(1.0, 1.0)
    failure = session_end.close(aborted="the end" if ring else None)
    saved = [record["iteration"] for record in records(tmp_path)]
    if ring:
        assert (failure, saved) == (None, [1, 2, 3])
    else:
        assert "iteration 2 ended with an exception" in failure
        assert saved == [1, 2]
