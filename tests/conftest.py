"""Settings of all tests: default signals, rare garbage collection, order, and the quick tier.

Signals that were ignored where pytest was started (under nohup, or in the background of a script)
would be ignored by the processes that tests start and interrupt.
"""

import fcntl
import gc
import re
import shutil
import signal
import sys
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from tests import forks
from tests.subprocesses import REPO

#: Files that take long. They run first, so that no worker is left with one at the end.
LONGEST_FIRST = (
    "tests/fake_quant/test_triton.py",
    "tests/core/test_non_interference.py",
    "tests/training/test_golden.py",
    "tests/training/test_parallel.py",
)
#: Test of the READMEs, which takes minutes too. It runs after all tests of the folders up to this
#: one, which compile the kernels that it needs.
READMES, AFTER = "tests/test_readme.py", "tests/fake_quant/"
#: The source of a test file that starts processes, which import megatron-core for seconds or train.
STARTS_PROCESSES = re.compile(
    r"^(from|import) .*\b(forks|subprocess|subprocesses|drivers|runs|stub_tree|watching|browser)\b"
    r"|^from tests\.core|^from tests\.training\.(golden|runs)|def \w+\([^)]*\b(dumps|copied)\b",
    re.M,
)
#: Files that start processes but are quick.
QUICK_ANYWAY = ("test_imports.py",)
#: Beginnings of the names of further tests that `--quick` leaves out, because each takes seconds.
LONG = (
    "tests/analysis/dump/test_forged_texts.py",
    "tests/analysis/dump/test_index.py::test_a_large_index",
    "tests/analysis/dump/test_strange_dumps.py",
    "tests/analysis/figures",
    "tests/analysis/outputs",
    "tests/analysis/report",
    "tests/analysis/stats/test_clipping.py",
    "tests/analysis/test_draw.py",
    "tests/analysis/test_judging.py",
    "tests/fake_quant/test_compile.py",
    "tests/fake_quant/test_packing.py::test_dequantized_it_is_what_fake_quantize_gives",
    "tests/fake_quant/test_properties.py",
    "tests/fake_quant/test_quantize.py::test_any_axis_is_a_loop_over_its_vectors",
    "tests/fake_quant/test_stochastic_bias.py",
    "tests/fake_quant/scalings/test_tensor_scale.py::test_tensors_over_every_binade",
)

#: Folder of compiled modules, which exists once a worker has started to import the tests.
COMPILED = Path(cache_from_source(str(REPO / "megatron" / "fake_quant" / "x.py"))).parent

gc.set_threshold(100_000, 20, 100)  # imports make a million objects; this saves an eighth

for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (getattr(signal, "SIGHUP", signal.SIGTERM), signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


@pytest.fixture(scope="session")
def common_folder(request):
    """Return the temporary folder that all test processes of a run share."""
    return _common_folder(request.config)


@pytest.fixture(scope="session")
def made_once(common_folder):
    """Return a function that returns a read-only folder, which all test processes of a run share.

    `make` writes the folder in the first process that needs it; the others wait.
    """

    def folder(name: str, make: Callable[[Path], object]) -> Path:
        target, complete = common_folder / name, common_folder / f"{name}.complete"
        with (common_folder / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete.exists():
                shutil.rmtree(target, ignore_errors=True)  # what a failed attempt left
                target.mkdir()
                make(target)
                complete.touch()
        return target

    return folder


@pytest.fixture(scope="session", autouse=True)
def _sockets_of_fork_servers(common_folder):
    """Let all test processes of a run share the servers of `tests/forks.py`."""
    forks.sockets = common_folder


def _common_folder(config):
    folder = config._tmp_path_factory.getbasetemp()
    return folder.parent if hasattr(config, "workerinput") else folder


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Let the first worker collect alone in a clean checkout, while Python compiles all modules.

    Otherwise, each worker would compile them.
    """
    if not hasattr(session.config, "workerinput") or sys.dont_write_bytecode:
        return (yield)
    with (_common_folder(session.config) / "collection").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if COMPILED.is_dir():
            fcntl.flock(lock, fcntl.LOCK_UN)
        return (yield)


def pytest_collection_finish():
    """Let later garbage collections skip the modules and the tests, which are never garbage."""
    gc.freeze()


def pytest_runtest_teardown():
    """Let the next test set environment variables of its own; see `policy.check_environment`."""
    if (policy := sys.modules.get("megatron.fake_quant.policy")) is not None:
        policy._environment = {}


def pytest_addoption(parser):
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out tests that start processes or take seconds each",
    )


def pytest_ignore_collect(collection_path, config):
    """Leave out the files that start processes without importing them, if `--quick` is given."""
    name = collection_path.name
    if not config.getoption("--quick") or not name.startswith("test_") or name in QUICK_ANYWAY:
        return None
    return bool(STARTS_PROCESSES.search(collection_path.read_text())) or None


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: _place(item.nodeid.partition("::")[0]))
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid.startswith(LONG)])
        items[:] = [item for item in items if not item.nodeid.startswith(LONG)]


def _place(file: str) -> int:
    """Return a number by which files are sorted; files with the same number keep their order."""
    first = len(LONGEST_FIRST)
    if file in LONGEST_FIRST:
        return LONGEST_FIRST.index(file)
    if file == READMES:
        return first + 1
    return first if file < AFTER or file.startswith(AFTER) else first + 2
