"""Main module of a process that the script has spawned; see `children.py`."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])

if __name__ == "__mp_main__":
    sys.path.insert(0, ROOT)
    from megatron.overlay import launcher

    sys.path.remove(ROOT)
    globals().update(launcher.set_up_child())
