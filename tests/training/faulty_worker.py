"""A worker like exact_worker.py that injects faults into the collection.

$FAULTS is a JSON object with these keys:

at, command    a shell command that the first rank runs before iteration `at`
slow           seconds by which every write is delayed
hang_after     number of writes after which every further write of a rank hangs
patience       seconds without a completed write after which a disk counts as dead
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.collection.small_direct_writes import use_small_pieces
from tests.training.exact_worker import record_steps


def run_command_before(iteration: int, command: str) -> None:
    """Make the first rank run a shell command before an iteration, while the others wait."""
    import torch

    from megatron.training import loop

    train_step, iterations = loop.train_step, iter(range(1, 1000))

    def step_after_command(*args):
        if next(iterations) == iteration:
            if os.environ["RANK"] == "0":
                subprocess.run(command, shell=True, check=True)
            torch.distributed.barrier()
        return train_step(*args)

    loop.train_step = step_after_command


def delay_writes(seconds: float, hang_after: int | None) -> None:
    """Delay every write, and let later ones hang by opening a pipe that nobody reads."""
    from megatron.collection.record_writer import RecordWriter

    write, writes_begun, lock = RecordWriter.write, [0], threading.Lock()

    def delayed_write(self, *args):
        with lock:
            writes_begun[0] += 1
        if hang_after is not None and writes_begun[0] > hang_after:
            pipe = Path(tempfile.mkdtemp(), "pipe")
            os.mkfifo(pipe)
            pipe.open("wb")
        time.sleep(seconds)
        write(self, *args)

    RecordWriter.write = delayed_write


def set_patience(patience: float) -> None:
    """Set the seconds without a completed write after which a disk counts as dead."""
    from megatron.collection.background_writer import BackgroundWriter

    BackgroundWriter.__init__.__kwdefaults__["patience"] = patience


def record_memory() -> None:
    """Record how much host memory the collection of the first rank used."""
    from megatron.core import tensor_saver

    close = tensor_saver.close

    def recorded_close(*args, **kwargs):
        saver = tensor_saver.current()
        failure = close(*args, **kwargs)
        if saver is not None and os.environ["RANK"] == "0":
            memory = saver._writer.memory
            usage = {"limit": memory.limit, "peak": memory.peak}
            Path(os.environ["MEMORY_FILE"]).write_text(json.dumps(usage))
        return failure

    tensor_saver.close = recorded_close


def main() -> int:
    from megatron.training import device
    from megatron.training.main import main as train

    device.prepare()
    faults = json.loads(os.environ["FAULTS"])
    record_steps()
    use_small_pieces(4)
    if "command" in faults:
        run_command_before(int(faults["at"]), faults["command"])
    if "slow" in faults or "hang_after" in faults:
        hang_after = faults.get("hang_after")
        delay_writes(float(faults.get("slow", 0)), None if hang_after is None else int(hang_after))
    if "patience" in faults:
        set_patience(float(faults["patience"]))
    record_memory()
    return train()


if __name__ == "__main__":
    sys.exit(main())
