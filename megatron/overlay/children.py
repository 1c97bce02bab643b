"""Set up the processes that the script starts by multiprocessing like the script's own process.

A spawned process executes the main module of its parent again, under the name `__mp_main__`, before
it unpickles its task. This module puts `child_main.py` in the place of the parent's main module.
`child_main.py` finds the command line in the environment, sets up the process, and then executes
the script. The same holds for the `forkserver` method. A forked process needs none of this.
"""

import contextlib
import functools
import json
import multiprocessing
import multiprocessing.util
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Callable
from multiprocessing import spawn
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.overlay import replacements
from megatron.overlay.command_line import Request, parse

#: environment variable with the command line of the launcher, for the processes of the script
VARIABLE = "MEGATRON_OVERLAY_COMMAND"
#: environment variable with a folder in which each process that has run a model creates a file
FOLDER = "MEGATRON_OVERLAY_FOLDER"
_owner = 0  #: ID of the process that has made this folder
_reporter = 0  #: ID of the process that reports when it ends
CHILD = Path(__file__).with_name("child_main.py")


def prepare_children(request: Request) -> None:
    """Set up all processes that this one starts by multiprocessing from now on."""
    script = request.script if request.is_module else str(Path(request.script).absolute())
    os.environ[VARIABLE] = json.dumps([*request.words, script])
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        _make_folder()
        data = original(name)
        data.pop("init_main_from_name", None)
        return data | {"init_main_from_path": str(CHILD)}

    spawn.get_preparation_data = get_preparation_data


def _make_folder() -> None:
    """Make the folder for the files of spawned processes, unless a parent has made it."""
    global _owner
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="megatron_overlay_")
        _owner = os.getpid()
        multiprocessing.util.Finalize(None, remove_folder, exitpriority=-2)


def remove_folder() -> None:
    """Remove the folder that this process has made, if any; called when the process ends."""
    if os.getpid() == _owner:
        shutil.rmtree(os.environ[FOLDER], ignore_errors=True)


def report_model_runs() -> None:
    """Let this process report to its parents when it runs a model, and again when it ends.

    A process of a pool is killed when it is no longer needed, so nothing runs at its end.
    """

    def begin(program_end: ModuleType) -> None:
        program_end.call_on_change(_report)
        _report_at_end()

    replacements.register("megatron.core.low_precision.program_end", begin)


def _report_at_end() -> None:
    global _reporter
    if _reporter != os.getpid():  # a process of a fork server has an end of its own
        _reporter = os.getpid()
        multiprocessing.util.Finalize(None, _report, exitpriority=1)


def _report() -> None:
    """Create this process's file if it ran a model without a failure; otherwise, remove it."""
    _report_at_end()
    program_end = sys.modules["megatron.core.low_precision.program_end"]
    file = Path(os.environ[FOLDER], str(os.getpid()))
    failed = program_end.ended_by_error() or program_end.failure() is not None
    with contextlib.suppress(FileNotFoundError):  # the parents have ended
        if program_end.a_model_ran() and not failed:
            file.touch()
        else:
            file.unlink()


def any_has_run_a_model() -> bool:
    """Return whether a process spawned by this one or by a descendant ran a model without failure.

    Forks report this in a different way; see `program_end.a_model_ran`.
    """
    folder = os.environ.get(FOLDER)
    return folder is not None and any(Path(folder).iterdir())


def are_left() -> bool:
    """Return whether this process has children for which Python will wait at its exit."""
    return any(not process.daemon for process in multiprocessing.active_children())


def call_when_all_have_ended(function: Callable[[], None]) -> None:
    """Call a function at Python's exit, after Python has waited for this process's children."""
    multiprocessing.util.Finalize(None, function, exitpriority=-1)


def request_of_parent() -> Request:
    """Return the command line of the launcher in the parent process."""
    return parse(json.loads(os.environ[VARIABLE]))


def main_module(request: Request) -> dict[str, Any]:
    """Execute the script as multiprocessing does, and return the names that it defines."""
    run = runpy.run_module if request.is_module else runpy.run_path
    return run(request.script, run_name="__mp_main__")
