#!/usr/bin/env python3
"""The same as tensor_visualizer.py, under the name that older documents have."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tensor_visualizer import begin, main

if __name__ == "__main__":
    begin(main)
