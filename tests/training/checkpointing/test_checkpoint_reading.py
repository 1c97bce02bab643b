"""The safe readers return what torch's reader returns, and read pickles only as data."""

import io
import pickle
import shutil
import signal
import subprocess
from collections import OrderedDict
from datetime import date

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from megatron.core import dist_checkpointing
from megatron.training.checkpointing import checked_archive, plain_pickle, save_load
from megatron.training.checkpointing.common_state import check_common, check_groups, read_common
from megatron.training.checkpointing.files import INDEX, TRACKER, write_tracker
from megatron.training.checkpointing.index import DamagedError, read_index
from megatron.training.checkpointing.plain_pickle import Global, Record, UnsafePickleError
from megatron.training.checkpointing.safe_reading import Window
from megatron.training.errors import Interrupted, UserError
from tests.training.checkpointing.hostile_pickles import Touch, saved


def test_an_index_is_what_torch_reads(checkpoints):
    folder = checkpoints / "iter_0000004"
    ours, theirs = read_index(folder), FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert len(ours.storage_data) > 30


def as_python_3_11_0_does(member, protocol):
    """Reduce a member of an enumeration to its class and its name, not to its value."""
    return getattr, (type(member), member.name)


def test_an_index_that_python_3_11_0_wrote_is_read(checkpoints, tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3, as in Debian 12, pickles enumerations unlike other releases."""
    folder = shutil.copytree(checkpoints / "iter_0000004", tmp_path / "iter_0000004")
    index = FileSystemReader(folder).read_metadata()
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", as_python_3_11_0_does)
    (folder / INDEX).write_bytes(pickle.dumps(index))
    assert b"getattr" in (folder / INDEX).read_bytes()
    assert read_index(folder).state_dict_metadata == index.state_dict_metadata


def test_no_attribute_but_a_member_of_a_class_is_described():
    for target in ("text", 1, date(2026, 1, 2)):
        attribute = Attribute(target, "real")
        with pytest.raises(UnsafePickleError, match="attribute of something that is not a class"):
            plain_pickle.parse(pickle.dumps(attribute), known=lambda _: True)


class Attribute:
    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_common_content_is_what_torch_reads(checkpoints):
    folder = checkpoints / "iter_0000004"
    ours, theirs = read_common(folder), torch.load(folder / "common.pt", weights_only=True)
    assert repr(ours) == repr(theirs)
    assert check_common(ours) is ours


def test_random_states_are_what_torch_reads():
    states = [{"numpy": np.random.default_rng(0).integers(0, 9, 624, dtype=np.uint32)}]
    states[0]["floats"] = np.linspace(0, 1, 7)
    states[0] |= {"torch": torch.get_rng_state(), "random": (3, (2**31, -1), None), "x": 1.5}
    found = checked_archive.load(saved(states))
    np.testing.assert_array_equal(found[0]["numpy"], states[0]["numpy"])
    np.testing.assert_array_equal(found[0]["floats"], states[0]["floats"])
    assert torch.equal(found[0]["torch"], states[0]["torch"])
    assert found[0]["random"] == states[0]["random"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_a_part_of_a_tensor_passes(dtype):
    """A view of a larger storage, as tensor parallelism creates it, can be read."""
    tensor = torch.arange(24).to(dtype).reshape(4, 6)[1:3, ::2]
    assert torch.equal(checked_archive.load(saved({"a": tensor}))["a"], tensor)


def test_a_pickle_is_data():
    values = [1, -(2**40), 1.5, None, True, "text", b"bytes", (1, (2,)), {"a": [3]}, {4: "b"}]
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(values, protocol=protocol)
        found = plain_pickle.parse(data, known=lambda name: name == "_codecs.encode")
        assert found[:6] + found[7:] == values[:6] + values[7:]
    (record,) = plain_pickle.parse(pickle.dumps([date(2026, 1, 2)]), known=lambda _: True)
    assert isinstance(record, Record)
    assert record.kind == "datetime.date"
    assert plain_pickle.parse(pickle.dumps(OrderedDict), known=lambda _: True) == Global(
        "collections.OrderedDict"
    )


def test_a_pickle_runs_nothing(tmp_path):
    """Reading calls nothing, not even a function whose name is accepted."""
    canary = tmp_path / "canary"
    record = plain_pickle.parse(pickle.dumps(Touch(canary)), known=lambda _: True)
    assert record == record
    assert (record.kind, record.arguments) == ("posix.system", (f"touch '{canary}'",))
    assert not canary.exists()
    pickle.loads(pickle.dumps(Touch(canary)))
    assert canary.exists(), "the payload of these tests works"


def test_names_and_operations_that_are_not_known_are_refused():
    with pytest.raises(UnsafePickleError, match=r"names 'subprocess\.Popen', which no checkpoint"):
        plain_pickle.parse(pickle.dumps(subprocess.Popen), known=lambda name: name == "os.x")
    with pytest.raises(UnsafePickleError, match="the operation 0x8f, which no checkpoint has"):
        plain_pickle.parse(pickle.dumps({1}), known=lambda _: True)
    with pytest.raises(UnsafePickleError, match="a key of type tuple"):
        plain_pickle.parse(pickle.dumps({(1, 2): 3}), known=lambda _: True)
    with pytest.raises(ValueError, match="the pickle is cut off"):
        plain_pickle.parse(pickle.dumps([1], protocol=2)[:-1], known=lambda _: True)


def test_the_wheel_reads_an_index_in_no_other_way(checkpoints, tmp_path):
    folder = checkpoints / "iter_0000004"
    good = dist_checkpointing.load_tensors_metadata(str(folder))
    assert tuple(good["embedding.word_embeddings.weight"].global_shape) == (128, 32)
    for name in ("common.pt", "metadata.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    canary = tmp_path / "canary"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Touch(canary)))
    with pytest.raises(DamagedError, match=r"\.metadata: it names 'posix\.system'"):
        dist_checkpointing.load_tensors_metadata(str(tmp_path))
    assert not canary.exists()


def test_a_window_is_a_part_of_a_file():
    window = Window(io.BytesIO(b"0123456789"), 3, 4)
    assert window.read() == b"3456"
    assert window.seek(-1, io.SEEK_END) == 3
    assert window.read(5) == b"6"
    assert window.seek(9) == 9
    assert window.read() == b""
    with pytest.raises(OSError, match="before the start"):
        window.seek(-1)


def test_numbers_of_the_optimizer_are_numbers():
    check_groups([{"lr": 0.1, "betas": (0.9, 0.99), "eps": None, "fused": "anything"}])
    for value in ("fast", float("inf"), (0.9, "x"), [0.1] * 9, 10**30):
        with pytest.raises(ValueError, match=r"the optimizer's betas is .* not a finite number"):
            check_groups([{"betas": value}])


def test_an_interrupted_load_is_no_damage(tmp_path):
    """torch collects the exceptions of all ranks, even interruptions, and sends them to all."""
    interruption = pickle.loads(pickle.dumps(Interrupted(signal.SIGTERM)))
    assert interruption.signal is signal.SIGTERM
    assert interruption.status == 143
    with pytest.raises(Interrupted, match="SIGTERM"), save_load._read_errors(tmp_path):
        raise CheckpointException("loading", {1: (interruption, None)})
    failures = {0: (DamagedError("x.distcp: broken"), None)}
    with (
        pytest.raises(UserError, match=r"cannot be read: x\.distcp: broken; give --ckpt-step"),
        save_load._read_errors(tmp_path),
    ):
        raise CheckpointException("loading", failures)


def test_a_tracker_is_not_written_through_a_link(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "checkpoints"
    folder.mkdir()
    victim.write_text("years of work")
    (folder / f"{TRACKER}.partial").symlink_to(victim)
    write_tracker(folder, 7)
    assert victim.read_text() == "years of work"
    assert (folder / TRACKER).read_text() == "7"
    assert not (folder / TRACKER).is_symlink()
