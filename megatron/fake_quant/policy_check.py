"""`python -m megatron.fake_quant.policy`: is this a quantization type, is this a recipe?"""

import argparse
import sys
from pathlib import Path

from megatron.fake_quant.quant_type import parse_type
from megatron.fake_quant.recipe import load_recipe


def main(arguments: list[str] | None = None) -> int:
    """Check a quantization type or a recipe for a shell script: `python -m
    megatron.fake_quant.policy --check-type mxfp8`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron.fake_quant.policy", description=main.__doc__
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--check-type", metavar="TYPE", help="exit 2 unless TYPE is one")
    what.add_argument("--check-recipe", metavar="FILE", help="exit 2 unless FILE is a recipe")
    options = parser.parse_args(arguments)
    try:
        if options.check_recipe is not None:
            load_recipe(Path(options.check_recipe))
        else:
            parse_type(options.check_type)
    except ValueError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 2
    return 0
