"""Execute the script as Python does: its arguments, its folder in `sys.path`, and `__main__`."""

import importlib.machinery
import io
import runpy
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

from megatron.overlay.command_line import Request

OURS = Path(__file__).resolve().parents[1]  #: folder `megatron` of this tree
#: files whose frames precede those of the script in a traceback
_BEFORE_SCRIPT = (__file__, runpy.__file__, "<frozen runpy>")


def prepare_path(request: Request, root: Path) -> None:
    """Set `sys.argv` and `sys.path` as the script expects them, without this project's folder.

    The modules of this tree outside of `megatron`, such as its `tests`, are then no longer found.
    """
    sys.argv = [request.script, *request.arguments]
    safe = getattr(sys.flags, "safe_path", False)  # Python 3.11 or newer: no folder comes first
    first = [] if safe else [sys.path[0]]
    others = sys.path if safe else sys.path[1:]
    if first and request.is_module:
        first = [str(Path.cwd())]
    elif first:
        first = [str(Path(request.script).resolve().parent)]
    sys.path[:] = first + [entry for entry in others if Path(entry).resolve() != root]


def execute(request: Request) -> None:
    """Run the script or module as `__main__`, so that errors are printed as by Python itself."""
    sys.excepthook = _print_error
    if request.is_module:
        runpy.run_module(request.script, run_name="__main__", alter_sys=True)
        return
    path = str(Path(request.script).absolute())
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec")
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _print_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback that begins with the script, without the frames of the launcher.

    An error that this project raises for a user's mistake is printed as one line.
    """
    if kind is ValueError and trace is not None and _is_ours(trace):
        print(f"[ERROR] {error}", file=sys.stderr, flush=True)
        return
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename != __file__:
        first = first.tb_next
    while first is not None and first.tb_frame.f_code.co_filename in _BEFORE_SCRIPT:
        first = first.tb_next
    traceback.print_exception(kind, error, first or trace)


def _is_ours(trace: TracebackType) -> bool:
    """Return whether a file of this project, and not one of megatron-core, raised the error."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return Path(trace.tb_frame.f_code.co_filename).resolve().is_relative_to(OURS)
