"""What the shell drivers ask: `python script/configs cuda`, `python script/configs data ...`.

`cuda` ends with 0 where torch has a CUDA device, else with 1. `data` prints the tokenizer and the
prefix of the data, a line each; the default is Wikipedia in the tokens of Llama 3.2 1B.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs.datasets import DATASETS
from configs.models import MODELS
from configs.names import ConfigError
from configs.resolve import DataRequest, Files, at_home, cuda_devices, resolve_data


def main() -> int:
    parser = argparse.ArgumentParser(prog="python script/configs", description=__doc__)
    parser.add_argument("what", choices=("cuda", "data"))
    parser.add_argument("--tokenizer", help="as named by the user")
    parser.add_argument("--data", help="as named by the user")
    parser.add_argument("--tokenizer-name", default="--tokenizer-path", help="for the messages")
    parser.add_argument("--data-name", default="--data-path", help="for the messages")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.what == "cuda":
        return 0 if cuda_devices(sys.executable, dry_run=options.dry_run) else 1
    model = MODELS["llama32-1b"]
    request = DataRequest(
        tokenizer=options.tokenizer,
        data=options.data,
        default=Files(
            tokenizer=at_home(model.tokenizer.path),
            data=at_home(DATASETS["wikipedia"].prefix(model.tokenizer)),
        ),
        corpus=True,
        names=(options.tokenizer_name, options.data_name),
    )
    try:
        files = resolve_data(request, sys.executable, dry_run=options.dry_run)
    except ConfigError as error:
        print(f"[ERROR] {error}", file=sys.stderr)
        return error.status
    print(files.tokenizer, files.data, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
