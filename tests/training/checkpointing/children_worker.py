"""Run `pretrain_gpt.py`, and print those of its child processes that are still running."""

import multiprocessing
import sys

from megatron.training.main import main

if __name__ == "__main__":
    status = main()
    print(f"children: {multiprocessing.active_children()}")
    sys.exit(status)
