"""Run Python programs in forks of a process that has already imported what they need.

All tests that start training or a layer, and check what it computes or prints, use this module; see
`tests/fork_server.py`. Tests of how the process of a user starts use `tests/subprocesses.py`.
"""

import atexit
import contextlib
import fcntl
import functools
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fork_client import AT_IMPORT, POLICY
from tests.subprocesses import REPO, TIMEOUT, environment

SERVER = Path(__file__).with_name("fork_server.py")
TRAINING = (
    *(REPO / "pretrain_gpt.py", REPO / "tests" / "training"),
    *(REPO / "script" / "data", REPO / "script" / "study.py"),
    REPO / "tests" / "script" / "parameters_worker.py",
)
ANALYSIS = (
    REPO / "script" / "visualization",
    REPO / "tests" / "analysis" / "dump" / "hostile_worker.py",
)
#: Shell script that `interpreter` writes as the interpreter.
WRAPPER = """#!/bin/bash
case "$1 $2 $3" in
  *pretrain_gpt.py* | */visualization/* | *prepare.py* | *_worker.py* | *{policy}*)
    exec {real} -I -S {client} {real} {sockets} "$0" "$@" ;;
esac
exec -a "$0" {real} "$@"
"""


_running: set[int] = set()  #: process groups that no test has waited for
#: Folder of the servers' sockets, which `tests/conftest.py` sets; all test processes share it.
sockets: Path | None = None
_started: list[subprocess.Popen] = []  #: servers that this process has started


@functools.cache
def _server(imports: str) -> socket.socket:
    """Return a connection to a server, which the first request of any test process starts."""
    if sockets is None:
        raise RuntimeError("tests/conftest.py has not set `sockets`: run the test by pytest")
    connection = socket.socket(socket.AF_UNIX)
    path, lock = sockets / f"{imports}.socket", sockets / "lock"
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            path.unlink(missing_ok=True)
            _start_server(imports, path, lock)
            connection.connect(str(path))

    def stop() -> None:
        for group in _running.copy():  # programs of tests that failed
            _end(group)
        connection.close()

    atexit.register(stop)
    return connection


def _start_server(imports: str, path: Path, lock: Path) -> None:
    bare = imports in ("wheel", "libraries")
    env = environment() if bare else environment(PYTHONPATH=REPO)
    if imports in ("analysis", "libraries"):
        env["MPLBACKEND"] = "agg"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        server = subprocess.Popen(
            [sys.executable, str(SERVER), str(listener.fileno()), imports, str(lock)],
            cwd="/",
            env=env,
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
    _started.append(server)


@functools.cache
def interpreter(*servers: str) -> Path:
    """Return an interpreter for shell scripts, whose slowest commands run in forks.

    These commands train, draw, and look up quantization types; see `tests/fork_client.py`. A
    test that kills processes, or is about the start of a process, needs the real interpreter.

    Args:
        servers: keys of `fork_server.IMPORTS`; commands for other servers run in new processes.
    """
    for server in servers:
        _server(server)
    folder = sockets / "interpreter"
    path = folder / "bin" / "python"
    with (sockets / "lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not path.exists():
            _make_interpreter(folder, path)
    return path


def _make_interpreter(folder: Path, path: Path) -> None:
    """Make a virtual environment with the packages of this one, and with the wrapper as Python."""
    path.parent.mkdir(parents=True)
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    config = Path(sys.prefix) / "pyvenv.cfg"
    home = f"home = {Path(sys._base_executable).parent}\n"
    (folder / "pyvenv.cfg").write_text(config.read_text() if config.exists() else home)
    client = Path(__file__).with_name("fork_client.py")
    named = {"real": sys._base_executable, "client": client, "sockets": sockets, "policy": POLICY}
    words = {name: shlex.quote(str(value)) for name, value in named.items()}
    partial = path.with_suffix(".partial")
    partial.write_text(WRAPPER.format(**words))
    partial.chmod(0o755)
    partial.rename(path)


def _end(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class Program:
    """A running program, with a part of the interface of subprocess.Popen."""

    def __init__(self, words: Sequence[str], files: Sequence[int]) -> None:
        self.returncode: int | None = None
        self._words, self._files = words, files
        ids = b""
        while not ids.endswith(b"\n"):
            if not (part := os.read(files[2], 1)):
                raise RuntimeError(f"the fork server has ended; its last program was {words}")
            ids += part
        self._group, *self.pids = map(int, ids.split())
        _running.add(self._group)

    def send_signal(self, number: int) -> None:
        """Send a signal to every running rank directly, not through a launcher."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = TIMEOUT) -> tuple[str, str]:
        """Wait until the program, and every process that holds its output open, has ended."""
        texts, until = {file: b"" for file in self._files}, time.monotonic() + timeout
        try:
            with selectors.DefaultSelector() as selector:
                for file in self._files:
                    selector.register(file, selectors.EVENT_READ)
                while selector.get_map():
                    ready = selector.select(max(0.0, until - time.monotonic()))
                    if not ready:
                        output, errors, _ = texts.values()
                        raise subprocess.TimeoutExpired(self._words, timeout, output, errors)
                    for key, _ in ready:
                        part = os.read(key.fd, 1 << 16)
                        texts[key.fd] += part
                        if not part:
                            selector.unregister(key.fd)
        except BaseException:
            _end(self._group)
            raise
        finally:
            _running.discard(self._group)
            for file in self._files:
                os.close(file)
        output, errors, status = (text.decode() for text in texts.values())
        self.returncode = int(status)
        return output, errors


def start(
    *words: str | Path,
    ranks: int | None = None,
    cwd: Path = REPO,
    env: dict[str, str] | None = None,
    file_bytes: int | None = None,
    unread: bool = False,
    libraries_only: bool = False,
) -> Program:
    """Start `python WORDS...`: a script, `-c CODE` or `-m MODULE`.

    Args:
        ranks: number of torchrun ranks; None starts a single process without torchrun.
        file_bytes: size of the largest file that can be written, as if the disk were full.
        unread: whether standard output is a pipe whose reader has ended; nothing of it is returned.
        libraries_only: whether the program itself imports this tree and megatron-core, as a new
            process does; only torch and other libraries are imported before.
    """
    env = environment() if env is None else env
    usual = environment()
    for name in AT_IMPORT:
        if libraries_only and name == "TORCHDYNAMO_DISABLE":
            continue
        if env.get(name) != usual.get(name):
            raise ValueError(f"{name} is read by imports: use tests.subprocesses")
    command = [str(word) for word in words]
    request = {"words": command, "cwd": str(cwd), "env": env}
    request |= {"ranks": ranks, "file_bytes": file_bytes}
    message = json.dumps(request).encode()
    reads, writes = zip(*(os.pipe() for _ in range(3)), strict=True)
    if unread:
        os.close(reads[0])
        ended, end = os.pipe()  # nothing can be read from it here, either
        os.close(end)
        reads = (ended, *reads[1:])
    server = _server("libraries" if libraries_only else _imports(command, env))
    socket.send_fds(server, [len(message).to_bytes(8, "big")], writes)
    server.sendall(message)
    for file in writes:
        os.close(file)
    return Program(command, reads)


def _imports(words: Sequence[str], env: dict[str, str]) -> str:
    script = Path(words[0])
    if any(script.is_relative_to(place) for place in TRAINING):
        return "training"
    if any(script.is_relative_to(place) for place in ANALYSIS):
        return "analysis"
    if any("megatron.analysis" in word for word in words[:2]):
        return "analysis"
    return "overlay" if "PYTHONPATH" in env else "wheel"


def run(
    *words: str | Path,
    ranks: int | None = None,
    cwd: Path = REPO,
    env: dict[str, str] | None = None,
    file_bytes: int | None = None,
    unread: bool = False,
    libraries_only: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program as `start` does, and return its output and exit status."""
    program = start(
        *words,
        ranks=ranks,
        cwd=cwd,
        env=env,
        file_bytes=file_bytes,
        unread=unread,
        libraries_only=libraries_only,
    )
    output, errors = program.communicate()
    return subprocess.CompletedProcess(list(words), program.returncode, output, errors)
