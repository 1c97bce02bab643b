"""Define the `study` command: its options and its output."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.analysis.cli.stats_command import LEFT_OUT, parse_size
from megatron.analysis.text_table import shown

if TYPE_CHECKING:
    from megatron.analysis.study.engine import Study

DEFAULT_FORMATS = ("mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4", "hifp8")

DESCRIPTION = """\
Study the error of each matmul's results: take the saved operands of linear layers, QK^T and PV,
quantize them in each format or recipe, multiply them forward and backward as a run does, and
compare the products with those of the saved operands in float32. P and dS of attention are
recomputed if they were not saved.

Results are kept in the output folder, so that a call after an interrupted one continues, and
another format adds only its own work.
"""
EXAMPLES = """\
Files in the output folder:
  study.html, study.png        the verdict in words, bits against error, the weakest places
  budget.png                   the error if only one operand is quantized
  recipe.yaml                  with --bits: the best format per matmul and layer
  study.parquet, study.csv     one row per layer, GEMM and candidate: SQNR, gain, bias, variance ...
  budget.parquet, budget.csv   one row per operand: the error if only this operand is quantized
  gradients.parquet, .csv      one row per gradient, layer and candidate: its ratio to its noise
  accumulators.parquet, .csv   with --accumulators: one row per GEMM, format and accumulator

Exit status: 0 every pass was studied; 2 an option or the folder is wrong; 3 files that could not be
read were left out and named.

examples:
  python -m megatron.analysis study enhanced_tensor_logs/bf16 --formats mxfp8 mxfp4 nvfp4
  python -m megatron.analysis study dump --formats mxfp8 mxfp6_e2m3 mxfp4 --bits 5.5
  python -m megatron.analysis study dump --recipes examples/recipes/nvfp4_pretraining.yaml
  python -m megatron.analysis study dump --formats mxfp4 mxfp4:sr --draws 8 --output-dir sr
  python -m megatron.analysis study dump --formats fp8_e4m3 --accumulators hopper_fp8
  python -m megatron.analysis study dump --select layer=0-3 module=linear_fc*
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the `study` command to `parser`."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder of the dump, searched with its subfolders",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        help="formats as `python -m megatron.fake_quant list` names them; bf16 shows the error of "
        f"the result's own dtype (default: {' '.join(DEFAULT_FORMATS)}; none with --recipes)",
    )
    parser.add_argument(
        "--recipes",
        nargs="+",
        type=Path,
        default=[],
        metavar="FILE",
        help="recipes to compare with the formats",
    )
    parser.add_argument(
        "--accumulators",
        nargs="+",
        default=[],
        metavar="NAME",
        help="also study each format with the accumulators of these matrix units, such as "
        "hopper_fp8, if the unit supports the format, and write the errors of the accumulators "
        "alone to accumulators.csv and accumulators.parquet; `python -m megatron.fake_quant "
        "accumulate list` lists the names",
    )
    parser.add_argument(
        "--bits",
        type=float,
        metavar="X",
        help="write recipe.yaml, which gives each matmul of each layer one of the formats, so that "
        "the mean over all operand values is at most X bits, scales included",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("study"),
        metavar="DIR",
        help="output folder, created if missing (default: %(default)s)",
    )
    parser.add_argument("--run", metavar="ID", help="study only this run; 'latest' for the newest")
    parser.add_argument(
        "--select",
        nargs="+",
        default=[],
        metavar="COLUMN=VALUE",
        help="study only matmuls whose operands meet all conditions; a value may be a list (0,1) "
        "or a range (1-4)",
    )
    parser.add_argument(
        "--draws",
        type=int,
        default=4,
        metavar="N",
        help="number of draws that estimate bias and variance of random formats, 2 or more "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--no-budget",
        action="store_true",
        help="do not quantize single operands; this saves about half of the time",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="number of threads (default: one per processor)"
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="limit of the memory for operands and products, for example 8G; matmuls that need "
        "more are left out (default: half of the machine's memory)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the study, print the verdict, write all files and return the exit status."""
    from megatron.analysis.cli.select import select
    from megatron.analysis.quick import check_output
    from megatron.analysis.store import TensorStore
    from megatron.analysis.study.accumulator_errors import study_accumulators, summary
    from megatron.analysis.study.candidates import candidates_of
    from megatron.analysis.study.engine import study
    from megatron.analysis.study.outputs import (
        check_recipes,
        remove_others,
        write_outputs,
        write_table,
    )

    if arguments.bits is not None and not arguments.bits > 0:
        raise ValueError(f"--bits is {arguments.bits:g}; give a number above 0")
    if arguments.workers is not None and arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}; give 1 or more")
    if arguments.draws < 2:
        raise ValueError(f"--draws is {arguments.draws}; give 2 or more")
    formats = arguments.formats or ([] if arguments.recipes else DEFAULT_FORMATS)
    candidates = candidates_of(formats, arguments.recipes, arguments.accumulators)
    memory = None if arguments.max_memory is None else parse_size(arguments.max_memory)
    store = TensorStore(arguments.folder)
    if arguments.run is not None:
        store = store.only(arguments.run)
    output: Path = arguments.output_dir
    check_recipes(arguments.recipes, output, bits=arguments.bits)
    chosen = select(store, arguments.select) if arguments.select else None
    check_output(output)
    sums = None
    try:
        if arguments.accumulators:
            sums = study_accumulators(
                store,
                candidates,
                arguments.accumulators,
                select=chosen,
                max_memory=memory,
                progress=True,
            )
        result = study(
            store,
            candidates,
            select=chosen,
            workers=arguments.workers,
            max_memory=memory,
            folder=output,
            draws=arguments.draws,
            budget=not arguments.no_budget,
            progress=True,
        )
    except KeyboardInterrupt:
        print(
            f"[NOTE] finished passes are kept in {shown(output)}; the same command continues",
            file=sys.stderr,
        )
        raise
    if sums is not None:
        result.left_out |= sums.left_out
        result.problems += [each for each in sums.problems if each not in result.problems]
    if len(result.rows) and (runs := result.rows["run_id"].nunique()) > 1:
        print(
            f"[NOTE] {shown(arguments.folder)} has {runs} runs, and the verdict averages over "
            "them; choose one with --run",
            file=sys.stderr,
        )
    sentences, paths = write_outputs(result, output, dump=arguments.folder, bits=arguments.bits)
    if sums is not None:
        paths += write_table(sums.rows, output, "accumulators", left_out=result.left_out)
        sentences = [*sentences, *summary(sums.rows)]
    earlier_recipe = remove_others(output, paths)
    print("\n".join(shown(sentence) for sentence in sentences))
    for path in paths:
        print(f"Wrote {shown(path)}")
    if earlier_recipe:
        print(
            f"[NOTE] {shown(output)} also holds recipe.yaml from an earlier study",
            file=sys.stderr,
        )
    return _print_left_out(result)


def _print_left_out(result: Study) -> int:
    """Print what was left out and why, and return the exit status of the command."""
    for reason, count in sorted(result.left_out.items()):
        print(f"[NOTE] left out: {shown(reason)}: {count}", file=sys.stderr)
    for problem in result.problems:
        print(f"[ERROR] {problem}", file=sys.stderr)
    if result.problems:
        count = len(result.problems)
        print(f"[ERROR] {count} file(s) were left out; replace or remove them", file=sys.stderr)
        return LEFT_OUT
    return 0
