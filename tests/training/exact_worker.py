"""A worker that runs `pretrain_gpt.py` and records the unrounded loss and gradient norm of each
iteration.

The first rank writes them as JSON to the file that $STEPS_FILE names; the log rounds them.
"""

import json
import os
import sys
from pathlib import Path

from megatron.training.main import main


def record_steps() -> None:
    """Make the training loop record the result of every step."""
    from megatron.training import loop

    train_step, steps = loop.train_step, []

    def recorded_step(*args):
        result = train_step(*args)
        steps.append({"loss": result.losses["lm loss"], "norm": result.grad_norm})
        if os.environ.get("RANK", "0") == "0":
            # A signal may end the process here; the file must be whole.
            path = Path(os.environ["STEPS_FILE"])
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(steps))
            partial.replace(path)
        return result

    loop.train_step = recorded_step


if __name__ == "__main__":
    from megatron.training import device

    device.prepare()
    record_steps()
    sys.exit(main())
