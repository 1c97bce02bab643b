"""Define the `stats` command: its options and its output."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

from megatron.analysis.text_table import printable_lines, shown

DEFAULT_FORMATS = ("mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4", "hifp8", "fp8_e4m3")
CACHE_FOLDER = ".statistics"  #: name of the cache folder inside a dump or an output folder
LEFT_OUT = 3  #: exit status if unreadable files were left out

DESCRIPTION = """\
Compute statistics of the tensors of a dump and of the effect of number formats on them: error
(SQNR, MSE, bias, gain, cosine) and its causes (clipping, underflow, grid), underflow, saturation,
scales, codes and blocks, along both axes that matmuls quantize along.

Each file is read once, in memory that does not grow with its size. The shards of several ranks are
joined to the logical tensor. Results are cached in DIR/.statistics, so that a second call is fast
and a call after an interrupted one continues.
"""
EXAMPLES = """\
Exit status: 0 every file was measured; 2 an option or the folder is wrong; 3 files that could not
be read were left out and named (with --strict, the first of them ends the command).

examples:
  python -m megatron.analysis stats enhanced_tensor_logs/mxfp8
  python -m megatron.analysis stats dump --formats mxfp8 mxfp8:rceil hifp8:t15 --output stats.csv
  python -m megatron.analysis stats dump --select layer=0,1 tensor_name=input iteration=1-4
  python -m megatron.analysis stats dump --formats none --max-memory 1G --workers 2
  python -m megatron.analysis stats dump --scheduler tcp://head:8786      on a Dask cluster
"""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the `stats` command to `parser`."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder of the dump, searched with its subfolders",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        default=list(DEFAULT_FORMATS),
        metavar="FORMAT",
        help="formats as `python -m megatron.fake_quant list` names them; 'none' measures "
        f"the values only (default: {' '.join(DEFAULT_FORMATS)})",
    )
    parser.add_argument(
        "--select",
        nargs="+",
        default=[],
        metavar="COLUMN=VALUE",
        help="measure only tensors that meet all conditions; a value may be a list (0,1) or a "
        "range (1-4)",
    )
    parser.add_argument(
        "--run", metavar="ID", help="measure only this run; 'latest' for the newest"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write everything to a .csv, .json or .txt file; an earlier file is kept beside it",
    )
    parser.add_argument(
        "--workers", type=int, metavar="N", help="number of threads (default: one per processor)"
    )
    parser.add_argument(
        "--max-memory",
        metavar="SIZE",
        help="limit of the memory, for example 800M or 2G (default: no limit)",
    )
    parser.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="address of a Dask cluster whose workers see DIR under the same path; the cluster "
        "sets their threads and memory",
    )
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        help=f"folder of the cache; 'none' caches nothing (default: DIR/{CACHE_FOLDER})",
    )
    parser.add_argument(
        "--strict", action="store_true", help="stop at the first file that cannot be read"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compute statistics, print a summary, write the output file and return the exit status."""
    from megatron.analysis.cli.select import select
    from megatron.analysis.dump.run_endings import remarks_on, unfinished
    from megatron.analysis.dump.tensor_files import UnreadableTensorError
    from megatron.analysis.outputs.atomic_write import write_keeping
    from megatron.analysis.stats.cache import ForeignCacheError
    from megatron.analysis.stats.engine import compute
    from megatron.analysis.stats.export import WRITERS, summary
    from megatron.analysis.store import TensorStore

    if arguments.workers is not None and arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}; give 1 or more")
    if arguments.scheduler is not None:
        for name in ("workers", "max_memory"):
            if getattr(arguments, name) is not None:
                raise ValueError(
                    f"--{name.replace('_', '-')} sets the threads or memory of this process, but "
                    "with --scheduler the workers of the cluster compute; leave it out, and "
                    "set the limits of the workers (dask worker --nthreads N --memory-limit SIZE)"
                )
    output: Path | None = arguments.output
    if output is not None and output.suffix not in WRITERS:
        raise ValueError(f"--output {output}: the name must end in {', '.join(WRITERS)}")
    if output is not None and not output.parent.is_dir():
        raise ValueError(f"--output {output}: there is no folder {output.parent}")
    memory = None if arguments.max_memory is None else parse_size(arguments.max_memory)
    store = TensorStore(arguments.folder)
    if arguments.run is not None:
        store = store.only(arguments.run)
    options = {
        "select": select(store, arguments.select) if arguments.select else None,
        "workers": arguments.workers,
        "max_memory": memory,
        "scheduler": arguments.scheduler,
        "strict": arguments.strict,
        "progress": True,
    }
    formats = [] if arguments.formats == ["none"] else arguments.formats
    cache = cache_folder(arguments.cache, arguments.folder)
    try:
        try:
            statistics = compute(store, formats, cache=cache, **options)
        except ForeignCacheError as error:
            if arguments.cache is not None:  # the user chose this folder and must choose another
                raise
            print(f"[WARNING] {error} (--cache); results are not cached", file=sys.stderr)
            statistics = compute(store, formats, cache=None, **options)
    except UnreadableTensorError as error:
        print(f"[ERROR] {shown(error)}", file=sys.stderr)
        return LEFT_OUT
    for problem in statistics.problems:
        print(f"[ERROR] {problem}", file=sys.stderr)
    print(printable_lines(summary(statistics)))
    for remark in [*statistics.remarks, *remarks_on(unfinished(store))]:
        print(f"[NOTE] {shown(remark)}", file=sys.stderr)
    if len(store.missing):
        print(f"{len(store.missing)} files listed in an index are missing (removed or moved?)")
    if output is not None:
        content = printable_lines(WRITERS[output.suffix](statistics)).encode()
        for kept in write_keeping(output, content):
            print(f"Kept the earlier file as {shown(kept)}")
        print(f"Wrote {shown(output)}")
    if statistics.problems:
        left_out = len(statistics.problems)
        print(f"[ERROR] {left_out} file(s) were left out; replace or remove them", file=sys.stderr)
        return LEFT_OUT
    return 0


def parse_size(text: str) -> int:
    """Return the number of bytes given by a string such as `800M`, `2G`, `2GiB` or `123456`.

    Units are powers of 1024.

    Raises:
        ValueError: if the string is not a valid size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"{text!r} is not a size; give a number with K, M, G or T, as in 800M")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def cache_folder(named: str | None, folder: Path) -> Path | None:
    """Return the folder of the statistics cache, or None if nothing is to be cached.

    Nothing is cached if the user passes `none`, or if no other folder is given and the default
    folder in the dump cannot be used.

    Args:
        named: value of `--cache`.
        folder: folder of the dump.
    """
    if named == "none":
        return None
    if named is not None:
        return Path(named)
    from megatron.analysis.stats.cache import ForeignCacheError, check_place

    cache = folder / CACHE_FOLDER
    try:
        check_place(cache)
        cache.mkdir(exist_ok=True)
        probe = cache / f"write_test_{os.getpid()}.partial"
        with probe.open("xb"):  # mode "x" fails if the path exists, even as a dangling link
            pass
        probe.unlink()
    except ForeignCacheError as error:
        print(f"[WARNING] {error} (--cache); results are not cached", file=sys.stderr)
        return None
    except OSError:
        where = shown(folder)
        print(
            f"[NOTE] {where} is not writable: results are not cached (--cache sets another folder)",
            file=sys.stderr,
        )
        return None
    return cache
