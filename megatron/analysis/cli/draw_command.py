"""Define the commands `draw`, `report` and `quick`: their options and their output."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.analysis.cli.stats_command import LEFT_OUT, parse_size
from megatron.analysis.dump.folder import check_folder
from megatron.analysis.text_table import printable_lines, shown

if TYPE_CHECKING:
    from megatron.analysis.drawing import DrawResult
    from megatron.analysis.quick import QuickResult

NAMED = 5  #: maximum number of listed tensors with NaN or Inf
DEFAULT_FORMATS = "mxfp8 mxfp4 nvfp4 hifp8 and those of the dump"

DRAW = """\
Draw everything that can be drawn of a dump, and write report.html, one file that needs no network.
The shards of several ranks are joined and drawn as whole tensors.

Statistics are computed once and cached in DIR/.statistics, and outputs that are up to date are not
redrawn. A second call is therefore fast, and a call after an interrupted one continues. A
figure that needs data that the dump lacks is left out, and the reason is printed.
"""
REPORT = """\
Write report.html, one file that needs neither network nor server. It holds a verdict, a heat map of
the SQNR by layer and tensor, warnings, the tensors with the lowest SQNR, comparisons of formats and
of types, and the card of each run. A click on a cell opens the histogram and the block map of a
tensor.
"""
QUICK = """\
Take a first look at a dump: write quick_analysis.png and tensor_stats.txt.

The picture shows which format loses how much in which matmul of which layer, as the command `study`
measures it, and histograms of the operands. It compares the formats on one run (the first one
without quantization, if there is any), its first iteration and first micro-batch and, if the model
is large, a few layers. `draw --figures quick --formats ...` chooses other formats. The text holds
the statistics, overall, by group and by tensor. Earlier files with these names are kept if their
content differs; their new names contain the modification time.
"""
STATUS = """\
Exit status: 0 everything was drawn; 1 a figure failed because of a bug, and the others were drawn;
2 an option is wrong, the dump has no tensors or the output folder is not writable; 3 files that
could not be read were left out and named (with --strict, the first of them ends the command).
"""
EXAMPLES = {
    "draw": """
examples:
  python -m megatron.analysis draw enhanced_tensor_logs --output-dir draw
  python -m megatron.analysis draw dump --formats mxfp8 mxfp8:rceil --figures heatmaps report
  python -m megatron.analysis draw dump --figures block_analysis --image pdf
  python -m megatron.analysis draw dump --select layer=0-3 --style paper --width single --image pdf
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
    """Return the text at the end of a command's help; for `draw`, it includes a list of figures."""
    if command != "draw":
        return STATUS + EXAMPLES[command]
    from megatron.analysis.outputs.registry import OUTPUTS

    lines = [f"  {name:<22} {output.contents}" for name, output in OUTPUTS.items()]
    return "\n".join(["figures:", *lines, "", STATUS]) + EXAMPLES[command]


def add_options(parser: argparse.ArgumentParser, command: str) -> None:
    """Add the options of `command`, which is `draw`, `report` or `quick`, to `parser`."""
    from megatron.analysis.figures.page import STYLES
    from megatron.analysis.judged import JUDGED, OPERANDS
    from megatron.analysis.outputs.registry import IMAGES, OUTPUTS

    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder of the dump, searched with its subfolders",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("draw"),
        metavar="DIR",
        help="output folder, created if missing (default: %(default)s)",
    )
    parser.add_argument("--run", metavar="ID", help="draw only this run; 'latest' for the newest")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of threads and processes (default: one per processor)",
    )
    if command != "quick":
        parser.add_argument(
            "--formats",
            nargs="+",
            metavar="FORMAT",
            help="formats to compare, as `python -m megatron.fake_quant list` names them "
            f"(default: {DEFAULT_FORMATS})",
        )
        parser.add_argument(
            "--max-memory", metavar="SIZE", help="limit of the memory, for example 800M"
        )
        parser.add_argument(
            "--scheduler",
            metavar="ADDRESS",
            help="address of a Dask cluster whose workers see DIR under the same path",
        )
        parser.add_argument(
            "--strict", action="store_true", help="stop at the first file that cannot be read"
        )
    if command == "draw":
        parser.add_argument(
            "--figures",
            nargs="+",
            default=list(OUTPUTS),
            choices=list(OUTPUTS),
            metavar="NAME",
            help="some of the list below (default: all)",
        )
        parser.add_argument(
            "--image",
            default="png",
            choices=IMAGES,
            help="file format of the figures (default: %(default)s)",
        )
        parser.add_argument(
            "--select",
            nargs="+",
            default=[],
            metavar="COLUMN=VALUE",
            help="draw only tensors that meet all conditions; a value may be a list (0,1) or a "
            "range (1-4); leaves out `quick`",
        )
        parser.add_argument(
            "--width",
            metavar="WIDTH",
            help="width of each figure: single (3.5 inches), double (7.16 inches) or a number of "
            "inches (default: what suits the figure; double with --style paper)",
        )
        parser.add_argument(
            "--font-size",
            type=float,
            metavar="POINTS",
            help="font size of labels (default: 10, or 8 with --style paper)",
        )
        parser.add_argument(
            "--style",
            default=STYLES[0],
            choices=STYLES,
            help="paper: leave title and note out of each picture, and write them to "
            "NAME.caption.txt beside it (default: %(default)s)",
        )
        parser.add_argument(
            "--judge",
            default=OPERANDS,
            choices=JUDGED,
            help="tensors by which formats are judged: the operands of matmuls, or their results, "
            "which are never quantized (default: %(default)s)",
        )
    parser.set_defaults(name=command)


def run(arguments: argparse.Namespace) -> int:
    """Run `draw`, `report` or `quick`, print the result and return the exit status."""
    if arguments.workers is not None and arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}; give 1 or more")
    check_folder(arguments.folder)
    import matplotlib

    matplotlib.use("agg")
    from megatron.analysis.cli.select import conditions_of
    from megatron.analysis.drawing import draw
    from megatron.analysis.dump.tensor_files import UnreadableTensorError
    from megatron.analysis.figures.page import page_of

    name = arguments.name
    if name == "quick":
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
            figures=arguments.figures if name == "draw" else [name],
            image=getattr(arguments, "image", "png"),
            run=arguments.run,
            judge=getattr(arguments, "judge", "operands"),
            select=conditions_of(getattr(arguments, "select", [])),
            page=page_of(
                getattr(arguments, "width", None),
                getattr(arguments, "font_size", None),
                getattr(arguments, "style", "screen"),
            ),
            say=_printer(),
            progress=True,
            **computing,
        )
    except UnreadableTensorError as error:  # this error occurs only with --strict
        print(f"[ERROR] {shown(error)}", file=sys.stderr)
        return LEFT_OUT
    return print_result(result)


def run_quick(arguments: argparse.Namespace) -> int:
    """Run the `quick` command, print a summary of the values and return the exit status."""
    from megatron.analysis.drawing import result_of_quick
    from megatron.analysis.quick import quick_analysis

    look = quick_analysis(
        arguments.folder,
        arguments.output_dir,
        run=arguments.run,
        workers=arguments.workers,
        progress=True,
    )
    for path in (look.picture, look.text):
        print(f"Wrote {shown(path)}")
    return print_result(result_of_quick(look), first_look(look))


def first_look(look: QuickResult) -> list[str]:
    """Return a summary of the `quick` command's result as lines of text.

    The lines give the number of values, the runs, the NaN and Inf values, and the missing files.
    """
    table, summary = look.measurements.table, look.measurements.summary()
    lines = [f"{summary.count:,} values"]
    runs = table["run_id"].fillna("(unknown)").value_counts(sort=False)
    lines += [f"run {run}: {count} tensors" for run, count in runs.items()]
    special = table[table["nan"] + table["inf"] > 0]
    if len(special):
        numbers = f"{summary.nan} NaN and {summary.inf} Inf values"
        lines.append(f"{numbers} in {len(special)} tensors; the first:")
        lines += [
            f"  {row['path'].name}: {row['nan']} NaN, {row['inf']} Inf"
            for row in special.head(NAMED).to_dict("records")
        ]
    if look.missing:
        lines.append(f"{look.missing} files listed in an index are missing (removed or moved?)")
    return lines


def _printer() -> Callable[[str], None]:
    from tqdm import tqdm

    def say(path: str) -> None:
        tqdm.write(f"Wrote {shown(path)}")  # print the line above the progress bar
        sys.stdout.flush()

    return say


def print_result(result: DrawResult, more: Sequence[str] = ()) -> int:
    """Print the files, notes and errors of `result`, and return the exit status of the command.

    Args:
        more: lines printed after the number of tensors.
    """
    print(f"{result.tensors} tensors")
    for line in more:
        print(f"  {shown(line)}")
    for note, count in result.notes.items():
        print(f"  {count:,} tensor{'' if count == 1 else 's'}: {shown(note)}")
    for remark in result.remarks:
        print(f"[NOTE] {shown(remark)}")
    if result.unchanged:
        print(
            f"  {result.unchanged} files are up to date and were not redrawn; remove one to redraw "
            "it in the next call"
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
