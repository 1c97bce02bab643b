"""Pretrain a GPT model. Use `torchrun` to start several ranks; `--help` lists the flags."""

import sys

from megatron.training.main import main

if __name__ == "__main__":  # the process that manages checkpoint writers re-imports this file
    sys.exit(main())
