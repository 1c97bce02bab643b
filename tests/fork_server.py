"""Start Python programs in forks of one process that has already imported torch and megatron-core.

    python tests/fork_server.py SOCKET IMPORTS LOCK

The arguments are the file descriptor of a listening socket, a key of IMPORTS below, and a file. A
process locks this file to connect to the socket or to remove it. A program starts at once instead
of after eight seconds of imports. `tests/forks.py` is the client. All test processes share one
server, which ends when none of them is connected.

A request on a connection is {"words", "cwd", "env", "ranks", "file_bytes"} as JSON, with three file
descriptors to write to: standard output, standard error, and a status pipe. The status pipe gets
one line with the ids of the process group and of all ranks, and one line with the exit status. A
program without ranks counts as one. A fourth file descriptor is the standard input, which is empty
otherwise.

A fork leaves the loop of the server and becomes the program: it has its own environment, working
directory, `argv` and `__main__`, and exits as the interpreter does. It differs from a new process
in one respect: the imports ran before, without the environment of the program.
"""

import atexit
import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

MEGATRON = Path(__file__).resolve().parents[1] / "megatron"
#: Modules of the CPU backend, in the order of their imports.
BACKEND = {
    "megatron.cpu_matmul": MEGATRON / "cpu_matmul.py",
    "cpu_backend_of_the_tests": MEGATRON / "cpu_backend.py",
}
CORE = ("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.optimizer")
IMPORTS = {
    # The program imports this tree and megatron-core itself, and also torch._dynamo, which reads
    # TORCHDYNAMO_DISABLE.
    "libraries": (
        *("torch.distributed.tensor", "numba", "pandas", "matplotlib.pyplot"),
        *(("triton",) if sys.platform == "linux" else ()),
    ),
    "wheel": CORE,
    "overlay": (*CORE, "megatron.core.tensor_saver"),
    "training": (
        *("megatron.training.checkpointing.save_load", "megatron.training.training"),
        "megatron.core.tokenizers.text.libraries",  # transformers
    ),
    "analysis": (
        *("megatron.analysis.__main__", "megatron.analysis.drawing", "megatron.analysis.report"),
        *("megatron.analysis.quick", "megatron.analysis.verification", "matplotlib.pyplot"),
    ),
}
AFTER_A_FAILURE = 0.1  #: seconds that the other ranks have to report their own failure
GRACE = 30.0  #: seconds from SIGTERM to SIGKILL; torchrun uses the same value, and the one above


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process locks a file, which is made if it does not exist, and lock it."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare(imports: str, lock: Path) -> None:
    """Import everything; no import may start a thread, because a fork has only one thread.

    The exception is the thread in which jemalloc, a part of pyarrow, returns memory to the system.
    """
    gc.disable()  # imports leave little garbage, and looking for it takes a second
    if imports == "wheel":  # the wheel has no such modules: load the files
        for name, path in BACKEND.items():
            spec = importlib.util.spec_from_file_location(name, path)
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        sys.modules["cpu_backend_of_the_tests"].activate()
    elif imports in ("overlay", "analysis"):
        importlib.import_module("megatron.cpu_backend").activate()
    elif imports == "training":
        importlib.import_module("megatron.training.device").prepare()
    # One server after the other; otherwise, several would compile the same modules and kernels.
    with warnings.catch_warnings(), locked(lock.with_name("imports")):
        warnings.simplefilter("ignore")  # warnings of the wheel about missing packages
        for name in IMPORTS[imports]:
            importlib.import_module(name)
        if imports not in ("wheel", "libraries"):
            load_kernels()
    for finalizer, call in list(weakref.finalize._registry.items()):
        if call.func.__module__ == "torch.library":
            finalizer.atexit = False  # All of them take 20 ms in each fork, to free memory.
    gc.freeze()
    gc.enable()


def load_kernels() -> None:
    """Quantize tensors that are large enough for the CPU kernels to be loaded.

    From then on they quantize small tensors too, several times faster than torch's operations.
    """
    import torch

    from megatron.fake_quant import fake_quantize

    for dtype in (torch.float32, torch.bfloat16):
        for axis in (0, 1):
            fake_quantize(torch.zeros(256, 256, dtype=dtype), "mxfp8", axis=axis)


def become(request: dict[str, Any], files: list[int], variables: dict[str, str]) -> Callable:
    """Turn this fork into the program, and return the function that runs it."""
    os.dup2(files[3] if len(files) > 3 else os.open(os.devnull, os.O_RDONLY), 0)
    for number, file in enumerate(files[:2], 1):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    for name in BORN_WITH - request["env"].keys():
        os.environ.pop(name, None)
    os.environ.update(request["env"] | variables)
    os.chdir(request["cwd"])
    if request["env"].get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True)
    if "PYTHONPATH" not in BORN_WITH:
        path = request["env"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[1:1] = [str(Path(folder).absolute()) for folder in path if folder]
    if request["file_bytes"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the call fails instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], resource.RLIM_INFINITY))
    return program(*request["words"])


def program(first: str, *rest: str) -> Callable:
    """Return what `python FIRST REST...` runs: a script, `-c CODE` or `-m MODULE`."""
    if first == "-m":
        sys.argv, sys.path[0] = list(rest), str(Path.cwd())
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv, sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    return lambda: exec(code, main.__dict__)


def launch(request: dict[str, Any], files: list[int]) -> Callable:
    """Start the ranks, wait for them and exit; in the fork of a rank, return what it runs."""
    os.setsid()  # so that the client can end all ranks
    count = request["ranks"]
    server = socket.create_server(("127.0.0.1", 0))
    port = str(server.getsockname()[1])
    ranks: dict[int, int] = {}
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            server.close()
            return become(request, files, of_rank(rank, count, port))
        ranks[pid] = rank
    store = store_of_ranks(server)
    os.write(files[2], (" ".join(map(str, [os.getpid(), *ranks])) + "\n").encode())
    status = wait(ranks, files[1])
    del store
    os.write(files[2], f"{status}\n".encode())
    os._exit(0)


def run_alone(request: dict[str, Any], files: list[int]) -> Callable:
    """Return what the fork of a program without ranks runs; the server reports its exit status."""
    os.setsid()  # so that the client can end the program with its children
    return become(request, files, {})


def of_rank(rank: int, count: int, port: str) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank."""
    ids = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in (ids | where).items()} | {
        "TORCHELASTIC_USE_AGENT_STORE": "True"
    }


def store_of_ranks(server: socket.socket) -> Any:
    """Return the store of the ranks, which outlives every rank, like the store of torchrun."""
    from torch.distributed import TCPStore

    port = server.getsockname()[1]
    listening = {"master_listen_fd": server.detach(), "wait_for_workers": False}
    listening["use_libuv"] = False  # with libuv, torch 2.6 does not accept a socket
    return TCPStore("127.0.0.1", port, None, is_master=True, **listening)


def wait(ranks: dict[int, int], errors: int) -> int:
    """Wait until all ranks have ended, end the others if one fails, and return the exit status."""
    failed = False
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code == 0 or failed:
            continue
        failed = True
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        os.write(errors, f"a rank has failed: rank {rank} with {how}\n".encode())
        time.sleep(AFTER_A_FAILURE)
        end(ranks, signal.SIGTERM)
        signal.signal(signal.SIGALRM, lambda *_: end(ranks, signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, GRACE)
    return int(failed)


def end(ranks: dict[int, int], number: signal.Signals) -> None:
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def serve(listener: socket.socket, lock: Path) -> Callable:
    """Answer requests until all clients are gone; in the fork of a program, return what it runs."""
    programs: dict[int, int] = {}  #: status pipes of programs without ranks, by process id
    signal.signal(signal.SIGCHLD, lambda *_: reap(programs))
    clients: list[socket.socket] = []
    while True:
        ready, _, _ = select.select([listener, *clients], [], [])
        for connection in ready:
            if connection is listener:
                clients.append(listener.accept()[0])
                continue
            length, files, _, _ = socket.recv_fds(connection, 8, 4)
            if not length:
                clients.remove(connection)
                connection.close()
                continue
            message = b""
            while len(message) < int.from_bytes(length, "big"):
                message += connection.recv(1 << 16)
            request = json.loads(message)
            alone = request["ranks"] is None
            # A program that ends immediately must be in `programs` before it is reaped.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                for inherited in (listener, *clients):
                    inherited.close()
                for status_pipe in programs.values():
                    os.close(status_pipe)
                return (run_alone if alone else launch)(request, files)
            if alone:
                programs[pid] = os.dup(files[2])
                write_line(files[2], f"{pid} {pid}")
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            for file in files:
                os.close(file)
        if not clients and closed(listener, lock):
            return leave


def closed(listener: socket.socket, lock: Path) -> bool:
    """Close the listening socket unless a client is connecting; return whether it is closed."""
    with locked(lock):
        if select.select([listener], [], [], 0)[0]:
            return False
        Path(listener.getsockname()).unlink(missing_ok=True)
        listener.close()
        return True


def reap(programs: dict[int, int]) -> None:
    """Reap the processes that have ended, and report the exit status of programs without ranks."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid in programs:
                file = programs.pop(pid)
                write_line(file, str(os.waitstatus_to_exitcode(status)))
                os.close(file)


def write_line(file: int, text: str) -> None:
    """Write a line to a status pipe, unless its reader has ended."""
    with contextlib.suppress(BrokenPipeError):
        os.write(file, f"{text}\n".encode())


def leave() -> NoReturn:
    sys.exit(0)


def exit_quickly(status: int) -> NoReturn:
    """Exit as the interpreter does, but without freeing a million objects in a copy of their pages.

    That would take 0.3 s. Other exceptions than SystemExit take the interpreter's usual way.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError, AttributeError):
        sys.exit(status)  # The interpreter reports what cannot be written.
    os._exit(status & 0xFF)


if __name__ == "__main__":
    BORN_WITH = set(os.environ)
    prepare(sys.argv[2], Path(sys.argv[3]))
    run = serve(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[3]))
    try:
        run()
    except SystemExit as stop:
        if not (stop.code is None or isinstance(stop.code, int)):
            raise
        exit_quickly(stop.code or 0)
    exit_quickly(0)
