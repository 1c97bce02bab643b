"""Functions that configure the tensor collection, print its plan and report its result."""

import argparse
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron.collection.flags import FLAGS, Reader
from megatron.collection.limits import gib
from megatron.collection.plan import Planner, make_plan, planned_iterations
from megatron.collection.plan_report import report
from megatron.collection.settings import Settings, read_settings
from megatron.collection.statistics.history import Place, StatisticsSettings
from megatron.collection.statistics.measure import Sums, joined, statistics
from megatron.collection.training_clock import clock
from megatron.core import tensor_saver
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
)
from megatron.fake_quant.gradient_rule import GRADIENTS, ratio_of_sqnr
from megatron.training.arguments.validation import RunConfig
from megatron.training.checkpointing.save_load import loaded_checkpoint
from megatron.training.data import datasets
from megatron.training.data.batch import forward_step
from megatron.training.errors import RunError, UserError
from megatron.training.logging import TrainingProgress
from megatron.training.printing import print_rank_0
from megatron.training.train_step import StepResult, TrainingState, run_schedule

#: names of the flags that are passed to `tensor_saver.configure` as keyword arguments
PASSED_ON = tuple(flag.name for flag in FLAGS if flag.reader is not Reader.SESSION)


def check_collection(args: argparse.Namespace) -> None:
    """Check that the tensor collection flags are valid and have an effect.

    This check runs before the model is built.

    Raises:
        UserError: if a flag is invalid, or is given although no tensors are collected.
    """
    measured = args.tensor_statistics is not None
    given = [
        flag.option
        for flag in FLAGS
        if flag.type is not bool
        and getattr(args, flag.name) != flag.default
        and flag.reader is not Reader.STATISTICS
        and not (measured and flag.name == "tensor_save_dir")
    ]
    try:
        StatisticsSettings.parse(
            tensor_statistics=args.tensor_statistics, train_iters=args.train_iters
        )
        asked = args.save_tensors or args.collect_plan or tensor_saver.enabled_by_environment()
        if given and not asked:
            raise ValueError(
                f"{given[0]} was given, but no tensors are collected; add --save-tensors, or "
                "--collect-plan to see what would be collected"
            )
        if asked:
            read_settings(
                dict(vars(args)) | {"train_iters": None},
                save_dir=args.tensor_save_dir,
                control_iter=args.control_iter,
                flags={name: getattr(args, name) for name in PASSED_ON},
            )
    except ValueError as error:
        raise UserError(str(error)) from error


def configure_collection(
    args: argparse.Namespace,
    chunks: Sequence[torch.nn.Module],
    progress: TrainingProgress,
    quantization: list[dict[str, Any]],
) -> None:
    """Configure the tensor collection from the flags. Must be called on all ranks.

    The process groups must already exist.

    Args:
        args: arguments of the run.
        chunks: pipeline stages of this rank.
        progress: counters of the run.
        quantization: format audit, which is stored in the run card.

    Raises:
        UserError: on every rank, if the settings are invalid.
    """
    try:
        tensor_saver.configure(
            dict(vars(args)),
            save_tensors=args.save_tensors,
            save_dir=args.tensor_save_dir,
            control_iter=args.control_iter,
            iteration=progress.iteration,
            levels=progress.levels,
            quantization=quantization,
            loaded=loaded_checkpoint(args),
            model=chunks,
            plan=args.collect_plan,
            **{name: getattr(args, name) for name in PASSED_ON},
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if (history := tensor_saver.statistics()) is not None:
        settings = history.settings
        times = "every iteration" if settings.every == 1 else f"every {settings.every} iterations"
        print_rank_0(f"> measuring all matmul operands, {times}, to {settings.folder}")
    if (saver := tensor_saver.current()) is None:
        return
    if not args.collect_plan:
        print_rank_0(f"> saving tensors to {saver.settings.directory} (run {saver.run_id})")


def print_plan(
    run: RunConfig,
    state: TrainingState,
    progress: TrainingProgress,
    dataset: torch.utils.data.Dataset,
) -> None:
    """Print a plan of the tensors that the run would collect. Must be called on all ranks.

    The plan is based on the forward and backward passes of the micro-batches of one iteration that
    would be collected, with the data that training would use next. No weights are updated and no
    files are written.

    Raises:
        UserError: if no iterations remain.
    """
    args, planner = run.args, tensor_saver.current()
    assert isinstance(planner, Planner)
    done = progress.iteration
    iterations = planned_iterations(planner.settings, done, args.train_iters)
    if not iterations:
        raise UserError(
            f"--collect-plan: {done} iterations are done and none remains; raise --train-iters"
        )
    clock.reset(iterations[0] - 1)
    batches = datasets.micro_batches(
        args,
        dataset,
        total=datasets.split_sizes(args, progress)["train"],
        consumed=progress.consumed_train_samples,
    )
    for chunk in state.model:
        chunk.train()
        chunk.zero_grad_buffer()
    step = partial(forward_step, args=args)
    number = _planned_micro_batches(args)
    run_schedule(step, batches, state.model, run, forward_only=False, micro_batches=number)
    plan = make_plan(planner, iterations, get_current_global_batch_size(), done)
    print_rank_0("> collection plan, from one iteration; nothing was written")
    for line in report(plan):
        print_rank_0(line)
    for line in _reservations(args):
        print_rank_0(f"  {line}")
    print_rank_0("> stopping before training (--collect-plan)")


def _planned_micro_batches(args: argparse.Namespace) -> int:
    """Return the number of micro-batches of an iteration after which no tensor is collected.

    It is a multiple of the number of pipeline stages, as the interleaved schedule requires.
    """
    available, stages = get_num_microbatches(), args.pipeline_model_parallel_size
    selected = args.collect_micro_batches or available
    return min(available, -(-selected // stages) * stages)


def _reservations(args: argparse.Namespace) -> Iterator[str]:
    if args.num_moe_experts:
        yield "experts get different tokens in each iteration: only the first has exact sizes"
    if args.rampup_batch_size is not None and args.collect_micro_batches != 1:
        yield "the batch grows (--rampup-batch-size): later iterations have more micro-batches"


def observe_step(step: StepResult) -> None:
    """Pass the loss and the gradient norm of an iteration to the tensor collector.

    Must be called on all ranks. If the collector then writes the contents of its ring buffer to
    disk, a message is printed. The gradient norm of a skipped iteration is omitted, because it
    reflects the loss scale.
    """
    grad_norm = None if step.skipped else step.grad_norm
    if message := tensor_saver.observe(step.losses["lm loss"], grad_norm):
        print_rank_0(f"> {message}")


def operand_scalars(iteration: int) -> dict[str, float]:
    """Return, on the last rank, the statistics of all operands by TensorBoard name.

    Must be called on all ranks. The shards of an operand on several ranks count as one operand. The
    result is empty on the other ranks, without `--tensor-statistics`, and if the iteration is not
    measured.
    """
    history = tensor_saver.statistics()
    if history is None or not history.due(iteration):
        return {}
    gathered: list[list[tuple[Place, Sums]]] = [history.latest]
    if (ranks := dist.get_world_size()) > 1:
        last = dist.get_rank() == ranks - 1
        gathered = [[]] * ranks
        dist.gather_object(history.latest, gathered if last else None, dst=ranks - 1)
    shards: dict[Place, list[Sums]] = {}
    for place, sums in itertools.chain.from_iterable(gathered):
        shards.setdefault(place, []).append(sums)
    values = {}
    for place, parts in shards.items():
        numbers = statistics(joined(parts), quantized=place.quantized)
        operand = f"{place.module}/{place.operation}_{place.gemm}_{place.tensor}"
        for name in ("amax", "rms", "sqnr_db", "underflow"):
            if (value := getattr(numbers, name)) is not None:
                values[f"{name}/{operand}"] = value
        if place.tensor == GRADIENTS[place.operation] and numbers.sqnr_db is not None:
            values[f"gradient_to_noise/{operand}"] = ratio_of_sqnr(numbers.sqnr_db)
    return values


def report_collection() -> None:
    """Print how many tensors were collected and which limits were reached, at the end of the run.

    Must be called on all ranks.
    """
    limits = tensor_saver.settle()
    if (saver := tensor_saver.current()) is None:
        return
    tensors = sum(rank["tensors"] for rank in saver.ranks)
    size = sum(rank["bytes"] for rank in saver.ranks)
    print_rank_0(f"> saved {tensors} tensors, {gib(size)}, to {saver.settings.directory}")
    if not tensors and (reason := _reason_for_nothing(saver.settings)):
        print_rank_0(f"> nothing was saved: {reason}")
    for line in limits:
        print_rank_0(f"> the collection is not complete: {line}")


def _reason_for_nothing(settings: Settings) -> str | None:
    """Return why no tensors were collected, or None if the settings do not explain it."""
    if settings.flag_file is not None:
        no_file = f"{settings.flag_file.path} did not exist when an iteration began"
        return no_file if settings.ring is None else f"{no_file}, or nothing unusual happened"
    return None if settings.ring is None else "nothing unusual happened (--collect-ring)"


def close_collection() -> None:
    """Wait until all collected tensors are written, and close the tensor collector.

    Raises:
        RunError: on every rank, if any rank failed to write its tensors; on the first rank alone,
            if only the run card could not be written.
    """
    failure = tensor_saver.close()
    if failure is not None:
        raise RunError(f"the collection is not complete: {failure}")
