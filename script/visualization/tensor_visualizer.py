#!/usr/bin/env python3
"""Draw all figures of the collected tensors, and write report.html.

    python script/visualization/tensor_visualizer.py --tensor_dir enhanced_tensor_logs \\
        --output_dir draw
    python script/visualization/visualize_tensors.py --output_dir draw    # an alias

This script runs `python -m megatron.analysis draw DIR` and also accepts its other options, such as
--formats, --figures and --run; see `python -m megatron.analysis draw --help`. The default folders
are in the root of the repository; a folder given as an option is relative to the current folder.

Exit status: 0 everything is drawn; 2 wrong option or folder; 3 drawn without the files that could
not be read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def default_folder(name: str) -> str:
    """Return the path of the folder `name` in the root of the repository.

    The path is relative if the root is the current folder, and absolute otherwise.
    """
    return name if Path.cwd() == ROOT else str(ROOT / name)


def run(command: str, description: str | None, arguments: list[str] | None) -> int:
    """Run a command of `python -m megatron.analysis`, and return its exit status.

    This program takes both folders as options, while the command takes the folder of tensors as a
    positional argument.

    Args:
        command: name of the command, such as "draw".
        description: text of the program's help.
        arguments: command-line arguments; None uses `sys.argv`.
    """
    from megatron.console import ArgumentParser, about_unknown

    parser = ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tensor-dir",
        "--tensor-path",
        "--tensor-save-dir",
        metavar="DIR",
        default=os.environ.get("TENSOR_SAVE_DIR") or default_folder("enhanced_tensor_logs"),
        help="folder of .pt files, including its subfolders (TENSOR_SAVE_DIR if set, otherwise "
        "enhanced_tensor_logs)",
    )
    parser.add_argument(
        "--output-dir",
        metavar="DIR",
        default=default_folder("draw"),
        help="folder for the figures, made if missing (draw)",
    )
    known, others = parser.parse_known_args(arguments)
    if wrong := [word for word in others if word.startswith(("--tensor", "--output"))]:
        # Except --output-dir, which is parsed above, no option of the analysis command begins with
        # --tensor or --output. Such words are therefore misspelled options.
        parser.error(about_unknown(wrong, parser.all_options()))
    from megatron.analysis.__main__ import main as analysis

    folder = known.tensor_dir
    if folder.startswith("-"):
        folder = f"./{folder}"  # so that it is not parsed as an option
    return analysis([command, folder, "--output-dir", known.output_dir, *others])


def main(arguments: list[str] | None = None) -> int:
    """Draw all figures, and return the exit status."""
    return run("draw", __doc__, arguments)


def begin(main: Callable[[], int]) -> NoReturn:
    """Run a program's main function, and exit with the status that it returns."""
    from megatron.console import run_main

    run_main(main)


if __name__ == "__main__":
    begin(main)
