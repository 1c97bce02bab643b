"""Look into a dump of collected tensors.

python -m megatron.analysis verify enhanced_tensor_logs/mxfp8      can it be trusted?
python -m megatron.analysis stats enhanced_tensor_logs/mxfp8       what would formats do to it?
python -m megatron.analysis draw enhanced_tensor_logs              everything as pictures
python -m megatron.analysis report enhanced_tensor_logs            one page to click through
python -m megatron.analysis quick enhanced_tensor_logs/mxfp8       the first look
python -m megatron.analysis COMMAND --help                         options and examples
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from megatron.analysis.cli import draw_command, stats_command
from megatron.analysis.text_table import printable_lines, shown
from megatron.console import ArgumentParser, run_main

_RAW = argparse.RawDescriptionHelpFormatter


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="python -m megatron.analysis", description=__doc__, formatter_class=_RAW
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_verify(commands)
    _add_stats(commands)
    _add_drawing(commands)
    return parser


_VERIFY = """\
Check a dump: every file can be read and is what its record says, its values are finite, replicas
agree, each output and gradient follows from the saved operands under the recorded formats, and no
tensor is missing that the run must have left.

A result of a linear layer may be off its exact value by what any order of summation in float32 and
one rounding to its dtype can do; one of attention by four times what moving every score by one unit
in the last place does. What cannot be checked (stochastic rounding, dropout, parts of tensors) is
counted, with the reason.
"""
_VERIFY_EXAMPLES = """\
A line for each finding (an error, or a note that makes nothing wrong), then a summary.
Exit status: 0 nothing is wrong; 1 something is; 2 nothing could be checked (a wrong option or
folder).

examples:
  python -m megatron.analysis verify enhanced_tensor_logs/mxfp8
  python -m megatron.analysis verify enhanced_tensor_logs --run latest
  python -m megatron.analysis verify dump --exact        on the machine that made the dump
  python -m megatron.analysis verify dump --slack 16     of a GPU that reduces in bf16 or TF32
"""


def _add_verify(commands: argparse._SubParsersAction[ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="recompute and check a dump",
        description=_VERIFY,
        epilog=_VERIFY_EXAMPLES,
        formatter_class=_RAW,
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="searched with its subfolders")
    parser.add_argument("--run", metavar="ID", help="only this run; 'latest' for the newest")
    parser.add_argument("--exact", action="store_true", help="results must be the same bit for bit")
    parser.add_argument(
        "--slack",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply what rounding allows by X (default: %(default)g)",
    )
    parser.set_defaults(command=_verify)


def _add_stats(commands: argparse._SubParsersAction[ArgumentParser]) -> None:
    parser = commands.add_parser(
        "stats",
        help="statistics of the values and of what formats do to them",
        description=stats_command.DESCRIPTION,
        epilog=stats_command.EXAMPLES,
        formatter_class=_RAW,
    )
    stats_command.add_options(parser)
    parser.set_defaults(command=stats_command.run)


def _verify(arguments: argparse.Namespace) -> int:
    """Print findings and summary; returns the exit status."""
    from tqdm import tqdm

    from megatron.analysis.store import TensorStore
    from megatron.analysis.verification.verify import Verification

    if not arguments.slack > 0:
        raise ValueError(f"--slack is {arguments.slack:g}; give a number above 0")
    store = TensorStore(arguments.folder)
    if arguments.run is not None:
        store = store.only(arguments.run)
    # a terminal gets a bar; a log gets the findings only
    total = Verification.steps(store)
    with tqdm(total=total, desc="Verifying", disable=None, leave=False) as bar:
        verdict = Verification(store, arguments.exact, arguments.slack, bar.update).run()
    for finding in verdict.findings:
        print(finding)
    print(f"{len(store)} tensors in {shown(store.folder)}")
    for what, count in sorted(verdict.checked.items()):
        print(f"  checked: {count} {shown(what)}")
    for reason, count in sorted(verdict.unchecked.items()):
        print(f"  not checked: {count}: {shown(reason)}")
    errors, notes = len(verdict.errors), len(verdict.findings) - len(verdict.errors)
    print(f"{errors} error(s), {notes} note(s)")
    return 1 if errors else 0


def _add_drawing(commands: argparse._SubParsersAction[ArgumentParser]) -> None:
    for name, about, says in (
        ("draw", "draw everything", draw_command.DRAW),
        ("report", "write report.html", draw_command.REPORT),
        ("quick", "the first look", draw_command.QUICK),
    ):
        parser = commands.add_parser(
            name,
            help=about,
            description=says,
            epilog=draw_command.epilog(name),
            formatter_class=_RAW,
        )
        draw_command.add_options(parser, name)
        parser.set_defaults(command=draw_command.run)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    try:
        status = command(parsed)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("[ERROR] interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ValueError, OSError) as error:
        print(printable_lines(f"[ERROR] {error}"), file=sys.stderr)
    except ImportError as error:
        print(
            f'[ERROR] no module {error.name!r} in {sys.executable}; use "$(bash '
            'script/setup_env.sh)"',
            file=sys.stderr,
        )
    return 2


if __name__ == "__main__":
    run_main(main)
