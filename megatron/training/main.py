"""The entry point: what a run raises becomes an exit status and one line.

megatron-core is imported inside of the guarded block: that takes seconds, and Ctrl-C must leave
without a traceback then as well.
"""

import contextlib
import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from megatron.training.errors import Interrupted, RankError, UserError, is_first_rank, report
from megatron.training.signals import interruptible


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pretrain_gpt.py` with these arguments; returns the exit status."""
    try:
        with interruptible():
            return _run(argv)
    except UserError as error:
        report(str(error), every_rank=isinstance(error, RankError))
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_initialized():
            _leave_now(error.status)
        return error.status
    except Interrupted as interruption:
        if is_first_rank():
            sys.stderr.write(f"[INTERRUPTED] {interruption}: training stopped\n")
        _leave_now(interruption.status)


def _leave_now(status: int) -> NoReturn:
    """Without destructors: peers may be gone, and gloo then aborts a process that takes its groups
    down, with another status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # a checkpoint's writers would outlive us
        child.kill()
        child.join(timeout=5)
    os._exit(status)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Imports leave little to collect; to look for it all along takes more than a second of seven,
    and later collections need not look at what they made again.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _run(argv: Sequence[str] | None) -> int:
    with _without_collector():
        from megatron.training import device

        device.prepare()

        from megatron.training.arguments.parse_args import parse_args
        from megatron.training.initialize import finalize
        from megatron.training.printing import Log, finish_log
        from megatron.training.training import pretrain

    with contextlib.redirect_stdout(Log(sys.stdout)):  # megatron-core prints as well
        pretrain(parse_args(argv))
        finalize()
    finish_log()
    return 0
