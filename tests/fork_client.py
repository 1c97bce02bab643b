"""Run a Python command in a fork, if a fork server has imported the modules that it needs.

    python -I -S fork_client.py REAL SOCKETS EXECUTABLE WORD...

`tests/forks.py` gives shell scripts the interpreter EXECUTABLE, which passes some commands WORD...
to this program. It sends them to the servers whose sockets are in the folder SOCKETS. The fork has
the standard streams and the environment of this process, which passes signals on
and waits. If no server fits, this process becomes the interpreter REAL with the name EXECUTABLE.

Only the standard library is imported, so that this program starts at once.
"""

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
#: Programs that import the tree in the fork: those of a copy of the tree, those that prepare data,
#: and workers of benchmarks.
PROGRAMS = (
    *("pretrain_gpt.py", "tensor_visualizer.py", "prepare.py"),
    *("training_worker.py", "analysis_worker.py"),
)
#: Argument that names the module that looks up quantization types, and imports only torch.
POLICY = "megatron.fake_quant.policy"
#: Variables that are read when torch or megatron-core is imported; a fork would ignore them.
AT_IMPORT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": None,
    "CUDA_VISIBLE_DEVICES": None,
    "TRITON_INTERPRET": None,
}


def server_of(words: list[str]) -> str | None:
    """Return the name of the server that suits a command, or None if there is none."""
    if any(os.environ.get(name) != value for name, value in AT_IMPORT.items()):
        return None
    if words[0] == "-c":
        return "analysis" if any(POLICY in word for word in words[1:3]) else None
    script = Path(words[0]).resolve()
    if script == REPO / "pretrain_gpt.py":
        return "training"
    if script.parent == REPO / "script" / "visualization":
        return "analysis"
    return "libraries" if script.name in PROGRAMS else None


def run_in_fork(connection: socket.socket, words: list[str]) -> int:
    """Let a server run a command, and return its status.

    The status is the exit status, or the negative number of the signal that ended the command.
    """
    request = {"words": words, "cwd": str(Path.cwd()), "env": dict(os.environ)}
    message = json.dumps(request | {"ranks": None, "file_bytes": None}).encode()
    read, write = os.pipe()
    socket.send_fds(connection, [len(message).to_bytes(8, "big")], [1, 2, write, 0])
    connection.sendall(message)
    os.close(write)
    with os.fdopen(read) as status:
        _, *processes = map(int, status.readline().split())

        def pass_on(number: int, _: object) -> None:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, pass_on)
        for descriptor in (0, 1, 2):  # the fork alone keeps its streams open
            os.close(descriptor)
        return int(status.readline())


def main() -> None:
    real, sockets, executable, *words = sys.argv[1:]
    if (name := server_of(words)) is not None:
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(str(Path(sockets) / f"{name}.socket"))
            status = run_in_fork(connection, words)
            if status < 0:
                signal.signal(-status, signal.SIG_DFL)
                os.kill(os.getpid(), -status)
            os._exit(status)
    os.execv(real, [executable, *words])


if __name__ == "__main__":
    main()
