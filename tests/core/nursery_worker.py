"""Start child processes that collect tensors, and end each at a given instant.

    python nursery_worker.py

A line of input is a JSON list: DIR, "birth" or "first", SECONDS, SIGNAL... It forks a child that
collects into DIR as our trainer does. SECONDS after its start, or after the start of its first
tensor, the child receives each SIGNAL. A line of output describes its end: `{"status": as in
subprocess, "first": seconds from its start to the first tensor, "seconds": from then or from its
start to its end}`. This process has imported everything, so a child only collects.
"""

import json
import os
import signal
import sys
import threading
import time
import traceback

import torch

import megatron.cpu_backend

megatron.cpu_backend.activate()

from megatron.collection.module_identity import ModuleIdentity  # noqa: E402
from megatron.collection.training_clock import MicroBatch, clock  # noqa: E402
from megatron.core import tensor_saver  # noqa: E402  needs the backend
from megatron.training.errors import Interrupted  # noqa: E402
from megatron.training.signals import interruptible  # noqa: E402
from tests.collection.small_direct_writes import use_small_pieces  # noqa: E402

ITERATIONS, MICRO_BATCHES, LAYERS = 4, 2, 8
TENSORS = ITERATIONS * MICRO_BATCHES * LAYERS
ANSWERED = (signal.SIGINT, signal.SIGTERM)
#: room for three tensors, so that training mostly waits for a write
HOST_GIB = 3 * 4096 / 2**30


def collect(folder: str, begun: int) -> None:
    tensor_saver.configure(
        {"seed": 1},
        save_tensors=True,
        save_dir=folder,
        control_iter=0,
        collect_micro_batches=0,
        collect_max_host_gib=HOST_GIB,
    )
    os.write(begun, b".")
    for _ in range(ITERATIONS):
        tensor_saver.begin_iteration()
        for micro_batch in range(MICRO_BATCHES):
            clock.micro_batch = MicroBatch(clock.iteration, micro_batch)
            for layer in range(LAYERS):
                identity = ModuleIdentity(f"decoder.layers.{layer}.mlp.linear_fc1", layer)
                capture = tensor_saver.capture(identity, "linear")
                capture.save("input", torch.full((8, 2, 64), float(layer)), dims="s b h")
        tensor_saver.end_iteration()


def live(folder: str, begun: int) -> int:
    """Run a trainer and return its exit status."""
    try:
        with interruptible():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ANSWERED)
            try:
                collect(folder, begun)
                tensor_saver.settle()
            except BaseException as error:
                tensor_saver.close(aborted=str(error))
                raise
            else:
                return int(tensor_saver.close() is not None)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, ANSWERED)
    except Interrupted as interruption:
        return interruption.status


def raise_one(folder: str, since: str, seconds: float, numbers: list[int]) -> dict:
    begun, begins = os.pipe()
    born = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 70
        try:
            status = live(folder, begins)
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.close(begins)
    first = None
    if since == "first":
        os.read(begun, 1)
        first = time.monotonic() - born
    time.sleep(seconds)
    for number in numbers:
        os.kill(child, number)  # a child that has ended can be signaled until it is waited for
    _, status = os.waitpid(child, 0)
    os.close(begun)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "first": first,
        "seconds": time.monotonic() - born - (first or 0.0),
    }


def main() -> None:
    use_small_pieces()
    torch.full((8, 2, 64), 1.0)  # torch initializes what it needs before the first fork
    assert threading.active_count() == 1, "a fork would lack the other threads"
    signal.pthread_sigmask(signal.SIG_BLOCK, ANSWERED)  # until a child can answer them
    for line in sys.stdin:
        folder, since, seconds, *numbers = json.loads(line)
        found = raise_one(folder, since, seconds, numbers)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
