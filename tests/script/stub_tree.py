"""Copy the drivers, with a stub as the training script, to a folder of any name."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from tests.subprocesses import REPO

DRIVERS = ("run_tensor_collection.sh", "run_tensor_draw.sh")
FAKE = Path(__file__).with_name("fake_training.py")
TRAINING = "examples/llama/train_llama32_1b_h100_fp8.sh"


def stub_tree(root: Path, behavior: str) -> Path:
    """Copy the drivers to `root`, with `fake_training.py` and this behavior as their training.

    The fake training writes its process IDs to `pids` in the folder of the tensors.
    """
    root.mkdir(parents=True)
    for name in DRIVERS:
        shutil.copy(REPO / name, root)
    shutil.copytree(REPO / "script", root / "script", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("megatron", "setup.py", "pretrain_gpt.py"):
        (root / name).symlink_to(REPO / name)
    (root / TRAINING).parent.mkdir(parents=True)
    real = shlex.quote(str(REPO / TRAINING))
    (root / TRAINING).write_text(
        f'if [[ -n ${{DRY_RUN-}} ]]; then exec bash {real} "$@"; fi\n'
        "while (($#)); do if [[ $1 == --tensor-save-dir ]]; then folder=$2; fi; shift; done\n"
        f'exec "$LAB_PYTHON" {shlex.quote(str(FAKE))} "$folder" {behavior}\n'
    )
    return root


def stub_drawing(tree: Path) -> None:
    """Make the drawing program of a stub tree hang, with a child process in its own session.

    The program writes both process IDs to `pids` in the folder of the tensors.
    """
    (tree / "script" / "visualization" / "tensor_visualizer.py").write_text(
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "import os\n"
        "folder = Path(sys.argv[sys.argv.index('--tensor_dir') + 1])\n"
        "words = [sys.executable, '-c', 'import time; time.sleep(600)', str(folder)]\n"
        "child = subprocess.Popen(words, start_new_session=True)\n"
        "(folder / 'partial').write_text(f'{os.getpid()} {child.pid}')\n"
        "(folder / 'partial').rename(folder / 'pids')\n"
        "time.sleep(600)\n"
    )
