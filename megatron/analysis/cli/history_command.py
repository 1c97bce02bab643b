"""Define the command `history`: its options, the lines that it prints and its figure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from megatron.console import ArgumentParser

DESCRIPTION = """\
Show the statistics that --tensor-statistics wrote during a run: the first tensors that left their
bands, the gradients that are too noisy, and a figure with the loss, the gradient norm, the number
of tensors outside their bands and the smallest ratio of a gradient to its noise.

The band of an amax, an rms or an SQNR is the range of the previous 32 values, widened on both sides
by its own width, and by at least a factor of 4 for an amax or rms and 6 dB for an SQNR. A band
needs 8 measured iterations. A single batch with large gradients may push tensors out of their
bands, too. If the loss jumps in iteration 101, --since 95 leaves out what happened long before. An
amax or rms of zero after 8 nonzero values is outside its band as well.

A quantized gradient is too noisy if its rms is below sqrt(3) times that of its quantization error
(arXiv 2505.19115). Such gradients do not change the exit status.
"""
EXAMPLES = """\
Exit status: 0 no tensor left its band; 1 a tensor did; 2 there are no statistics, or an
option is wrong.

examples:
  python -m megatron.analysis history enhanced_tensor_logs/mxfp8/statistics
  python -m megatron.analysis history DIR/statistics --since 95 --output history.png --most 20
"""


def add_options(parser: ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder `statistics` of a run, or its parent"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="figure, a .png file (default: DIR/history.png)"
    )
    parser.add_argument(
        "--most",
        type=int,
        default=10,
        metavar="N",
        help="number of tensors to print (default: %(default)s)",
    )
    parser.add_argument(
        "--since",
        type=int,
        default=1,
        metavar="N",
        help="ignore values outside a band before iteration N (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the first tensors outside their bands, draw the figure and return the exit status."""
    from megatron.analysis.bands import excursions
    from megatron.analysis.history_figure import drawn
    from megatron.analysis.outputs.atomic_write import write
    from megatron.analysis.statistics_history import (
        gradients_of,
        has_iterations,
        read_iterations,
        read_statistics,
    )

    if arguments.most < 1:
        raise ValueError(f"--most is {arguments.most}; give 1 or more")
    if arguments.output is not None and arguments.output.suffix.lower() != ".png":
        raise ValueError(f"--output {arguments.output}: the name must end in .png")
    folder = arguments.folder
    if (folder / "statistics").is_dir():
        folder /= "statistics"
    table = read_statistics(folder)
    losses = read_iterations(folder) if has_iterations(folder) else None
    measured = table.iteration.unique()
    if arguments.since > (last := measured.max()):
        raise ValueError(f"--since is {arguments.since}, but the last measured iteration is {last}")
    found = excursions(table)
    found = found[found.iteration >= arguments.since]
    gradients = gradients_of(table[table.iteration >= arguments.since])
    output = arguments.output or folder / "history.png"
    write(output, drawn(losses, found, gradients, measured, arguments.since))
    lines = described(found)
    if lines:
        print(f"The first tensor that left its band: {lines[0]}")
    for line in lines[1 : arguments.most]:
        print(f"  then {line}")
    if len(lines) > arguments.most:
        print(f"  and {len(lines) - arguments.most} more")
    if not lines:
        print("\n".join(nothing_found(measured.tolist(), arguments.since)))
    for line in noisy(gradients, arguments.most):
        print(line)
    print(f"The figure is {output}")
    return 1 if lines else 0


def nothing_found(measured: Sequence[int], since: int) -> list[str]:
    """Return the lines for a run in which no tensor left its band.

    Args:
        measured: iterations whose statistics were measured.
        since: first iteration that was searched.
    """
    from megatron.analysis.bands import ENOUGH

    count = sum(iteration >= since for iteration in measured)
    plural = "s" * (count > 1)
    place = f" from iteration {since} on" if count < len(measured) else ""
    lines = [f"No tensor left its band in {count} measured iteration{plural}{place}."]
    without = count - sum(iteration >= since for iteration in sorted(measured)[ENOUGH:])
    if without:
        which = "It" if count == 1 else "All" if without == count else f"The first {without}"
        verb = "was" if without == 1 else "were"
        lines.append(
            f"{which} {verb} searched for values that are not finite only, because a band needs "
            f"{ENOUGH} earlier measured iterations."
        )
    return lines


def described(found: pd.DataFrame) -> list[str]:
    """Return one line of text for each statistic that left its band, in order."""
    return [
        f"{row.tensor} of {row.operation} {row.gemm} in {row.module} ({row.format}, rank "
        f"{row.rank}), iteration {row.iteration}: {row.statistic} {row.value:.4g}"
        + ("" if pd.isna(row.low) else f", band {row.low:.4g} to {row.high:.4g}")
        for row in found.itertuples()
    ]


def noisy(gradients: pd.DataFrame, most: int) -> list[str]:
    """Return the lines about the gradient rule; none if no quantized gradient was measured.

    Args:
        gradients: result of `gradients_of`.
        most: maximum number of gradients to name; the noisiest ones come first.
    """
    if gradients.empty:
        return []
    from megatron.analysis.statistics_history import OPERAND

    places = gradients.groupby(OPERAND, sort=False, dropna=False, observed=True)
    summary = places.agg(
        smallest=("gradient_to_noise", "min"),
        flagged=("flagged", "sum"),
        measured=("flagged", "size"),
    )
    bad = summary[summary["flagged"] > 0].sort_values("smallest", kind="stable").reset_index()
    if bad.empty:
        return [
            f"No gradient is too noisy: in all {len(summary)}, the rms is at least sqrt(3) times "
            "that of the quantization error."
        ]
    lines = [f"{len(bad)} of {len(summary)} gradients are too noisy (ratio to noise < sqrt(3)):"]
    for row in bad.head(most).itertuples():
        lines.append(
            f"  {row.tensor} of {row.operation} {row.gemm} in {row.module} ({row.format}, rank "
            f"{row.rank}): ratio {row.smallest:.3g}, in {row.flagged} of {row.measured} iterations"
        )
    if len(bad) > most:
        lines.append(f"  and {len(bad) - most} more")
    return lines
