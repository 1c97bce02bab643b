"""Define the `diff` command: its options and its output."""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.analysis.dump.folder import check_folder
from megatron.analysis.progress import with_progress
from megatron.analysis.text_table import shown

if TYPE_CHECKING:
    from megatron.analysis.diff.settings import Facts
    from megatron.analysis.diff.summary import Summary

DESCRIPTION = """\
Compare the tensors of two runs, in the order of execution, and name the first one that differs.

Tensors are paired by iteration, micro-batch, module and name. The runs may differ in quantization
type, seed, machine and parallel layout. If both shard a tensor in the same way, it is compared rank
by rank; otherwise, its shards are joined. Values must be equal unless a tolerance is given: -0
equals +0, NaN equals NaN, and Inf equals Inf of the same sign.

The difference of each matmul's result is split into an inherited part, which follows from the
operands of the two runs, and a local part, which the operation adds.
"""
EXAMPLES = """\
The first line of the output names the first tensor that differs. Progress goes to stderr.

Exit status: 0 all tensors agree; 1 a tensor differs or is in one run only, or a file cannot be
read; 2 an option or a folder is wrong, or the runs have no tensor in common.

examples:
  python -m megatron.analysis diff logs/bf16 logs/mxfp8 --output diff.html
  python -m megatron.analysis diff before after               identical results, as a CI check
  python -m megatron.analysis diff before after --max-relative-error 1e-3 \\
      --max-relative-error 'grad_*=1e-2'
  python -m megatron.analysis diff logs/tp1 logs/tp2 --rtol 1e-4 --atol 1e-6
  python -m megatron.analysis diff logs logs --run-a ID --run-b latest --format jsonl
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the `diff` command to `parser`."""
    for name, what in (("a", "reference"), ("b", "run to compare with the reference")):
        parser.add_argument(
            name,
            type=Path,
            metavar=name.upper(),
            help=f"folder of the dump of the {what}, searched with its subfolders",
        )
    for name in "ab":
        parser.add_argument(
            f"--run-{name}",
            metavar="ID",
            help=f"run in {name.upper()}, needed if it has several; 'latest' for the newest",
        )
    parser.add_argument(
        "--max-relative-error",
        action="append",
        default=[],
        metavar="[PATTERN=]X",
        help="allow a relative error |B - A| / |A| of X in the Euclidean norm; a shell pattern of "
        "module.tensor or of its end, as in linear_fc1.output, limits it to some tensors; the last "
        "match counts",
    )
    parser.add_argument(
        "--rtol", type=float, metavar="X", help="allow each value to differ by X times its size"
    )
    parser.add_argument(
        "--atol", type=float, metavar="X", help="allow each value to differ by X, added to --rtol"
    )
    parser.add_argument(
        "--bitwise",
        action="store_true",
        help="require equal bits: signs of zeros, bits of NaN and dtypes count, too",
    )
    parser.add_argument(
        "--ignore-missing",
        action="store_true",
        help="list a record that only one run has, but do not count it as a difference",
    )
    parser.add_argument(
        "--no-origins",
        action="store_true",
        help="do not split differences into inherited and local parts; the split computes matmuls",
    )
    parser.add_argument(
        "--format",
        choices=("text", "jsonl"),
        default="text",
        help="output: text, or one JSON object per line, a summary and then every pair (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="also write a page with a picture to an .html file; an earlier file is kept beside it",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare two dumps, print the result, write the page and return the exit status."""
    output: Path | None = arguments.output
    if output is not None and output.suffix != ".html":
        raise ValueError(f"--output {output}: the name must end in .html")
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}")
    default, relative = _tolerances(arguments)
    for folder in (arguments.a, arguments.b):
        check_folder(folder)

    from megatron.analysis.diff.comparison import Rules
    from megatron.analysis.diff.difference import Tolerance
    from megatron.analysis.diff.run import open_run, prepare
    from megatron.analysis.diff.settings import facts_of
    from megatron.analysis.diff.summary import Summary
    from megatron.analysis.diff.text import as_json, as_text, summary_json

    rules = Rules(
        Tolerance(default, arguments.rtol, arguments.atol),
        relative,
        bitwise=arguments.bitwise,
        ignore_missing=arguments.ignore_missing,
    )
    a = open_run(arguments.a, "a", arguments.run_a)
    b = open_run(arguments.b, "b", arguments.run_b)
    comparison, keys = prepare((a, b), rules, with_origins=not arguments.no_origins)
    summary = Summary(rules)
    # The summary is the first line of JSON, so the other lines wait in a temporary file.
    with tempfile.TemporaryFile("w+", encoding="utf-8") as spool:
        progress = with_progress(keys, "Comparing", "tensor")
        for result in summary.follow(comparison.run(progress)):
            if arguments.format == "jsonl":
                spool.write(f"{as_json(result)}\n")
        facts = facts_of(comparison)
        if arguments.format == "jsonl":
            print(summary_json(summary, facts))
            spool.seek(0)
            shutil.copyfileobj(spool, sys.stdout)
        else:
            print(as_text(summary, facts), end="")
    if output is not None:
        _write_page(summary, facts, output)
    return 0 if summary.agrees and not facts.problems else 1


def _write_page(summary: Summary, facts: Facts, output: Path) -> None:
    """Write the page; messages go to stderr, because stdout may contain JSON lines."""
    import matplotlib

    matplotlib.use("agg")
    from megatron.analysis.diff.page import page
    from megatron.analysis.outputs.atomic_write import write_keeping

    for kept in write_keeping(output, page(summary, facts)):
        print(f"Kept the earlier file as {shown(kept)}", file=sys.stderr)
    print(f"Wrote {shown(output)}", file=sys.stderr)


def _tolerances(
    arguments: argparse.Namespace,
) -> tuple[float | None, tuple[tuple[str, float], ...]]:
    """Return the default limit of the relative error, and the limit for each name pattern.

    Raises:
        ValueError: if a limit is not a number of 0 or more, or is given together with --bitwise.
    """
    for name in ("rtol", "atol"):
        value = getattr(arguments, name)
        if value is not None:
            _check_limit(f"--{name}", value)
    default: float | None = None
    relative: list[tuple[str, float]] = []
    for text in arguments.max_relative_error:
        pattern, equals, number = text.rpartition("=")
        try:
            limit = float(number)
        except ValueError:
            raise ValueError(
                f"--max-relative-error {text!r} is not a limit; give a number, as in 1e-3, or "
                "PATTERN=NUMBER, as in 'grad_*=1e-2'"
            ) from None
        _check_limit("--max-relative-error", limit)
        if equals:
            relative.append((pattern, limit))
        else:
            default = limit
    tolerant = default is not None or relative
    if arguments.bitwise and (tolerant or arguments.rtol is not None or arguments.atol is not None):
        raise ValueError("--bitwise allows no difference; remove it, or remove the tolerances")
    return default, tuple(relative)


def _check_limit(option: str, value: float) -> None:
    if math.isnan(value) or value < 0:
        raise ValueError(f"{option} is {value:g}; give a number of 0 or more")
