"""Check quantization types and recipes, and print the quantization type of a run.

The command is `python -m megatron.fake_quant.policy`; shell scripts call it.
"""

import argparse
import sys
from pathlib import Path

from megatron.console import ArgumentParser, run_main
from megatron.fake_quant.policy import DEFAULT_SOURCE, canonical_type, resolve
from megatron.fake_quant.quant_type import OPERATIONS
from megatron.fake_quant.recipe import load_recipe


def _flags(words: list[str]) -> dict[str, str | None]:
    """Parse the command line of a training run into the `flags` that `resolve` takes."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--custom-quant-type")
    parser.add_argument("--quant-recipe", dest="recipe")
    for op in OPERATIONS:
        parser.add_argument(f"--{op}-quant", dest=op)
    flags: dict[str, str | None] = vars(parser.parse_known_args(words)[0])
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Check a quantization type or a recipe, or print the quantization type of a run.

    Example: `python -m megatron.fake_quant.policy --check-type mxfp8`.
    """
    parser = ArgumentParser(prog="python -m megatron.fake_quant.policy", description=main.__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check-type", metavar="TYPE", help="print its canonical name, or exit 2")
    action.add_argument(
        "--set-type",
        action="store_true",
        help="print the type that the environment and the settings file set, and the source of "
        "each part; print nothing if they set none",
    )
    action.add_argument("--check-recipe", metavar="FILE", help="exit 2 unless FILE is a recipe")
    action.add_argument(
        "--effective-type",
        nargs=argparse.REMAINDER,
        metavar="FLAG",
        help="print the type of a training run with these flags; must be the last option",
    )
    options = parser.parse_args(arguments)
    try:
        if options.effective_type is not None:
            print(resolve(_flags(options.effective_type)).quant_type)
        elif options.check_recipe is not None:
            load_recipe(Path(options.check_recipe))
        elif options.set_type:
            policy = resolve()
            if any(choice.source != DEFAULT_SOURCE for choice in policy.choices.values()):
                print(policy.quant_type, *policy.describe(), sep="\n")
        else:
            print(canonical_type(options.check_type))
    except ValueError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    run_main(main)
