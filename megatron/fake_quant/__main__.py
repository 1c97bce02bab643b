"""Show the number formats.

python -m megatron.fake_quant list
python -m megatron.fake_quant list mx:e3m4:b16:rceil
"""

import argparse
import sys

from megatron.fake_quant.describe import markdown
from megatron.fake_quant.formats import FORMATS
from megatron.fake_quant.names import get_format


def main(arguments: list[str] | None = None) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron.fake_quant",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="a Markdown table of formats")
    listing.add_argument("format", nargs="*", help="default: every named one")
    names = parser.parse_args(arguments).format or list(FORMATS)
    try:
        print(markdown(map(get_format, names)))
    except ValueError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
