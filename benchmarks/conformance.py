"""Compare other public packages with the conformance kit of the number formats.

    python benchmarks/conformance.py                          # all formats and packages
    python benchmarks/conformance.py --formats mxfp8 nvfp4 --output /tmp/conformance.md
    python benchmarks/conformance.py --transformer-engine ../TransformerEngine

The kit is the one that `python -m megatron.fake_quant vectors` writes. Each package (peer) gets the
inputs of each format that it supports. Its dequantized values are compared with those of the kit:
zeros of either sign are equal, and so are all NaNs. For a peer that differs, inputs with fewer
nonzero values are tried, and the smallest one that still shows a difference is reported.

The peers have their own environment, which `python benchmarks/formats.py --help` describes.
Transformer Engine is compared only if it is installed and there is a CUDA device, or if the folder
of its source is given: its references in plain torch need neither. If the source of fouroversix is
given, it replaces the installed release.

Writes a Markdown file.
"""

import argparse
import json
import platform
import sys
import tempfile
from pathlib import Path

import conformance_report
import peer_process
import peers_env
import results_page

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from megatron.console import ArgumentParser  # noqa: E402
from megatron.fake_quant.formats import FORMATS  # noqa: E402
from megatron.fake_quant.inspect import vector_kit  # noqa: E402
from megatron.fake_quant.names import get_format  # noqa: E402

WORKER = Path(__file__).with_name("conformance_worker.py")
#: Formats that are compared in addition to those in the table FORMATS, because other packages
#: (peers) have them, too.
SPELLED_OUT = (
    "mx:e4m3:b32:rceil",
    "mx:e5m2:b32:rceil",
    "mx:e2m1:b32:rceil",
    "mx:e4m3:b32:ceil",
    "mx:e2m1:b32:ceil",
    "mx:e4m3:b32:even",
    "mx:e2m1:b32:even",
    "nvfp4:2d",
    "nvfp4:4over6-mae",
    "nvfp4:4over6-mse",
    "nvfp4:2d:4over6-mae",
    "nvfp4:outer-row",
    "fp8_block:2d",
    "fp8_block:ue8m0",
    "fp8_block:ue8m0:2d",
    "nv:e2m3:b16:e4m3",
    "nv:e3m2:b16:e4m3",
    "hifp8:inf",
)


#: For each peer that can be loaded from its source: the option, the attribute of the parsed
#: options, and the peer's name.
SOURCES = (
    ("--fouroversix", "fouroversix", "fouroversix"),
    ("--transformer-engine", "transformer_engine", "Transformer Engine"),
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        advice="see --help",
    )
    add = parser.add_argument
    add(
        "--formats",
        nargs="+",
        metavar="FORMAT",
        help=f"formats to compare (default: all named formats and {len(SPELLED_OUT)} others)",
    )
    add(
        "--output",
        type=Path,
        default=REPO / "docs" / "results" / "conformance.md",
        metavar="FILE.md",
        help="default: docs/results/conformance.md",
    )
    add("--peers-python", type=Path, metavar="PATH", help="default: .venv-peers/bin/python")
    for option, _, name in SOURCES:
        add(option, type=Path, metavar="DIR", help=f"folder with the source of {name}")
    options = parser.parse_args(arguments)
    for option, field, _ in SOURCES:
        folder = getattr(options, field)
        if folder is not None and not folder.is_dir():
            parser.error(f"{option} {folder} is not a folder")
    return options


def run_worker(python: Path, kit: Path, options: argparse.Namespace) -> list[peer_process.Event]:
    """Run the worker process, show its progress, and return all events that it reports."""
    folders = {name: getattr(options, field) for _, field, name in SOURCES}
    sources = {name: str(folder.resolve()) for name, folder in folders.items() if folder}
    command = [python, WORKER, json.dumps({"kit": str(kit), "sources": sources})]
    return peer_process.run_worker(command, {"OMP_NUM_THREADS": "1"}, show)


def show(event: peer_process.Event) -> None:
    """Show an event of the worker to the user."""
    if event["kind"] == "peer" and event["missing"]:
        peers_env.say(f"without {event['name']}: {event['missing']}")
    if event["kind"] == "result":
        counts = ", ".join(f"{len(event[k])} {k}" for k in ("agree", "bits", "differ", "refused"))
        peers_env.say(f"{event['peer']} {event['format']}: {counts}")


def main() -> int:
    options = parse()
    try:
        formats = [get_format(name) for name in options.formats or (*FORMATS, *SPELLED_OUT)]
    except ValueError as error:
        raise SystemExit(f"[ERROR] --formats: {error}") from None
    python = options.peers_python
    python = peers_env.made() if python is None else peers_env.given(python)
    with tempfile.TemporaryDirectory() as folder:
        kit = Path(folder) / "kit"
        peers_env.say(vector_kit.write(kit, formats).partition(" to ")[0])
        events = run_worker(python, kit, options)
    made_by = (
        f"Python {platform.python_version()}. Made by `{results_page.quoted('conformance.py')}`."
    )
    text = conformance_report.page(events, made_by)
    results_page.publish(text, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
