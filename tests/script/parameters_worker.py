"""Build models from command lines without memory for their weights, and describe them.

    python tests/script/parameters_worker.py COMMANDS

The file COMMANDS holds a JSON object that gives, for each name, a vocabulary size and the flags of
`pretrain_gpt.py` for one process. Standard output is a JSON object that gives, for each name, the
padded vocabulary size, the number of parameters, and the names of the weights.
"""

import json
import os
import sys
from pathlib import Path

import torch

from megatron.training import device

device.prepare()

from megatron.core import parallel_state  # noqa: E402
from megatron.training.arguments.parse_args import parse_args  # noqa: E402
from megatron.training.initialize import initialize  # noqa: E402
from megatron.training.model import build_stage, padded_vocab_size  # noqa: E402


def describe(vocabulary: int, flags: list[str]) -> dict:
    run = parse_args(flags)
    if not parallel_state.model_parallel_is_initialized():
        initialize(run.args)
    padded = padded_vocab_size(run.args, vocabulary)
    with torch.device("meta"):
        model = build_stage(run, padded)
    assert all(each.is_meta for each in model.parameters() if each.numel() > 10**6)
    return {
        "vocabulary": padded,
        "parameters": sum(each.numel() for each in model.parameters()),
        "names": sorted(name for name, _ in model.named_parameters()),
    }


def main() -> None:
    torch.cuda.current_device = lambda: torch.device("meta")  # device of the weights
    commands = json.loads(Path(sys.argv[1]).read_text())
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # megatron-core and libraries in C print to standard output
        json.dump({name: describe(**each) for name, each in commands.items()}, output)


if __name__ == "__main__":
    main()
