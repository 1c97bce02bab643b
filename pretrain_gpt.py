"""Pretrain GPT: `python pretrain_gpt.py --help`, or under `torchrun --nproc-per-node N`."""

import sys

if __name__ == "__main__":  # the checkpoint writer's manager process imports this file again
    from megatron.training import device

    device.prepare()

    from megatron.training.main import main

    sys.exit(main())
