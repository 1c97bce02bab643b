"""Define the options of preprocess.py, including those that it shares with prepare.py."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from documents import Settings
from readers import FORMATS

sys.path.append(str(Path(__file__).resolve().parents[2]))

from megatron.console import ArgumentParser


def parse(argv: list[str] | None, description: str | None) -> Settings | argparse.Namespace:
    """Return the settings of a run, or the parsed options if only a check is requested."""
    parser = ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", type=Path, nargs="+", help="files and folders")
    add("--output-prefix", type=Path, help="writes PREFIX_<key>_document.bin, .idx, .json")
    add("--json-keys", nargs="+", default=["text"], help="keys or columns of the text (text)")
    add("--input-format", choices=FORMATS, help="default: guessed from each file's name")
    add(
        "--document-separator",
        default="",
        metavar="LINE",
        help="line between the documents of a text file (default: a blank line)",
    )
    add_tokenizer(parser)
    add("--append-eod", action="store_true", help="end each document with the eod token")
    add_running(parser)
    add("--check", metavar="PREFIX", help="only check PREFIX.bin, .idx and .json")
    options = vars(parser.parse_args(argv))
    if (prefix := options.pop("check")) is not None:
        return argparse.Namespace(check=prefix, **options)
    for name in ("input", "output_prefix"):
        if options[name] is None:
            parser.error(f"--{name.replace('_', '-')} is missing")
    for name in ("input", "json_keys"):
        options[name] = tuple(options[name])
    return Settings(**options)


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the tokenizer."""
    add = parser.add_argument
    add("--tokenizer-type", help="default: guessed from --tokenizer-model")
    add("--tokenizer-model", type=Path, help="a .model or .tiktoken file, or a folder")
    add("--vocab-size", type=int, help="vocabulary of the NullTokenizer, whose text is numbers")


def add_running(parser: argparse.ArgumentParser) -> None:
    """Add the options for worker processes, bad lines and existing output."""
    add = parser.add_argument
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--workers", type=int, default=cores or 1, help=f"processes (default here: {cores})")
    add("--strict", action="store_true", help="stop at the first line that is not a document")
    add(
        "--overwrite",
        action="store_true",
        help="replace existing output, and an interrupted run with different input or options",
    )
