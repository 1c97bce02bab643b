#!/usr/bin/env python3
"""Run tensor_visualizer.py. Older documents use this former name of the script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tensor_visualizer import begin, main

if __name__ == "__main__":
    begin(main)
