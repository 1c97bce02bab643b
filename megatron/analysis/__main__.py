"""Analyze a dump of collected tensors.

python -m megatron.analysis verify enhanced_tensor_logs/mxfp8      check that it can be trusted
python -m megatron.analysis stats enhanced_tensor_logs/mxfp8       measure the error of formats
python -m megatron.analysis diff logs/bf16 logs/mxfp8              compare two runs
python -m megatron.analysis study enhanced_tensor_logs/bf16        compare formats by matmul results
python -m megatron.analysis draw enhanced_tensor_logs              draw everything
python -m megatron.analysis report enhanced_tensor_logs            write one page to click through
python -m megatron.analysis serve enhanced_tensor_logs             explore it in the browser
python -m megatron.analysis quick enhanced_tensor_logs/mxfp8       take a first look
python -m megatron.analysis history DIR/statistics                 find the first unusual tensor
python -m megatron.analysis COMMAND --help                         options and examples
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from pathlib import Path

# The imports of the commands take half a second. They are inside functions, so that Ctrl-C during
# them does not print a traceback.
from megatron.console import ArgumentParser, run_main

_RAW = argparse.RawDescriptionHelpFormatter


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(
        prog="python -m megatron.analysis", description=__doc__, formatter_class=_RAW
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_verify(commands)
    _add_commands(commands)
    _add_drawing(commands)
    _add_history(commands)
    return parser


_VERIFY = """\
Check a dump: every file is readable and agrees with its record, its values are finite, replicas
are equal, each output and gradient follows from the saved operands under the recorded formats, and
no tensor is missing that the run must have written.

A result of a linear layer may differ from its exact value by the rounding errors of any order of
summation in float32 and of one rounding to its dtype. A result of attention is compared as a whole,
by the norm and by the largest value of the difference. Each may reach four times the effect of
moving every score by one unit in the last place, plus four units in the last place of the result,
which is 3 % in bf16; smaller changes are only found with --exact. Results that cannot be checked
(stochastic rounding, dropout, parts of tensors) are counted by reason.
"""
_VERIFY_EXAMPLES = """\
Prints one line per finding (an error, or a note about something harmless), then a summary.
Exit status: 0 no error was found; 1 an error was found; 2 nothing could be checked (an option or
the folder is wrong).

examples:
  python -m megatron.analysis verify enhanced_tensor_logs/mxfp8
  python -m megatron.analysis verify enhanced_tensor_logs --run latest
  python -m megatron.analysis verify dump --exact        on the machine of the run
  python -m megatron.analysis verify dump --slack 16     from a GPU that reduces in bf16 or TF32
"""


def _add_verify(commands: argparse._SubParsersAction[ArgumentParser]) -> None:
    parser = commands.add_parser(
        "verify",
        help="recompute and check a dump",
        description=_VERIFY,
        epilog=_VERIFY_EXAMPLES,
        formatter_class=_RAW,
    )
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder of the dump, searched with its subfolders",
    )
    parser.add_argument("--run", metavar="ID", help="check only this run; 'latest' for the newest")
    parser.add_argument(
        "--exact", action="store_true", help="require results that are equal bit for bit"
    )
    parser.add_argument(
        "--slack",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply the allowed rounding error by X (default: %(default)g)",
    )
    parser.set_defaults(command=_verify)


def _add_commands(commands: argparse._SubParsersAction[ArgumentParser]) -> None:
    from megatron.analysis.cli import diff_command, serve_command, stats_command, study_command

    for name, summary, module in (
        ("stats", "measure the values and the error of formats", stats_command),
        ("study", "compare formats by the results of matmuls", study_command),
        ("diff", "compare two runs", diff_command),
        ("serve", "explore the dump in the browser, also during a run", serve_command),
    ):
        parser = commands.add_parser(
            name,
            help=summary,
            description=module.DESCRIPTION,
            epilog=module.EXAMPLES,
            formatter_class=_RAW,
        )
        module.add_options(parser)
        parser.set_defaults(command=module.run)


def _verify(arguments: argparse.Namespace) -> int:
    """Verify a dump, print the findings and a summary, and return the exit status."""
    if not arguments.slack > 0:
        raise ValueError(f"--slack is {arguments.slack:g}; give a number above 0")
    from megatron.analysis.dump.folder import check_folder

    check_folder(arguments.folder)
    from megatron.analysis.progress import Progress
    from megatron.analysis.store import TensorStore
    from megatron.analysis.text_table import shown
    from megatron.analysis.verification.verify import Verification

    store = TensorStore(arguments.folder)
    if arguments.run is not None:
        store = store.only(arguments.run)
    total = Verification.steps(store)
    with Progress(total, "Verifying", "step") as bar:
        verdict = Verification(store, arguments.exact, arguments.slack, bar.update).run()
    for finding in verdict.findings:
        print(finding)
    print(f"{len(store)} tensors in {shown(store.folder)}")
    for kind, count in sorted(verdict.checked.items()):
        print(f"  checked: {count} {shown(kind)}")
    for reason, count in sorted(verdict.unchecked.items()):
        print(f"  not checked: {count}: {shown(reason)}")
    errors, notes = len(verdict.errors), len(verdict.findings) - len(verdict.errors)
    print(f"{errors} error(s), {notes} note(s)")
    return 1 if errors else 0


def _add_drawing(commands: argparse._SubParsersAction[ArgumentParser]) -> None:
    from megatron.analysis.cli import draw_command

    for name, summary, description in (
        ("draw", "draw everything", draw_command.DRAW),
        ("report", "write report.html", draw_command.REPORT),
        ("quick", "take a first look", draw_command.QUICK),
    ):
        parser = commands.add_parser(
            name,
            help=summary,
            description=description,
            epilog=draw_command.epilog(name),
            formatter_class=_RAW,
        )
        draw_command.add_options(parser, name)
        parser.set_defaults(command=draw_command.run)


def _add_history(commands: argparse._SubParsersAction[ArgumentParser]) -> None:
    from megatron.analysis.cli import history_command

    parser = commands.add_parser(
        "history",
        help="find the first tensor whose statistics became unusual",
        description=history_command.DESCRIPTION,
        epilog=history_command.EXAMPLES,
        formatter_class=_RAW,
    )
    history_command.add_options(parser)
    parser.set_defaults(command=history_command.run)


def main(arguments: list[str] | None = None) -> int:
    """Run one command of `python -m megatron.analysis` and return the exit status."""
    try:
        parsed = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = parsed.command
        status = command(parsed)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("[ERROR] interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ValueError, OSError) as error:
        from megatron.analysis.text_table import printable_lines

        print(printable_lines(f"[ERROR] {error}"), file=sys.stderr)
    except ImportError as error:
        print(
            f"[ERROR] {sys.executable} has no module {error.name!r}; use the Python that "
            "`bash script/setup_env.sh` prints",
            file=sys.stderr,
        )
    return 2


if __name__ == "__main__":
    run_main(main)
