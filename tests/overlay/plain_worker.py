"""Run a script with plain megatron-core and the CPU backend, without the overlay.

    python tests/overlay/plain_worker.py SCRIPT ARGUMENTS

Tests compare its results with those of `python -m megatron.overlay SCRIPT ARGUMENTS`. The current
folder is the root of the script's source tree.
"""

import importlib.machinery
import importlib.util
import os
import runpy
import sys
from pathlib import Path

from megatron import __path__ as folders

REPO = Path(__file__).resolve().parents[2]
#: Module name of the CPU backend, which `tests/fork_server.py` may already have loaded.
LOADED = "cpu_backend_of_the_tests"


def backend():
    files = {"megatron.cpu_matmul": "cpu_matmul.py", LOADED: "cpu_backend.py"}
    for name, file in files.items():
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, REPO / "megatron" / file)
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    return sys.modules[LOADED]


class Helpers:
    """Import finder for the installed megatron-core's compiled helpers, absent from a checkout."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "megatron.core.datasets.helpers_cpp":
            return None
        places = [str(Path(folder, "core", "datasets")) for folder in folders]
        return importlib.machinery.PathFinder.find_spec(name, places)


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)
    assert str(REPO) not in sys.path, "the overlay would be used"
    tree = Path.cwd()
    backend().activate_for_scripts(script.parent, tree)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if "RANK" not in os.environ:
        rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(rank | {"MASTER_PORT": "29571"})
    sys.meta_path.insert(0, Helpers)
    if (tree / "megatron" / "legacy").is_dir():
        from megatron.core.datasets import utils
        from megatron.legacy import fused_kernels

        utils.compile_helpers = lambda: None
        fused_kernels.load = lambda args: None
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
