"""Define the command `serve`: its options, and what it checks before the server starts."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.analysis.dump.folder import check_folder
from megatron.optional_packages import check_installed

DEFAULT_FORMATS = ("mxfp8", "mxfp4", "nvfp4", "hifp8")

DESCRIPTION = """\
Serve a dump as web pages: any statistic by iteration, layer and tensor as a map, and for each
tensor its histogram, blocks, channels, tokens, codes, attention and the values themselves as an
image, in any format. The pages also follow a run in progress.

Statistics come from the cache that stats, draw and report share. What it lacks is measured in the
background, the visible tensors first.
"""
EXAMPLES = """\
Only this machine can open the pages, unless --host gives another address. In that case, the pages
require a token, which is part of the printed address. Over ssh, forward the port instead:

  ssh -L 8050:127.0.0.1:8050 cluster   then open http://127.0.0.1:8050/ on your own machine

Ctrl-C stops the server. Exit status: 0 after Ctrl-C; 2 an option or the folder is wrong, or the
port is taken.

examples:
  python -m megatron.analysis serve enhanced_tensor_logs
  python -m megatron.analysis serve enhanced_tensor_logs --logs tensorboard_logs logs
  python -m megatron.analysis serve enhanced_tensor_logs --port 0 --formats mxfp4 nvfp4:2d
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command `serve` to `parser`."""
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder of the dump, searched with its subfolders; only files in it are shown",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8050,
        metavar="N",
        help="port (default: %(default)s; 0: any free one)",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="H",
        help="address at which to listen (default: %(default)s, this machine only)",
    )
    parser.add_argument(
        "--token",
        metavar="T",
        help="text of 16 characters or more that the pages require (default: none on this machine, "
        "a new random one for another --host)",
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        default=list(DEFAULT_FORMATS),
        metavar="FORMAT",
        help=f"formats to measure (default: {' '.join(DEFAULT_FORMATS)})",
    )
    parser.add_argument(
        "--logs",
        nargs="+",
        type=Path,
        default=[],
        metavar="DIR",
        help="further folders with event files of TensorBoard and logs (*.log)",
    )
    parser.add_argument(
        "--study",
        type=Path,
        metavar="FILE",
        help="study.parquet of a study of this dump (default: the one in DIR, DIR/study or beside "
        "DIR in study)",
    )
    parser.add_argument(
        "--cache",
        metavar="FOLDER",
        help="folder of the statistics cache; 'none' caches nothing (default: DIR/.statistics)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve the dump until Ctrl-C and return the exit status."""
    check_folder(arguments.folder)
    for folder in arguments.logs:
        check_folder(folder)
    if not 0 <= arguments.port <= 65535:
        raise ValueError(f"--port is {arguments.port}; give a number from 0 to 65535")
    if arguments.token is not None and len(arguments.token) < 16:
        raise ValueError(
            f"--token has {len(arguments.token)} characters; give 16 or more, or leave it out"
        )
    if arguments.study is not None and not arguments.study.is_file():
        raise ValueError(f"--study {arguments.study}: there is no such file")
    for package in ("dash", "waitress"):
        check_installed(package, "the command serve")
    if arguments.study is not None:
        from megatron.analysis.serve.explorer import read_study

        arguments.study = arguments.study.resolve()  # unlike links in DIR, this one is followed
        read_study(arguments.study)
    from megatron.analysis.cli.stats_command import cache_folder
    from megatron.analysis.serve.server import Options, serve
    from megatron.fake_quant.names import get_format

    names = [get_format(name).name for name in arguments.formats]
    return serve(
        Options(
            arguments.folder,
            list(dict.fromkeys(names)),
            cache_folder(arguments.cache, arguments.folder),
            arguments.host,
            arguments.port,
            arguments.token,
            arguments.logs,
            arguments.study,
        )
    )
