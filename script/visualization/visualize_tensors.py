#!/usr/bin/env python3
"""Run tensor_visualizer.py under its former name, which older documents use."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tensor_visualizer import begin, main

if __name__ == "__main__":
    begin(main)
