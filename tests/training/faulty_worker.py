"""`exact_worker.py` with trouble for the collection, as $FAULTS says, a JSON object:

at, command    a shell command, which the first rank runs before iteration `at`
slow           seconds that every write takes longer
hang_after     writes after which a rank's file system takes nothing any more
patience       seconds without a write after which a disk counts as dead
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.collection import pieces
from tests.training.exact_worker import recording


def commanding(at: int, command: str) -> None:
    import torch

    from megatron.training import loop

    step, iterations = loop.train_step, iter(range(1, 1000))

    def after_the_command(*args):
        if next(iterations) == at:
            if os.environ["RANK"] == "0":
                subprocess.run(command, shell=True, check=True)
            torch.distributed.barrier()
        return step(*args)

    loop.train_step = after_the_command


def writing(slow: float, hang_after: int | None) -> None:
    """Writes that take longer, or for ever: nobody opens the other end of a pipe."""
    from megatron.collection.record_writer import RecordWriter

    write, begun, lock = RecordWriter.write, [0], threading.Lock()

    def troubled(self, *args):
        with lock:
            begun[0] += 1
        if hang_after is not None and begun[0] > hang_after:
            pipe = Path(tempfile.mkdtemp(), "pipe")
            os.mkfifo(pipe)
            pipe.open("wb")
        time.sleep(slow)
        write(self, *args)

    RecordWriter.write = troubled


def impatient(patience: float) -> None:
    from megatron.collection.background_writer import BackgroundWriter

    BackgroundWriter.__init__.__kwdefaults__["patience"] = patience


def remembering() -> None:
    """How much host memory the first rank took."""
    from megatron.core import tensor_saver

    close = tensor_saver.close

    def remembered(*args, **kwargs):
        saver = tensor_saver.current()
        failure = close(*args, **kwargs)
        if saver is not None and os.environ["RANK"] == "0":
            memory = saver._writer.memory
            found = {"limit": memory.limit, "peak": memory.peak}
            Path(os.environ["MEMORY_FILE"]).write_text(json.dumps(found))
        return failure

    tensor_saver.close = remembered


def main() -> int:
    from megatron.training import device
    from megatron.training.main import main as train

    device.prepare()
    faults = json.loads(os.environ["FAULTS"])
    recording()
    pieces.small(4)
    if "command" in faults:
        commanding(int(faults["at"]), faults["command"])
    if "slow" in faults or "hang_after" in faults:
        hang_after = faults.get("hang_after")
        writing(float(faults.get("slow", 0)), None if hang_after is None else int(hang_after))
    if "patience" in faults:
        impatient(float(faults["patience"]))
    remembering()
    return train()


if __name__ == "__main__":
    sys.exit(main())
