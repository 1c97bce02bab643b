"""Show number formats and accumulators as text, pictures or test vectors, on the command line.

python -m megatron.fake_quant list                            every named format, a Markdown table
python -m megatron.fake_quant list mxfp8:2d mx:e3m4:b16:rceil
python -m megatron.fake_quant describe nvfp4                  range, precision, scales, specials
python -m megatron.fake_quant table hifp8 --csv               each code and what it means
python -m megatron.fake_quant picture mxfp8 hifp8 --output values.png
python -m megatron.fake_quant vectors DIR                     test vectors of every named format
python -m megatron.fake_quant vectors DIR --check             compare this code with such vectors
python -m megatron.fake_quant accumulate list                 how matrix units sum, as a table
python -m megatron.fake_quant accumulate describe hopper_fp8  steps, rounding, error, sources
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron.console import ArgumentParser, run_main
from megatron.fake_quant import names
from megatron.fake_quant.accumulate import ACCUMULATORS, get_accumulator
from megatron.fake_quant.accumulate import names as accumulator_names
from megatron.fake_quant.formats import FORMATS
from megatron.fake_quant.inspect import (
    accumulator_report,
    code_point_table,
    format_report,
    format_table,
)
from megatron.fake_quant.names import get_format


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = ArgumentParser(
        prog="python -m megatron.fake_quant",
        description=__doc__,
        epilog=f"FORMAT: {names.__doc__}",
        formatter_class=raw,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    started = "example: python -m megatron.fake_quant"
    listing = commands.add_parser(
        "list",
        help="formats as a Markdown table, one per line",
        epilog=f"{started} list mxfp8:2d mx:e3m4:b16:rceil",
    )
    listing.add_argument("format", nargs="*", metavar="FORMAT", help="default: every named one")
    described = commands.add_parser(
        "describe", help="everything about one format", epilog=f"{started} describe nvfp4"
    )
    described.add_argument("format", metavar="FORMAT", help="for instance nvfp4 or mxfp8:2d")
    table = commands.add_parser(
        "table",
        help="every code of a format's element and its value",
        epilog=f"{started} table hifp8 --csv",
    )
    table.add_argument("format", metavar="FORMAT", help="with an element of at most 8 bits")
    table.add_argument("--csv", action="store_true", help="code,bits,value instead of Markdown")
    picture = commands.add_parser(
        "picture",
        help="draw the values of formats (needs matplotlib)",
        epilog=f"{started} picture mxfp8 hifp8 --output values.png",
    )
    picture.add_argument(
        "format", nargs="*", metavar="FORMAT", help="default: the main ones of at most 8 bits"
    )
    picture.add_argument(
        "--output",
        type=Path,
        default=Path("value_grids.png"),
        metavar="FILE",
        help="png, pdf or svg (default: %(default)s)",
    )
    _add_vectors(commands, f"{started} vectors kit --formats mx:e3m4:b16:rceil")
    _add_accumulate(commands, f"{started} accumulate")
    return parser


def _add_vectors(commands: Any, example: str) -> None:
    vectors = commands.add_parser(
        "vectors",
        help="write inputs with their codes, scales and values, or compare with written ones",
        description="Write a conformance kit for other implementations: inputs that pin every "
        "rule of a format, with their codes, scales and dequantized values, as npz and JSON, and "
        "a manifest with SHA-256 and the rule that each vector pins.",
        epilog=f"example: {example}",
    )
    vectors.add_argument("folder", type=Path, metavar="DIR", help="folder of the kit")
    chosen = vectors.add_mutually_exclusive_group()
    chosen.add_argument(
        "--formats",
        nargs="+",
        default=[],
        metavar="FORMAT",
        help="formats to write in addition to every named one and the main variants",
    )
    chosen.add_argument(
        "--only", nargs="+", default=[], metavar="FORMAT", help="formats to write, and no others"
    )
    chosen.add_argument(
        "--check",
        action="store_true",
        help="write nothing; compare the installed code with the kit in DIR; if they differ, print "
        "the first difference and exit with status 1",
    )


def _add_accumulate(commands: Any, example: str) -> None:
    _, _, names = (accumulator_names.__doc__ or "").partition("\n\n")
    accumulate = commands.add_parser(
        "accumulate",
        help="describe how matrix units sum products",
        description="Describe accumulators: how the matrix unit of a processor sums the products "
        "of a matmul, what it rounds, and which errors follow.",
        epilog=f"{example} describe hopper_fp8\n\nNames of accumulators:\n\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = accumulate.add_subparsers(dest="action", required=True, metavar="ACTION")
    listing = actions.add_parser(
        "list", help="accumulators as a Markdown table", epilog=f"{example} list hopper_fp8 fp32"
    )
    listing.add_argument(
        "accumulator", nargs="*", metavar="ACCUMULATOR", help="default: every named one"
    )
    described = actions.add_parser(
        "describe",
        help="steps, roundings, measured errors and sources of one accumulator",
        epilog=f"{example} describe fda:l32:f13:m13:rz:p128",
    )
    described.add_argument("accumulator", metavar="ACCUMULATOR", help="for instance hopper_fp8")


def _accumulators(arguments: argparse.Namespace) -> str:
    """Return the text that the command `accumulate` prints."""
    if arguments.action == "describe":
        return accumulator_report.describe(get_accumulator(arguments.accumulator))
    return accumulator_report.markdown(map(get_accumulator, arguments.accumulator or ACCUMULATORS))


def _draw(chosen: list[str], output: Path) -> str:
    """Draw the chosen formats into the image file `output`; return a message with its name."""
    try:
        from megatron.fake_quant.inspect.value_grids import COLORS, picture
    except ModuleNotFoundError as error:
        raise ValueError(
            f"picture needs {error.name}, which is not installed; pip install matplotlib"
        ) from None
    formats = list(dict.fromkeys(map(get_format, chosen or COLORS)))
    if output.is_dir():
        raise ValueError(
            f"--output {output} is a folder; name a file in it, such as {output}/x.png"
        )
    if not output.suffix:
        output = output.with_name(f"{output.name}.png")
    if not output.parent.is_dir():
        raise ValueError(f"no folder {output.parent} for --output {output}; make it first")
    picture(formats).savefig(output)
    return f"wrote {output}"


def _vectors(arguments: argparse.Namespace) -> int:
    """Write or check a conformance kit, and return the exit status."""
    try:
        from megatron.fake_quant.inspect import vector_kit
    except ModuleNotFoundError as error:
        raise ValueError(
            f"vectors needs {error.name}, which is not installed; pip install {error.name}"
        ) from None
    if not arguments.check:
        names = arguments.only or [*FORMATS, *vector_kit.VARIANTS, *arguments.formats]
        print(vector_kit.write(arguments.folder, map(get_format, names)), flush=True)
        return 0
    difference, summary = vector_kit.first_difference(arguments.folder)
    if difference is not None:
        print(f"[ERROR] {difference}", file=sys.stderr)
        return 1
    print(f"{summary}: no difference", flush=True)
    return 0


def _answer(arguments: argparse.Namespace) -> str:
    """Run the command that the user chose, and return the text to print."""
    if arguments.command == "list":
        return format_table.markdown(map(get_format, arguments.format or FORMATS))
    if arguments.command == "accumulate":
        return _accumulators(arguments)
    if arguments.command == "picture":
        return _draw(arguments.format, arguments.output)
    fmt = get_format(arguments.format)
    if arguments.command == "describe":
        return format_report.describe(fmt)
    return code_point_table.as_csv(fmt) if arguments.csv else code_point_table.markdown(fmt)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status."""
    try:
        parsed = _parser().parse_args(arguments)
        if parsed.command == "vectors":
            return _vectors(parsed)
        print(_answer(parsed), flush=True)
    except (ValueError, OSError) as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_main(main)
