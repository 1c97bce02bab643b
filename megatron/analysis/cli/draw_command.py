"""`python -m megatron.analysis draw`, `report` and `quick`: options, and what they print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.analysis.cli.stats_command import LEFT_OUT, parse_size
from megatron.analysis.text_table import printable_lines, shown

if TYPE_CHECKING:
    from megatron.analysis.draw import DrawResult
    from megatron.analysis.quick import QuickResult

NAMED = 5  #: tensors with NaN or Inf that the first look names
DEFAULT_FORMATS = "mxfp8 mxfp4 nvfp4 hifp8 and those of the dump"

DRAW = """\
Draw everything that can be drawn of a dump, and write report.html, one file without need of a
network. Shards of several ranks are drawn as the tensors that they are parts of.

Statistics are computed once and kept in DIR/.statistics, and what would be drawn the same again is
left as it is: a second call is quick, an interrupted one goes on. Figures that need what the dump
does not have are left out, with the reason.
"""
REPORT = """\
Write report.html, one file to open by double click or to send: run cards and audit, a heat map of
SQNR by layer and tensor in which a click opens the histogram and the block map of a tensor, formats
and types compared, the worst tensors first, and warnings in words.
"""
QUICK = """\
The first look at a dump: quick_analysis.png and tensor_stats.txt.

The picture has the histogram of all values and how the tensors divide by quantization type, layer
type and operation; the text the statistics, overall, by group and tensor by tensor. Files of these
names with another content are kept under a name with their time.
"""
STATUS = """\
Exit status: 0 all is drawn; 1 a figure failed by our mistake, the others are drawn; 2 a wrong
option, or a folder without tensors or that cannot be written; 3 drawn without files that could not
be read, each is named (with --strict the first one ends it).
"""
EXAMPLES = {
    "draw": """
examples:
  python -m megatron.analysis draw enhanced_tensor_logs --output-dir draw
  python -m megatron.analysis draw dump --formats mxfp8 mxfp8:rceil --figures heatmaps report
  python -m megatron.analysis draw dump --figures block_analysis --image pdf
""",
    "report": """
examples:
  python -m megatron.analysis report enhanced_tensor_logs
  python -m megatron.analysis report dump --run latest --formats mxfp4 mxfp4:2d nvfp4
""",
    "quick": """
examples:
  python -m megatron.analysis quick enhanced_tensor_logs/mxfp8
""",
}


def epilog(command: str) -> str:
    """What `--help` ends with; for draw the table of figures too."""
    if command != "draw":
        return STATUS + EXAMPLES[command]
    from megatron.analysis.outputs.names import SAYS

    lines = [f"  {name:<22} {says}" for name, says in SAYS.items()]
    return "\n".join(["figures:", *lines, "", STATUS]) + EXAMPLES[command]


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Those of one of the three commands."""
    from megatron.analysis.outputs.names import IMAGES, JUDGED, OPERANDS, SAYS

    parser.add_argument("folder", type=Path, metavar="DIR", help="searched with its subfolders")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("draw"),
        metavar="DIR",
        help="made if missing (default: %(default)s)",
    )
    parser.add_argument("--run", metavar="ID", help="only this run; 'latest' for the newest")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="at a time (default: one a processor)"
    )
    if command != "quick":
        parser.add_argument(
            "--formats",
            nargs="+",
            metavar="FORMAT",
            help=f"names of megatron.fake_quant (default: {DEFAULT_FORMATS})",
        )
        parser.add_argument("--max-memory", metavar="SIZE", help="that may be used, as in 800M")
        parser.add_argument(
            "--scheduler", metavar="ADDRESS", help="of a Dask cluster that sees DIR under its path"
        )
        parser.add_argument(
            "--strict", action="store_true", help="stop at the first file that cannot be read"
        )
    if command == "draw":
        parser.add_argument(
            "--figures",
            nargs="+",
            default=list(SAYS),
            choices=list(SAYS),
            metavar="NAME",
            help="some of the list below (default: all)",
        )
        parser.add_argument("--image", default="png", choices=IMAGES, help="(default: %(default)s)")
        parser.add_argument(
            "--judge",
            default=OPERANDS,
            choices=JUDGED,
            help="tensors by which formats are judged: the operands of matmuls, or their results, "
            "which are never quantized (default: %(default)s)",
        )
    parser.set_defaults(figures_of=command)


def run(arguments: argparse.Namespace) -> int:
    """Draw, say what was made; returns the exit status."""
    import matplotlib

    matplotlib.use("agg")
    from megatron.analysis.draw import draw
    from megatron.analysis.dump.tensor_files import UnreadableTensorError

    if arguments.workers is not None and arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}; give 1 or more")
    only = arguments.figures_of
    if only == "quick":
        return run_quick(arguments)
    memory = arguments.max_memory
    computing: dict[str, Any] = {
        "workers": arguments.workers,
        "max_memory": None if memory is None else parse_size(memory),
        "scheduler": arguments.scheduler,
        "strict": arguments.strict,
    }
    try:
        result = draw(
            arguments.folder,
            arguments.output_dir,
            formats=arguments.formats,
            figures=arguments.figures if only == "draw" else [only],
            image=getattr(arguments, "image", "png"),
            run=arguments.run,
            judge=getattr(arguments, "judge", "operands"),
            say=_printer(),
            progress=True,
            **computing,
        )
    except UnreadableTensorError as error:  # under --strict
        print(f"[ERROR] {shown(error)}", file=sys.stderr)
        return LEFT_OUT
    return say_result(result)


def run_quick(arguments: argparse.Namespace) -> int:
    """The first look, with what it found in words; returns the exit status."""
    from megatron.analysis.draw import DrawResult, note_of_repeats
    from megatron.analysis.dump.run_endings import remarks_on
    from megatron.analysis.quick import quick_analysis

    quick = quick_analysis(
        arguments.folder,
        arguments.output_dir,
        run=arguments.run,
        workers=arguments.workers,
        progress=True,
    )
    files = [quick.picture, quick.text]
    for path in files:
        print(f"Wrote {shown(path)}")
    result = DrawResult(
        files,
        problems=quick.problems,
        kept=quick.kept,
        tensors=len(quick.measurements.table),
        notes=quick.measurements.notes() | note_of_repeats(quick.measurements.repeats),
        remarks=remarks_on(quick.endings),
    )
    return say_result(result, first_look(quick))


def first_look(quick: QuickResult) -> list[str]:
    """Values, runs, what is not finite, and what is not there."""
    table, summary = quick.measurements.table, quick.measurements.summary()
    lines = [f"{summary.count:,} values"]
    runs = table["run_id"].fillna("(unknown)").value_counts(sort=False)
    lines += [f"run {run}: {count} tensors" for run, count in runs.items()]
    spoilt = table[table["nan"] + table["inf"] > 0]
    if len(spoilt):
        numbers = f"{summary.nan} NaN and {summary.inf} Inf values"
        lines.append(f"{numbers} in {len(spoilt)} tensors; the first:")
        lines += [
            f"  {row['path'].name}: {row['nan']} NaN, {row['inf']} Inf"
            for row in spoilt.head(NAMED).to_dict("records")
        ]
    if quick.missing:
        lines.append(f"{quick.missing} files that an index names are not there (removed or moved?)")
    return lines


def _printer() -> Callable[[str], None]:
    from tqdm import tqdm

    def say(path: str) -> None:
        tqdm.write(f"Wrote {shown(path)}")  # above the progress bar, if there is one
        sys.stdout.flush()

    return say


def say_result(result: DrawResult, more: Sequence[str] = ()) -> int:
    """The closing lines, `more` among them; returns the exit status."""
    print(f"{result.tensors} tensors")
    for line in more:
        print(f"  {shown(line)}")
    for note, count in result.notes.items():
        print(f"  {count:,} tensor{'' if count == 1 else 's'}: {shown(note)}")
    for remark in result.remarks:
        print(f"[NOTE] {shown(remark)}")
    if result.unchanged:
        print(
            f"  {result.unchanged} files would be the same again and were left as they are; remove "
            "one to have it drawn anew"
        )
    for path in result.kept:
        print(f"  kept the earlier output as {shown(path)}")
    for name, why in result.missing.items():
        print(f"  no {shown(name)}: {shown(why)}")
    for name, trace in result.failed.items():
        what = f"[ERROR] {name} failed because of a bug in this program; please report it:"
        print(printable_lines(f"{what}\n{trace.rstrip()}"), file=sys.stderr)
    for problem in result.problems:
        print(f"[ERROR] {problem}", file=sys.stderr)
    if result.problems:
        left_out = len(result.problems)
        print(f"[ERROR] {left_out} file(s) were left out; replace or remove them", file=sys.stderr)
        return LEFT_OUT
    return 1 if result.failed else 0
