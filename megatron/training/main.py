"""The entry point, which turns errors into an exit status and one line on stderr.

megatron-core is imported inside the `try` block of `main`, because the import takes seconds and
Ctrl-C must not print a traceback during that time either.
"""

import contextlib
import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from megatron.training.errors import Interrupted, RankError, UserError, is_first_rank, print_error
from megatron.training.signals import interruptible


def main(argv: Sequence[str] | None = None) -> int:
    """Run `pretrain_gpt.py` with the given arguments and return its exit status."""
    try:
        with interruptible():
            return _run(argv)
    except UserError as error:
        print_error(str(error), every_rank=isinstance(error, RankError))
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_initialized():
            _leave_now(error.status)
        return error.status
    except Interrupted as interruption:
        if is_first_rank():
            sys.stderr.write(f"[INTERRUPTED] {interruption}: training stopped\n")
        _leave_now(interruption.status)


def _leave_now(status: int) -> NoReturn:
    """End the process immediately, without running destructors.

    If other ranks have already exited, gloo aborts a process that destroys its process groups,
    which would change the exit status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    for child in multiprocessing.active_children():  # checkpoint writers would outlive this process
        child.kill()
        child.join(timeout=5)
    os._exit(status)


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the `with` block.

    Later collections skip all objects that exist at the end of the block. The block contains
    imports, which leave little garbage and take seven seconds. Garbage collection would take more
    than one of these seconds.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


def _run(argv: Sequence[str] | None) -> int:
    with _without_garbage_collection():
        from megatron.training import device

        device.prepare()

        from megatron.training.arguments.parse_args import parse_args
        from megatron.training.initialize import finalize
        from megatron.training.printing import Log, finish_log
        from megatron.training.training import pretrain

    with contextlib.redirect_stdout(Log(sys.stdout)):  # megatron-core also writes to stdout
        pretrain(parse_args(argv))
        finalize()
    finish_log()
    return 0
