#!/usr/bin/env python3
"""Run a training command that collects tensors, show its progress, and report the result.

    python script/collect/run.py --tensor-dir enhanced_tensor_logs/mxfp8 -- \\
        bash examples/llama/train_llama32_1b_h100_fp8.sh ...

The command's output goes to a new file in --log-dir. Progress is read from the index files that
the run appends to. The run ends when the command ends. The command and every process that it
started are stopped on Ctrl-C or SIGTERM. They are also stopped if no tensor is written and the log
does not grow for --stall-timeout seconds. Collected tensors are kept: nothing is ever deleted.

Exit status: 0 all tensors were collected; 1 training failed, stalled, or ended early; 2 wrong
option; 3 training succeeded, but a limit set by the user ended the collection before all tensors
were written; 128+n after signal n.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[2]))

from index_follower import TOKEN_VARIABLE, IndexFollower
from megatron.console import ArgumentParser, run_main
from process_tree import ProcessTree
from view import REMOVED, LogFile, ProgressLine, print_report

#: Environment variable in which script/driver.sh lists the process IDs of the driver scripts that
#: wait for this process, outermost first.
DRIVERS_VARIABLE = "LAB_DRIVERS"
LIMITED = 3  #: exit status if a limit ended the collection early
TICK = 0.2  #: time in seconds between two reads of the indexes
STOPPED = "training was stopped"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the options of this program and, after `--`, the command to run."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tensor-dir", type=Path, required=True, help="where the command saves tensors")
    add("--name", default="", help="what is collected, for the messages and the log's name")
    add("--log-dir", type=Path, default=Path("logs"), help="default: %(default)s")
    add("--control-iter", type=int, default=0, help="iterations expected; 0 (default): unknown")
    add(
        "--stall-timeout",
        type=float,
        default=600.0,
        help="seconds without a tensor or a line of the log after which the run is stopped; "
        "0: never (default: %(default)g)",
    )
    add(
        "--grace",
        type=float,
        default=15.0,
        help="seconds before a process that was asked to end is killed, unless it writes another "
        "tensor (default: %(default)g)",
    )
    add("--next", default="", help="next command to run, printed in the report")
    parser.add_argument(
        "--may-be-empty",
        action="store_true",
        help="accept a run without tensors, because an event triggers the collection",
    )
    parser.add_argument("--verbose", action="store_true", help="show the command's output too")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what to run")
    parsed = parser.parse_args(arguments)
    if parsed.command[:1] == ["--"]:
        del parsed.command[0]
    if not parsed.command:
        parser.error("no command; give it after --")
    for name in ("control_iter", "stall_timeout", "grace"):
        if not getattr(parsed, name) >= 0:
            parser.error(f"--{name.replace('_', '-')} is {getattr(parsed, name)}; give 0 or more")
    parsed.name = parsed.name or parsed.tensor_dir.name
    return parsed


class Interrupts:
    """Signal handler that records in `number` which signal arrived first.

    A signal that arrives more than one second after the first sets `at_once`, which means that
    processes are killed without waiting.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.at_once = False
        self._since = 0.0
        for number in SIGNALS:
            # Under nohup, SIGHUP is ignored, and it must stay ignored.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The terminal may send a signal that a driver script forwards as well, so the same signal
        # can arrive twice within a short time.
        if self.number is None:
            self.number, self._since = number, time.monotonic()
        elif time.monotonic() - self._since > 1.0:
            self.at_once = True


def main(arguments: list[str] | None = None) -> int:
    """Run the command, show its progress, print the report, and return the exit status."""
    args = parse_arguments(arguments)
    interrupts = Interrupts()
    for folder, option in ((args.tensor_dir, "--tensor-path"), (args.log_dir, "--log-dir")):
        if trouble := check_writable(folder):
            return fail(f"cannot write to {folder} ({trouble}); name another folder with {option}")
    path, output = open_log(args.log_dir, args.name)
    token = secrets.token_hex(8)
    follower = IndexFollower(args.tensor_dir, token)
    environment = os.environ | {TOKEN_VARIABLE: token, "PYTHONUNBUFFERED": "1"}
    print(f"Collecting {args.name} into {args.tensor_dir}; the training log is {path}")
    print(f"  {shlex.join(args.command)}", flush=True)
    started = time.monotonic()
    try:
        with output:
            tree = ProcessTree(
                args.command, output=output, environment=environment, drivers=drivers()
            )
    except OSError as error:
        return fail(f"cannot start {args.command[0]!r}: {error.strerror}")
    log = LogFile(path)
    try:
        status, why = watch(tree, follower, interrupts, log, args)
    finally:
        # Even a command that has ended by itself may have left processes running.
        left = tree.stop(
            args.grace,
            at_once=lambda: interrupts.at_once,
            busy=lambda: follower.poll() > 0,  # True if new tensors were written
        )
    follower.poll(last=True)
    print_report(follower.tally, args, log, time.monotonic() - started)
    for problem in follower.problems:
        print(f"[WARNING] {problem}", file=sys.stderr, flush=True)
    if left:
        fail(f"processes {', '.join(map(str, left))} could not be stopped; end them by hand")
    if why is None:
        why = judge(status, follower, args)
    if why is not None:
        fail(f"{why}; the log is {path}{'' if log.is_there() else REMOVED}")
        if interrupts.number is None:
            log.show_end(sys.stderr)
    if interrupts.number is not None:
        return 128 + interrupts.number
    if why or left:
        return 1
    return LIMITED if report_limits(follower) else 0


def report_limits(follower: IndexFollower) -> bool:
    """Print a warning for each collection limit that was reached; return whether there was any."""
    for limit in follower.tally.limits:
        print(f"[WARNING] the collection is not complete: {limit}", file=sys.stderr, flush=True)
    return bool(follower.tally.limits)


def watch(
    tree: ProcessTree,
    follower: IndexFollower,
    interrupts: Interrupts,
    log: LogFile,
    args: argparse.Namespace,
) -> tuple[int | None, str | None]:
    """Follow the run until it ends or must be stopped.

    Returns:
        The exit status of the command, or None if it is still running; and the reason why the run
        must be stopped, or None if it ended by itself.
    """
    latest, logged = time.monotonic(), 0
    with ProgressLine(args.name, args.control_iter, log, verbose=args.verbose) as progress:
        while True:
            status = tree.wait(TICK)
            before, logged = logged, log.size()
            if follower.poll(last=status is not None) or logged != before:
                # A growing log also counts as progress, because some iterations collect no tensors.
                latest = time.monotonic()
            progress.update(follower.tally)
            if interrupts.number is not None:
                name = signal.Signals(interrupts.number).name
                return status, f"interrupted ({name}): {STOPPED}"
            if (driver := tree.lost_driver()) is not None:
                interrupts.number = signal.SIGTERM
                return status, f"the driver script (process {driver}) has ended: {STOPPED}"
            if status is not None:
                return status, None
            if args.stall_timeout and time.monotonic() - latest > args.stall_timeout:
                tensor = "further tensor" if follower.tally.tensors else "tensor"
                limit = f"{args.stall_timeout:g} s (--stall-timeout)"
                return None, f"no {tensor} for {limit}: {STOPPED}"


def drivers() -> list[int]:
    """Return the process IDs of the driver scripts that wait for this process."""
    words = os.environ.get(DRIVERS_VARIABLE, "").split()
    return [int(word) for word in words if word.isdecimal()]


def judge(status: int | None, follower: IndexFollower, args: argparse.Namespace) -> str | None:
    """Return why a run is incomplete, or None if the run is complete or reached a limit.

    Args:
        status: exit status of the command; None if it was stopped.
    """
    tally = follower.tally
    if status is None:
        return STOPPED
    if status < 0:
        hint = "; the machine may be out of memory" if -status == signal.SIGKILL else ""
        return f"training was ended by {signal.Signals(-status).name}{hint}"
    if status:
        return f"training failed (exit status {status})"
    if tally.limits:
        return None
    if not tally.tensors and not args.may_be_empty:
        return (
            "training ended without saving a tensor; it needs --save-tensors, --tensor-save-dir "
            f"{args.tensor_dir} and a selection (--collect-...) that is not empty"
        )
    if len(tally.iterations) < args.control_iter:
        return (
            f"training ended after {len(tally.iterations)} of {args.control_iter} iterations; "
            "raise --train-iters, or request fewer with --control-iter"
        )
    return None


def check_writable(folder: Path) -> str | None:
    """Create a folder if needed, and test whether it is writable.

    Returns:
        The reason why the folder is not writable, or None if it is.
    """
    probe = folder / f".write_test_{os.getpid()}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def open_log(folder: Path, name: str) -> tuple[Path, IO[bytes]]:
    """Create a new log file for the command's output, and return its path and the open file.

    Existing files are never written to.
    """
    safe = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in name)
    stamp = time.strftime("%Y%m%d_%H%M%S")
    for attempt in range(1000):
        path = folder / f"collect_{safe}_{stamp}{f'_{attempt}' if attempt else ''}.log"
        try:
            path.open("xb").close()
            return path, path.open("ab")  # append mode still works if the log is truncated
        except FileExistsError:
            continue
    raise AssertionError(f"1000 logs within one second in {folder}")


def fail(message: str) -> int:
    """Print an error message to standard error, and return the exit status 1."""
    print(f"[ERROR] {message}", file=sys.stderr, flush=True)
    return 1


if __name__ == "__main__":
    run_main(main)
