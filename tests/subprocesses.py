"""Run parts of the project in new processes, as a user would start them."""

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
NO_SETTINGS = REPO / "tests" / "data" / "no_settings.json"
TIMEOUT = 300  #: seconds; a hanging rank fails the test instead of the whole run
_OURS = (
    "PYTHONPATH",
    "CUSTOM_QUANT_TYPE",
    "LINEAR_QUANT_TYPE",
    "QK_QUANT_TYPE",
    "PV_QUANT_TYPE",
    "TENSOR_SAVE_ENABLED",
    "TENSOR_SAVE_DIR",
    "START_ITERATIONS",
)


def environment(**changes: str | Path) -> dict[str, str]:
    """Return the environment without variables of this project, and with `changes`."""
    clean = {key: value for key, value in os.environ.items() if key not in _OURS}
    clean["OMP_NUM_THREADS"] = "1"
    clean["QUANT_SETTINGS_FILE"] = str(NO_SETTINGS)  # ignores the settings file of the developer
    return clean | {key: str(value) for key, value in changes.items()}


def free_port() -> int:
    """Return a port of this machine that no process uses.

    The system gives connections ports from 32768 on, so none of them takes this one meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as server:
            server.bind(("127.0.0.1", port))
            return port


def run(
    command: Sequence[str | Path], *, cwd: Path = REPO, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its output and exit status."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment() if env is None else env,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def torchrun(
    script: Path,
    *arguments: str | Path,
    ranks: int = 1,
    cwd: Path = REPO,
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script under torchrun on this machine."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    return run([sys.executable, *launcher, *where, script, *arguments], cwd=cwd, env=env)
