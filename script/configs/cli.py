"""Run the main program that `train_config.py` and `flash_attention_config.py` share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from configs.launch import start
from configs.lookup import ConfigError
from configs.options import require, split_flags
from configs.run_names import Formats


def run_program(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    *,
    prints: Mapping[str, Callable[[], str]],
    required: str,
    formats_of: Callable[[argparse.Namespace], Formats],
) -> int:
    """Print the text that an option requests, or start the training run; return the exit status.

    Args:
        parser: parser of the arguments before `--`.
        argv: command-line arguments; if None, the arguments of this process.
        prints: for each option that only prints text, a function that returns the text.
        required: name of the option that selects the formats.
        formats_of: function that returns the formats that the parsed options select.
    """
    words, flags = split_flags(sys.argv[1:] if argv is None else argv)
    try:
        options = parser.parse_args(words)
        for name, text in prints.items():
            if getattr(options, name):
                print(text())
                return 0
        require(options, required)
        return start(options, formats_of(options), flags)
    except ConfigError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return error.status
