"""Runs `pretrain_gpt.py` again and again in copies of one process that has imported everything: a
run of a tiny model then takes a second and not ten.

Reads a line of JSON for each run, {"arguments": [...], "environment": {...}, "file_bytes": N or
null}, and answers with one, {"status", "output", "errors"}. No file that a run writes may be larger
than `file_bytes`, as if the disk were full then.
"""

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
from typing import Any, NoReturn

from megatron.training import device

device.prepare()

from megatron.training import checkpointing, training  # noqa: E402, F401  (what takes long)
from megatron.training.main import main  # noqa: E402


def run(request: dict[str, Any], output: int, errors: int) -> NoReturn:
    """In the copy: one run, to its exit status."""
    os.dup2(output, sys.stdout.fileno())
    os.dup2(errors, sys.stderr.fileno())
    os.environ.update(request["environment"])
    if request["file_bytes"] is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the call fails instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"], resource.RLIM_INFINITY))
    status = 1
    try:
        status = main(request["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def answer(line: str) -> dict[str, Any]:
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        child = os.fork()
        if child == 0:
            run(json.loads(line), output.fileno(), errors.fileno())
        _, status = os.waitpid(child, 0)
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return dict(zip(("output", "errors"), texts, strict=True)) | {
        "status": os.waitstatus_to_exitcode(status)
    }


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(line)) + "\n")
        sys.stdout.flush()
