#!/usr/bin/env python3
"""The first look at collected tensors: quick_analysis.png and tensor_stats.txt.

    python script/visualization/quick_visualize.py --tensor_dir enhanced_tensor_logs/mxfp8
    --output_dir draw

Reads every .pt file below the folder, in parallel and without loading the folder into memory. The
picture shows the histogram of all values and how the tensors divide by quantization type, layer
type and operation; the text has the statistics, overall, by group and tensor by tensor. Where one
of the two files is there already with another content, the earlier one is kept under a name with
its time.

Exit status: 0 if every file was read, 3 if some were not (the others are drawn all the same), 1 if
none was, 2 for a wrong option. Errors go to standard error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Both spellings of each option are accepted: the user's documents have underscores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tensor_dir", "--tensor-dir", type=Path, metavar="DIR",
        default=Path("enhanced_tensor_logs"),
        help="folder with .pt files, searched with its subfolders (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--output_dir", "--output-dir", type=Path, default=Path("draw"), metavar="DIR",
        help="where the two files go; made if missing (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--run",
        metavar="ID",
        help="only the tensors of this run; 'latest' for the newest (default: all)",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="files read at a time (default: one a processor)"
    )
    parsed = parser.parse_args(arguments)
    if parsed.workers is not None and parsed.workers < 1:
        parser.error(f"--workers is {parsed.workers}; give 1 or more")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Draw; returns the exit status."""
    args = parse_arguments(arguments)
    try:
        import matplotlib

        matplotlib.use("agg")

        from megatron.analysis.quick import quick_analysis
    except ImportError as error:
        return fail(
            f'no module {error.name!r} in {sys.executable}; use "$(bash script/setup_env.sh)"'
        )

    try:
        result = quick_analysis(
            args.tensor_dir, args.output_dir, run=args.run, workers=args.workers, progress=True
        )
    except ValueError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename or args.output_dir}: {error.strerror or error}")
    except KeyboardInterrupt:
        return fail("interrupted; nothing was written", status=130)
    return report(result, args.tensor_dir)


def report(result: object, folder: Path) -> int:
    """Say what was found and made; on standard error, each file that was left out."""
    from megatron.analysis.quick import QuickResult

    assert isinstance(result, QuickResult)
    measured, summary = result.measurements, result.measurements.summary()
    runs = measured.table.groupby("run_id", dropna=False).size()
    print(f"{len(measured.table)} tensors, {summary.count} values, in {folder}")
    for run_id, count in runs.items():
        print(f"  run {run_id if isinstance(run_id, str) else '(unknown)'}: {count} tensors")
    if summary.nan or summary.inf:
        rows = measured.table[(measured.table["nan"] > 0) | (measured.table["inf"] > 0)]
        print(
            f"  {summary.nan} NaN and {summary.inf} Inf values in {len(rows)} tensors; the first:"
        )
        for row in rows.head(5).to_dict("records"):
            print(f"    {row['path'].name}: {row['nan']} NaN, {row['inf']} Inf")
    if result.missing:
        print(f"  {result.missing} files that an index names are not there (removed or moved?)")
    for kept in result.kept:
        print(f"Kept the earlier file as {kept}")
    print(f"Wrote {result.picture}")
    print(f"Wrote {result.text}")
    for problem in result.problems:
        print(f"[ERROR] {problem}", file=sys.stderr)
    if result.problems:
        left_out = len(result.problems)
        return fail(
            f"{left_out} file(s) are not in the picture; replace or remove them",
            status=3,
        )
    return 0


def fail(message: str, *, status: int = 1) -> int:
    """Print an error the way all scripts here do; returns the exit status."""
    print(f"[ERROR] {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
