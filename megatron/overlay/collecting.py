"""Start the collection with the first iteration of the script, and end it with the script."""

import math
import multiprocessing
import multiprocessing.util
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.collection import session
from megatron.collection.limits import gib
from megatron.collection.run_card import collection_folder, rank_coordinates
from megatron.collection.settings import read_settings
from megatron.collection.statistics.history import StatisticsSettings
from megatron.core import tensor_saver
from megatron.overlay import script_arguments
from megatron.overlay.command_line import Request

_STARTED = time.time()  #: time at which this process was set up
LOSS = "lm loss"  #: name of the loss in the dictionaries of Megatron-LM's trainer


def check(request: Request) -> None:
    """Raise ValueError if a flag of the collection is invalid, before the script starts."""
    options = request.collection
    folder, iterations = options["save_dir"], options["control_iter"]
    own = ("save_tensors", "save_dir", "control_iter")
    flags = {name: value for name, value in options.items() if name not in own}
    every = flags["tensor_statistics"]
    StatisticsSettings.parse(tensor_statistics=every, directory=folder)
    if options["save_tensors"]:
        read_settings({}, save_dir=folder, control_iter=iterations, flags=flags)


def configure_later(request: Request) -> None:
    """Configure the collection when the first training iteration begins.

    Only then are the process groups, the arguments of the script and the number of iterations in
    its checkpoint known. The variables let checks before that know that tensors are collected.
    """
    if request.options.save_tensors is not None:
        os.environ["TENSOR_SAVE_ENABLED"] = "true"
        os.environ["TENSOR_SAVE_DIR"] = request.options.save_tensors
    tensor_saver.configure_later(lambda: _configuration(request))


def _configuration(request: Request) -> dict[str, Any]:
    """Return the keyword arguments of `tensor_saver.configure`."""
    if multiprocessing.parent_process() is not None:  # such a process runs no atexit functions
        multiprocessing.util.Finalize(None, session.close_at_exit, exitpriority=0)
    args = script_arguments.current()
    return {
        "args": args | request.for_run_card,
        "iteration": int(args.get("iteration") or 0),
        **request.collection,
    }


def observe(losses: Mapping[str, torch.Tensor], grad_norm: float | None) -> None:
    """Pass the loss and the gradient norm of an iteration to the collection.

    Must be called on all ranks.

    Args:
        losses: losses by name; empty on all ranks but those of the last pipeline stage.
        grad_norm: gradient norm; None if it is unknown, or if the iteration was skipped.
    """
    if not tensor_saver.enabled():
        return
    loss = torch.tensor([float(losses.get(LOSS, math.nan)), float(LOSS in losses)])
    if torch.distributed.is_initialized():  # the last rank is always in the last pipeline stage
        loss = loss.to(torch.cuda.current_device())
        torch.distributed.broadcast(loss, torch.distributed.get_world_size() - 1)
    value, known = loss.tolist()
    if message := tensor_saver.observe(value if known else None, grad_norm):
        _report([message])


def finish(request: Request) -> str | None:
    """End the collection after the script has ended normally, and print its result.

    Must be called on all ranks.

    Returns:
        An error message if tensors were requested and are missing; None otherwise.
    """
    if not request.collects:
        return None
    if not session.configured():
        if _spawned_process_has_run(request):
            return None
        return "tensors were requested, but the script ran no training iteration"
    limits = tensor_saver.settle()
    saver = tensor_saver.current()
    if saver is not None:
        tensors = sum(rank["tensors"] for rank in saver.ranks)
        size = gib(sum(rank["bytes"] for rank in saver.ranks))
        report = [f"saved {tensors} tensors, {size}, to {saver.settings.directory}"]
        report += [f"the collection is not complete: {line}" for line in limits]
        _report(report)
    failure = tensor_saver.close()
    return None if failure is None else f"the collection is not complete: {failure}"


def _spawned_process_has_run(request: Request) -> bool:
    """Return whether a process that the script has spawned wrote to the folder of the collection.

    Such a process trains in place of this one, and has its own collection.
    """
    folder = collection_folder(request.collection["save_dir"])
    files = [path for path in folder.rglob("*") if path.is_file()]
    return any(path.stat().st_mtime >= _STARTED for path in files)


def _report(lines: Sequence[str]) -> None:
    """Print lines on the first rank."""
    if rank_coordinates()["world"] == 0:
        for line in lines:
            print(f"[megatron.overlay] {line}", file=sys.stderr, flush=True)
