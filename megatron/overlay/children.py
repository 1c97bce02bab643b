"""Set up the processes that the script starts by multiprocessing like the script's own process.

A spawned process executes the main module of its parent again, under the name `__mp_main__`, before
it unpickles its task. This module puts `child_main.py` in the place of the parent's main module.
`child_main.py` finds the command line in the environment, sets up the process, and then executes
the script. The same holds for the `forkserver` method. A forked process needs none of this.
"""

import functools
import json
import os
import runpy
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from megatron.overlay.command_line import Request, parse

#: environment variable with the command line of the launcher, for the processes of the script
VARIABLE = "MEGATRON_OVERLAY_COMMAND"
_started = False  #: whether this process has started another one that is not a fork
CHILD = Path(__file__).with_name("child_main.py")


def prepare_children(request: Request) -> None:
    """Set up all processes that this one starts by multiprocessing from now on."""
    script = request.script if request.is_module else str(Path(request.script).absolute())
    os.environ[VARIABLE] = json.dumps([*request.words, script])
    os.register_at_fork(after_in_child=_forget_start)
    original = spawn.get_preparation_data

    @functools.wraps(original)
    def get_preparation_data(name: str) -> dict[str, Any]:
        _note_start()
        data = original(name)
        data.pop("init_main_from_name", None)
        return data | {"init_main_from_path": str(CHILD)}

    spawn.get_preparation_data = get_preparation_data


def _note_start() -> None:
    global _started
    _started = True


def _forget_start() -> None:
    global _started
    _started = False


def any_started() -> bool:
    """Return whether this process has started another one, which may run the model.

    Forks are left out: they tell this process whether they have run a model.
    """
    return _started


def request_of_parent() -> Request:
    """Return the command line of the launcher in the parent process."""
    return parse(json.loads(os.environ[VARIABLE]))


def main_module(request: Request) -> dict[str, Any]:
    """Execute the script as multiprocessing does, and return the names that it defines."""
    run = runpy.run_module if request.is_module else runpy.run_path
    return run(request.script, run_name="__mp_main__")
