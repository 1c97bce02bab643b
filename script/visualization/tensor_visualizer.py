#!/usr/bin/env python3
"""Everything that can be drawn of collected tensors, and report.html.

    python script/visualization/tensor_visualizer.py --tensor_dir enhanced_tensor_logs
    --output_dir draw

The same as `python -m megatron.analysis draw DIR`, whose other options it takes too: --formats,
--figures, --image, --run, --workers; see `python -m megatron.analysis draw --help`.

Exit status: 0 all is drawn; 2 a wrong option or folder; 3 drawn without files that could not be
read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def run(command: str, description: str | None, arguments: list[str] | None) -> int:
    """A command of `python -m megatron.analysis` under the user's names of its folders; returns
    the exit status.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tensor_dir", "--tensor-dir", default="enhanced_tensor_logs", metavar="DIR",
        help="folder with .pt files, searched with its subfolders (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--output_dir", "--output-dir", default="draw", metavar="DIR",
        help="made if missing (default: %(default)s)",
    )  # fmt: skip
    known, others = parser.parse_known_args(arguments)
    from megatron.analysis.__main__ import main as analysis

    return analysis([command, known.tensor_dir, "--output-dir", known.output_dir, *others])


def main(arguments: list[str] | None = None) -> int:
    """Draw; returns the exit status."""
    return run("draw", __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
