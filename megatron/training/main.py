"""The entry point: what a run raises becomes an exit status and one line."""

import os
import sys
from collections.abc import Sequence

from megatron.training.arguments import parse_args
from megatron.training.errors import Interrupted, UserError, is_first_rank, report
from megatron.training.initialize import finalize
from megatron.training.signals import interruptible
from megatron.training.training import pretrain


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pretrain_gpt.py` with these arguments; returns the exit status."""
    try:
        with interruptible():
            pretrain(parse_args(argv))
            finalize()
    except UserError as error:
        report(str(error))
        return error.status
    except Interrupted as interruption:
        if is_first_rank():
            sys.stderr.write(f"[INTERRUPTED] {interruption}: training stopped\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(interruption.status)  # peers may be gone: no collective, no destructor
    return 0
