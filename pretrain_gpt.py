"""Pretrain a GPT model; see `python pretrain_gpt.py --help`. torchrun starts several ranks."""

import sys

from megatron.training.main import main

if __name__ == "__main__":  # the checkpoint writer's manager process imports this file again
    sys.exit(main())
