#!/usr/bin/env python3
"""Draw a first overview of the collected tensors: quick_analysis.png and tensor_stats.txt.

    python script/visualization/quick_visualize.py --tensor_dir enhanced_tensor_logs/mxfp8 \\
        --output_dir draw

This script runs `python -m megatron.analysis quick DIR` and also accepts its options --run and
--workers; see `python -m megatron.analysis quick --help`.

Exit status: 0 everything is drawn; 2 wrong option, or nothing to draw; 3 drawn without the files
that could not be read.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tensor_visualizer import begin, run


def main(arguments: list[str] | None = None) -> int:
    """Draw the overview, and return the exit status."""
    return run("quick", __doc__, arguments)


if __name__ == "__main__":
    begin(main)
