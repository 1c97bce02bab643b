"""Entry point of `python -m megatron.overlay` and of `python FOLDER/megatron/overlay`."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])

if __name__ == "__main__":
    by_folder = not __package__
    if by_folder:  # the folder of this file is then the first entry of sys.path
        sys.path[0] = ROOT
    from megatron.overlay.launcher import main

    main()
