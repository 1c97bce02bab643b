"""Pretrain GPT: `python pretrain_gpt.py --help`, or under `torchrun --nproc-per-node N`."""

import sys

from megatron.training.main import main

if __name__ == "__main__":  # the checkpoint writer's manager process imports this file again
    sys.exit(main())
