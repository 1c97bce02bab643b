"""Start the collection with the first iteration of the script, and end it with the script."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.collection import session, session_end
from megatron.collection.collectives import from_all_ranks
from megatron.collection.limits import gib
from megatron.collection.plan import Planner, make_plan, planned_iterations
from megatron.collection.plan_report import report
from megatron.collection.run_card import collection_folder, rank_coordinates
from megatron.collection.settings import enabled_by_environment, read_settings
from megatron.collection.statistics.history import StatisticsSettings
from megatron.collection.training_clock import clock
from megatron.core import tensor_saver
from megatron.overlay import children, script_arguments
from megatron.overlay.command_line import Request

_STARTED = time.time()  #: time at which this process was set up
LOSS = "lm loss"  #: name of the loss in the dictionaries of Megatron-LM's trainer


def check(request: Request) -> None:
    """Raise ValueError if a flag of the collection is invalid, before the script starts."""
    options = request.collection
    folder, iterations = options["save_dir"], options["control_iter"]
    flags = _other_flags(options)
    every = flags["tensor_statistics"]
    StatisticsSettings.parse(tensor_statistics=every, directory=folder)
    if options["save_tensors"] or options["plan"]:
        read_settings({}, save_dir=folder, control_iter=iterations, flags=flags)


def _other_flags(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the collection that `read_settings` takes in its argument `flags`."""
    own = ("save_tensors", "save_dir", "control_iter", "plan")
    return {name: value for name, value in options.items() if name not in own}


def configure_later(request: Request) -> None:
    """Configure the collection when the first training iteration begins.

    Only then are the process groups, the arguments of the script and the number of iterations in
    its checkpoint known. The environment variables inform earlier checks about the collection.
    """
    if request.options.save_tensors is not None:
        os.environ["TENSOR_SAVE_ENABLED"] = "true"
    if request.collects or enabled_by_environment():  # the script may change its folder
        folder = collection_folder(request.collection["save_dir"])
        os.environ["TENSOR_SAVE_DIR"] = str(folder.absolute())
    if request.options.collect_plan:
        os.environ["TENSOR_SAVE_ENABLED"] = "true"
    after = _stop_after_plan if request.options.collect_plan else None
    tensor_saver.configure_later(lambda: _configuration(request), after_iteration=after)


def _configuration(request: Request) -> dict[str, Any]:
    """Return the keyword arguments of `tensor_saver.configure`."""
    args = script_arguments.current()
    done = int(args.get("iteration") or 0)
    if request.options.collect_plan:  # so that the next iteration is a selected one
        done = _planned(request, done)[0] - 1
    return {"args": args | request.for_run_card, "iteration": done, **request.collection}


def _planned(request: Request, done: int) -> list[int]:
    """Return the iterations that the run would collect after `done` iterations.

    Raises:
        ValueError: if there are none, or if the number of all iterations is unknown.
    """
    args, options = script_arguments.current(), request.collection
    settings = read_settings(
        args,
        save_dir=options["save_dir"],
        control_iter=options["control_iter"],
        flags=_other_flags(options),
        iteration=done,
    )
    last = args.get("train_iters")
    if not last and not settings.control_iter:
        raise ValueError(
            "--collect-plan: the number of iterations of this trainer is unknown; give "
            "--control-iter N"
        )
    iterations = planned_iterations(settings, done, int(last or sys.maxsize))
    if not iterations:
        raise ValueError(
            f"--collect-plan: {done} iterations are complete, and no later one is selected; select "
            "later ones with --collect-iterations"
        )
    return iterations


def _stop_after_plan() -> None:
    """Print the plan after the first iteration that is selected, and end the script.

    Must be called on all ranks.
    """
    planner = tensor_saver.current()
    assert isinstance(planner, Planner)
    if not any(from_all_ranks(bool(planner.counted))):
        return
    args = script_arguments.current()
    done = clock.iteration - 1
    last = int(args.get("train_iters") or sys.maxsize)
    iterations = planned_iterations(planner.settings, done, last)
    plan = make_plan(planner, iterations, int(args.get("global_batch_size") or 0), done)
    lines = ["collection plan, from one iteration; nothing was written", *report(plan)]
    _report([*lines, "stopping before the weights are updated (--collect-plan)"])
    tensor_saver.close()
    sys.exit(0)


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
    """End the collection after the script has ended normally, and print what was saved.

    Must be called on all ranks.

    Returns:
        An error message if tensors were requested and are missing, or if a format was requested
        and no model ran; None otherwise.
    """
    if not request.collects:
        return _nothing_ran()
    if not session.configured():
        if files := _files_of_other_processes(request):
            return _incomplete(files)
        return "tensors were requested, but the script ran no training iteration"
    if request.options.collect_plan:
        return None if tensor_saver.current() is None else "no planned iteration has run"
    limits = tensor_saver.settle()
    unreached = session_end.reason_for_nothing()
    lacking = session_end.lacking_iterations()
    saver = tensor_saver.current()
    if saver is not None:
        tensors = sum(rank["tensors"] for rank in saver.ranks)
        size = gib(sum(rank["bytes"] for rank in saver.ranks))
        lines = [f"saved {tensors} tensors, {size}, to {saver.settings.directory}"]
        lines += [f"the collection is not complete: {line}" for line in limits]
        _report(lines)
    if unreached is not None and saver is not None:
        saver.give_up(unreached)
    failure = tensor_saver.close()
    if unreached is not None:
        return unreached
    incomplete = failure or lacking
    return None if incomplete is None else f"the collection is not complete: {incomplete}"


def leave_exit_to_launcher() -> None:
    """Leave the check that a model ran to `finish`, so that the script's exit status is kept."""
    from megatron.core.low_precision import program_end

    program_end.leave_exit_to_launcher()


def requested(request: Request) -> str | None:
    """Return what the command line or the environment requests; None if they request nothing."""
    from megatron.core.low_precision import run_request

    return run_request.description() or ("tensor collection" if request.collects else None)


def end_without_atexit() -> None:
    """Do what this project's `atexit` functions do, in a process that ends without calling them."""
    from megatron.core.low_precision import program_end

    session_end.close_at_exit()
    program_end.check_end()


def _nothing_ran() -> str | None:
    """Return an error message if a format was requested and no model of megatron-core ran.

    A process that the script has started may have run a model in place of this one.
    """
    from megatron.core.low_precision import program_end, run_request

    requested = run_request.description()
    if requested is None or program_end.a_model_ran() or children.any_has_run_a_model():
        return None
    return f"{requested} was requested, but the script ran no model of megatron-core"


def _files_of_other_processes(request: Request) -> list[Path]:
    """Return the files that processes of the script wrote to the folder of the collection.

    Such a process trains in place of this one, and has its own collection.
    """
    folder = collection_folder(request.collection["save_dir"])
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if path.stat().st_mtime >= _STARTED]


def _incomplete(files: Sequence[Path]) -> str | None:
    """Return an error message if a process ended before its collection was complete.

    Args:
        files: files that processes of the script have written; the first rank writes run cards.
    """
    if os.environ.get("RANK", "0") != "0":
        return None
    cards = [path for path in files if path.name.startswith("run_") and path.suffix == ".json"]
    states = {path: json.loads(path.read_text())["status"] for path in cards}
    bad = [path for path, state in states.items() if state == "running"]
    if states and not {"finished", "limited"} & set(states.values()):
        bad = cards
    if not bad:
        return None
    return (
        f"a process of the script ended before its collection was complete, see {bad[0]}; let it "
        "end by itself (for a pool, call close and join), or call "
        "megatron.core.tensor_saver.close() in it"
    )


def _report(lines: Sequence[str]) -> None:
    """Print lines to standard error, on the first rank only."""
    if rank_coordinates()["world"] == 0:
        for line in lines:
            print(f"[megatron.overlay] {line}", file=sys.stderr, flush=True)
