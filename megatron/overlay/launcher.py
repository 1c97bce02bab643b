"""Set up a process as the command line requests, and then run the script in it."""

import contextlib
import functools
import importlib
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from megatron import cpu_backend
from megatron.fake_quant import policy
from megatron.overlay import children, execution, module_sources, replacements
from megatron.overlay.command_line import Request, parse
from megatron.overlay.missing_packages import missing_packages
from megatron.overlay.module_sources import Sources

ROOT = Path(__file__).resolve().parents[2]
USAGE_ERROR = 2  #: exit status for a command line that cannot be carried out, as in argparse
RUN_ERROR = 1  #: exit status if the collection fails after the script has started

_reserved = socket.socket()  #: socket that reserves the port of a script with a single rank


def main() -> None:
    """Run `python -m megatron.overlay` with the arguments in `sys.argv`."""
    request = parse(sys.argv[1:])
    if not request.is_module and not Path(request.script).is_file():
        _refuse(f"there is no script {request.script}; give the path of a Python file")
    execution.prepare_path(request, ROOT)
    sources = module_sources.install()
    try:
        _set_up(request, sources)
        _import_core(sources)
        _check_collection(request)
        _announce(request, sources)
        _run(request)
    except ModuleNotFoundError as error:
        _refuse_missing_packages(error, request)
        raise
    if (failure := _collecting().finish(request)) is None:
        return
    if children.are_left():
        children.call_when_all_have_ended(lambda: _end(request))
        return
    _report(f"[ERROR] {failure}")
    sys.exit(RUN_ERROR)


def _end(request: Request) -> None:
    """Check the run again at Python's exit, and end this process with an error if it failed."""
    failure: str | None = "the end of the run could not be checked"
    try:
        failure = _collecting().finish(request)
    finally:
        if failure is not None:
            _report(f"[ERROR] {failure}")
            children.remove_folder()
            sys.stdout.flush()
            os._exit(RUN_ERROR)


def set_up_child() -> dict[str, Any]:
    """Set up a process that the script has spawned, and return the names that the script defines.

    The process has the `sys.path` of its parent.
    """
    request = children.request_of_parent()
    _set_up(request, module_sources.install())
    children.report_model_runs()
    return children.main_module(request)


def _set_up(request: Request, sources: Sources) -> None:
    """Prepare this process, and the processes that it spawns, for the script."""
    if not torch.cuda.is_available():
        _set_variables_without_cuda()
        script = [] if request.is_module else [Path(request.script).resolve().parent]
        cpu_backend.activate_for_scripts(*script, *sources.trees())
    children.prepare_children(request)
    try:
        policy.configure(**request.formats)
    except ValueError as error:
        _refuse(str(error))
    # The import of megatron-core takes seconds, and a spawned process may do without it.
    replacements.register(
        "megatron.core.tensor_saver", lambda module: _collecting().configure_later(request)
    )


def _import_core(sources: Sources) -> None:
    """Import megatron-core, or exit with a message if this project's overlay does not fit it."""
    try:
        importlib.import_module("megatron.core.tensor_saver")
    except ImportError as error:
        if error.name is not None:  # a package is missing, or a name in it
            raise
        advice = f"; or check out a supported release in {sources.core}" if sources.core else ""
        _refuse(f"{error}{advice}")
    _collecting().leave_exit_to_launcher()


def _check_collection(request: Request) -> None:
    try:
        _collecting().check(request)
    except ValueError as error:
        _refuse(str(error))


def _collecting() -> ModuleType:
    return importlib.import_module("megatron.overlay.collecting")


def _run(request: Request) -> None:
    """Run the script, and return if it ends normally; otherwise, raise its exception."""
    try:
        with _watching_ends(request):
            execution.execute(request)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


@contextlib.contextmanager
def _watching_ends(request: Request) -> Iterator[None]:
    """Check the run even if the script ends by `os._exit(0)`, and refuse `os.exec`.

    Python runs no further code of this process after either of them. `os.exec` is permitted if
    nothing is requested.
    """
    owner, leave, replacing = os.getpid(), os._exit, (os.execv, os.execve)

    def leave_checked(status: int) -> NoReturn:
        if os.getpid() == owner and status == 0:
            if (failure := _collecting().finish(request)) is not None:
                _report(f"[ERROR] {failure}")
                leave(RUN_ERROR)
            _collecting().end_without_atexit()
            children.remove_folder()
        leave(status)

    def refusing(replace: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(replace)
        def replace_checked(path: Any, *arguments: Any) -> NoReturn:
            requested = _collecting().requested(request)
            if os.getpid() == owner and requested is not None:
                raise ValueError(
                    f"{requested} is requested, and the script replaces itself by {path} "
                    "(os.exec), which would run without it; start that program with `python -m "
                    "megatron.overlay`"
                )
            replace(path, *arguments)

        return replace_checked

    os._exit = leave_checked
    os.execv, os.execve = map(refusing, replacing)
    try:
        yield
    finally:
        os._exit = leave
        os.execv, os.execve = replacing


def _announce(request: Request, sources: Sources) -> None:
    if os.environ.get("RANK", "0") != "0":
        return
    module = importlib.import_module("megatron.overlay.announcement")
    for line in module.announcement(request, sources):
        _report(f"[megatron.overlay] {line}")


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _refuse(message: str) -> NoReturn:
    """Print an error message on the first rank of the machine, and exit."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _report(f"[ERROR] {message}")
    sys.exit(USAGE_ERROR)


def _refuse_missing_packages(error: ModuleNotFoundError, request: Request) -> None:
    """Exit with a message that lists all missing packages, if `error` is about one of them."""
    if request.is_module:
        return
    folders = [Path(entry) for entry in sys.path if "site-packages" not in entry]
    missing = missing_packages(Path(request.script).resolve(), folders)
    if error.name is not None and error.name.partition(".")[0] in missing:
        _refuse(
            f"the script imports packages that are not installed: {', '.join(missing)}; "
            f"run `pip install {' '.join(missing)}`"
        )


def _set_variables_without_cuda() -> None:
    """Set torchrun's environment variables for one rank, and one that Megatron-LM's checks need."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    # The port stays bound, so that no other program takes it before the script listens on it. Both
    # can bind it, because both sockets have SO_REUSEADDR; torch sets it on its own socket.
    _reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved.bind(("127.0.0.1", 0))
    port = _reserved.getsockname()[1]
    one_rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    os.environ |= {name: str(value) for name, value in one_rank.items()}
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(port))
