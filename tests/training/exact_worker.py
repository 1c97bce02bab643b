"""`pretrain_gpt.py` that also writes every digit of each iteration's loss and gradient norm, which
its log rounds: one JSON object to the file named by $STEPS_FILE, from the first rank.
"""

import json
import os
import sys
from pathlib import Path

from megatron.training.main import main


def recording() -> None:
    from megatron.training import loop

    step, steps = loop.train_step, []

    def recorded(*args):
        done = step(*args)
        steps.append({"loss": done.losses["lm loss"], "norm": done.grad_norm})
        if os.environ.get("RANK", "0") == "0":
            Path(os.environ["STEPS_FILE"]).write_text(json.dumps(steps))
        return done

    loop.train_step = recorded


if __name__ == "__main__":
    from megatron.training import device

    device.prepare()
    recording()
    sys.exit(main())
