"""Run `pretrain_gpt.py` and kill it at a chosen call, as if the machine had crashed.

$KILL_AT is `module:function:n`: the process sends itself SIGKILL instead of calling the function
for the n-th time.
"""

import importlib
import multiprocessing
import os
import signal
import sys

from megatron.training import device
from megatron.training.main import main


def arm() -> None:
    module, name, number = os.environ["KILL_AT"].split(":")
    owner = importlib.import_module(module)
    function, calls = getattr(owner, name), 0

    def called(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == int(number):
            for child in multiprocessing.active_children():  # as a crash of the machine does
                child.kill()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    setattr(owner, name, called)


if __name__ == "__main__":
    device.prepare()
    arm()
    sys.exit(main())
