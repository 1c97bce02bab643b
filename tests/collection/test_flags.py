"""Test the table of the collection's flags: each flag has a reader, and printed tables agree."""

import importlib
import inspect
import subprocess
import sys

import pytest

from megatron.analysis.verification import completeness
from megatron.collection import flag_tables
from megatron.collection.flags import FLAGS, Reader, Topic, by_reader, read_by
from megatron.collection.loss_spikes import Jumps
from tests.subprocesses import REPO

#: Parameters of the readers that are not flags.
OTHER_PARAMETERS = {"num_layers", "world_size", "directory", "train_iters", "iteration"}


def parameters(reader: Reader) -> dict[str, inspect.Parameter]:
    """Return the parameters of a reader that stand for flags."""
    module, *names = reader.value.split(".")
    function = importlib.import_module(f"megatron.collection.{module}")
    for name in names:
        function = getattr(function, name)
    taken = dict(inspect.signature(function).parameters)
    if taken.pop("jumps", None):
        taken |= inspect.signature(Jumps.parse).parameters
    return {name: taken[name] for name in taken.keys() - OTHER_PARAMETERS}


@pytest.mark.parametrize("reader", [reader for reader in Reader if reader is not Reader.SESSION])
def test_every_flag_is_a_parameter_of_its_reader_with_the_same_default(reader):
    flags = {flag.name: flag.default for flag in read_by(reader)}
    assert flags == {name: value.default for name, value in parameters(reader).items()}


def test_the_session_reads_the_flags_that_are_left():
    names = {flag.name.removeprefix("tensor_") for flag in read_by(Reader.SESSION)}
    taken = {"collect_plan" if name == "plan" else name for name in parameters(Reader.SESSION)}
    assert names <= taken


def test_names_are_unique_and_each_flag_is_described():
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    for flag in FLAGS:
        assert flag.help
        assert bool(flag.metavar) == (flag.type is not bool), flag.name
        assert bool(flag.brief) == (flag.topic is not Topic.NONE), flag.name


def test_an_unknown_flag_is_refused():
    with pytest.raises(ValueError, match=r"unknown flag\(s\) of the collection: collect_layer; "):
        by_reader({"collect_layer": "all", "collect_start": 2})


def test_the_page_and_the_manual_of_the_driver_agree_with_the_table():
    for path, update in (
        (flag_tables.PAGE, flag_tables.updated_page),
        (flag_tables.DRIVER, flag_tables.updated_driver),
    ):
        text = path.read_text(encoding="utf-8")
        assert text == update(text), "run python -m megatron.collection.flag_tables"


def test_the_check_of_completeness_knows_every_flag_that_selects_tensors():
    """If the check lacked a flag, tensors that were not requested would count as missing."""
    counted = {"collect_layers", "collect_micro_batches"}  # compared with the records by number
    refine = {"collect_ring_events", "collect_loss_jump", "collect_grad_norm_jump"}
    selecting = (Reader.SELECTION, Reader.RING, Reader.FLAG_FILE)
    flags = {flag.name: flag for reader in selecting for flag in read_by(reader)}
    known = completeness._ITERATIONS | completeness._TENSORS
    assert known.keys() | counted | refine == flags.keys()
    for name, everything in known.items():
        assert flags[name].default in everything


def test_the_driver_passes_on_every_flag_that_has_a_value():
    command = f'. "{REPO}/script/driver.sh"; echo $collection_flags'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    expected = [
        flag.option.removeprefix("--")
        for flag in FLAGS
        if flag.type is not bool and flag.name.startswith("collect_")
    ]
    assert done.stdout.split() == expected


def test_the_table_and_what_the_drivers_read_with_it_need_no_torch():
    code = (
        "import sys; sys.path.insert(0, 'script'); import configs.collection_size; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO).returncode == 0
