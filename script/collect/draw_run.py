#!/usr/bin/env python3
"""Run a drawing command for a driver script, and stop the command when the driver ends.

    python script/collect/draw_run.py -- python script/visualization/tensor_visualizer.py ...

The command writes to the output of this process. On Ctrl-C or SIGTERM, and when a process listed in
the environment variable LAB_DRIVERS has ended, the command and every process that it started are
stopped. Finished files are kept.

Exit status: the command's exit status, or 128+n after signal n.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[2]))

from megatron.console import ArgumentParser, run_main
from process_tree import ProcessTree
from run import TICK, Interrupts, drivers, fail

GRACE = 10.0  #: time in seconds between asking the command to end and killing it
KEPT = "the drawing was stopped; finished files stay, and the same command draws the rest"


def main(arguments: list[str] | None = None) -> int:
    """Run the command, stop it if necessary, and return the exit status of this program."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what to run")
    command = parser.parse_args(arguments).command
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        parser.error("no command; give it after --")
    interrupts = Interrupts()
    try:
        tree = ProcessTree(command, output=None, environment=dict(os.environ), drivers=drivers())
    except OSError as error:
        return fail(f"cannot start {command[0]!r}: {error.strerror}")
    try:
        status = watch(tree, interrupts)
    finally:
        left = tree.stop(GRACE, at_once=lambda: interrupts.at_once)
    if left:
        fail(f"processes {', '.join(map(str, left))} could not be stopped; end them by hand")
    if status is None:
        return 128 + (interrupts.number or signal.SIGTERM)
    if status < 0:
        return fail(f"the drawing was ended by {signal.Signals(-status).name}; {hint(-status)}")
    return status


def watch(tree: ProcessTree, interrupts: Interrupts) -> int | None:
    """Wait for the command and return its exit status, or None if it must be stopped."""
    while (status := tree.wait(TICK)) is None:
        if interrupts.number is not None:
            fail(f"interrupted ({signal.Signals(interrupts.number).name}): {KEPT}")
            return None
        if (driver := tree.lost_driver()) is not None:
            fail(f"the driver script (process {driver}) has ended: {KEPT}")
            return None
    return status


def hint(number: int) -> str:
    """Return advice for the user after the signal `number` has ended the command."""
    if number == signal.SIGKILL:
        return "if memory was short, give fewer --workers"
    return "run it again"


if __name__ == "__main__":
    run_main(main)
