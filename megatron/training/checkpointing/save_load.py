"""Functions that save and load checkpoints in megatron-core's distributed format.

The folders are named as in Megatron-LM:

    DIR/latest_checkpointed_iteration.txt      the iteration to resume from, written last
    DIR/iter_0000010/                          a checkpoint; iter_0000010.partial until complete

Tensors are stored by their global name and position, so that a checkpoint can be loaded with
different tensor-, pipeline- and data-parallel sizes. Random states belong to a rank, and are loaded
only if the parallel layout is the same. In this case, the losses of a resumed run are bitwise
identical to those of an uninterrupted run.
"""

import argparse
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import CheckpointException

from megatron.bounded_files import printable
from megatron.collection.loss_spikes import LOSS, checked_levels
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.utils import unwrap_model
from megatron.training.arguments.validation import RunConfig
from megatron.training.checkpointing import amax_histories, optimizer_state, random_state
from megatron.training.checkpointing.common_state import check_common, check_groups, read_common
from megatron.training.checkpointing.compatibility import (
    check_model,
    check_optimizer,
    check_run,
    random_states_fit,
    run_description,
)
from megatron.training.checkpointing.files import (
    COMMON,
    begin,
    checkpoint_folder,
    folder_to_load,
    put_in_place,
    resumes,
    undo_replacement,
    write_tracker,
)
from megatron.training.checkpointing.index import read_index
from megatron.training.checkpointing.safe_reading import load
from megatron.training.collective_errors import all_succeed, first_rank_does
from megatron.training.errors import Interrupted, RunError, UserError
from megatron.training.hf.flags import converts
from megatron.training.hf.loading import load_weights
from megatron.training.logging import TrainingProgress
from megatron.training.printing import print_rank_0
from megatron.training.train_step import TrainingState

VERSION = 3.0  #: version number of this checkpoint layout in Megatron-LM
#: strings that occur in the error messages of `torch.save` if the disk is full
_TORCH_WRITER = ("inline_container", "PytorchStreamWriter", "iostream error")
_LONGEST = 500  #: maximum number of characters to show of an error message from a library


def save_checkpoint(run: RunConfig, trained: TrainingState, progress: TrainingProgress) -> None:
    """Write a checkpoint, and record it as the latest one once it is complete.

    Must be called on all ranks.

    Raises:
        RunError: if the checkpoint cannot be written; earlier checkpoints are not affected.
    """
    args = run.args
    final = checkpoint_folder(args.save, progress.iteration)
    partial = final.with_name(final.name + ".partial")
    print_rank_0(f"saving checkpoint at iteration {progress.iteration:7d} to {args.save}")

    def make_room() -> None:
        with _write_errors(final):
            begin(final)

    def finish() -> None:
        with _write_errors(final):
            put_in_place(partial, final)
            write_tracker(Path(args.save), progress.iteration)

    first_rank_does(make_room)
    with _write_errors(final):
        state = _common(args, progress, has_optim=args.save_optim, has_rng=args.save_rng)
    state |= _model_state(trained)
    if histories := amax_histories.sharded(trained.model):
        state["amax_histories"] = histories
    if args.save_optim:
        optimizer_state.complete(trained.optimizer)
        state["optimizer"] = trained.optimizer.sharded_state_dict(
            _model_state(trained), metadata=_metadata()
        )
        state["opt_param_scheduler"] = trained.scheduler.state_dict()
    if args.save_rng:
        state["rng_state"] = random_state.sharded(random_state.current())
    _pass_results_within_this_process()
    with _write_errors(final):
        _write(state, partial, args.ckpt_format)
    first_rank_does(finish)
    print_rank_0(f"successfully saved checkpoint at iteration {progress.iteration:7d}")


def _write(state: dict[str, Any], folder: Path, ckpt_format: str) -> None:
    """Write a checkpoint in the layout of megatron-core 0.16, whichever release is installed.

    Later releases can read this layout. Since 0.19, their own `save` writes no `common.pt`.
    """
    strategy = FullyParallelSaveStrategyWrapper(
        serialization.get_default_save_sharded_strategy(ckpt_format),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
    )
    sharded, common = serialization.save_preprocess(state)
    first = torch.distributed.get_rank() == 0
    if first:
        torch.save(common, folder / COMMON)
    strategy.save(sharded, folder)
    if first:
        config = serialization.CheckpointingConfig(strategy.backend, strategy.version)
        serialization.save_config(config, str(folder))
    torch.distributed.barrier()


def _pass_results_within_this_process() -> None:
    """Give the next synchronous save a results queue that lives in this process.

    megatron-core's own queue also serves asynchronous saves. It lives in another process, which
    imports torch at the first save: that takes 2 s of CPU time per rank, and memory until the end.
    """
    filesystem_async._results_queue = queue.Queue()


@contextmanager
def _write_errors(final: Path) -> Iterator[None]:
    """Raise a `RunError` if writing a checkpoint fails in the `with` block.

    Raises:
        RunError: if the `with` block raises an error of the file system, of `torch.save` or of the
            checkpoint library.
    """
    try:
        yield
    except (OSError, RuntimeError, CheckpointingException, CheckpointException) as error:
        if isinstance(error, RuntimeError) and not any(w in str(error) for w in _TORCH_WRITER):
            raise
        raise RunError(
            f"the checkpoint {final} could not be written: {_reason(error)}; make room or choose "
            "another --save, then resume with --load"
        ) from error


def _loaded(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load this rank's part of a checkpoint, and raise the error of one rank on all ranks.

    Since megatron-core 0.18, each rank reads independently, so that the others would continue
    without a rank that failed.
    """
    problem = None
    try:
        with _read_errors(folder):
            state = load(state, folder)
    except UserError as error:
        problem = str(error)
    all_succeed(problem)
    return state


@contextmanager
def _read_errors(folder: Path) -> Iterator[None]:
    """Raise a `UserError` if reading a checkpoint fails in the `with` block.

    A damaged file can raise almost any exception in the libraries that read it.

    Raises:
        UserError: if the `with` block raises an error other than an interruption or a lack of GPU
            memory.
    """
    try:
        yield
    except (UserError, torch.OutOfMemoryError):
        raise
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        _pass_interruption(error)
        raise UserError(
            f"the checkpoint {folder} cannot be read: {_reason(error)}; give --ckpt-step with an "
            "earlier one, or name another --load"
        ) from error


def _pass_interruption(error: BaseException) -> None:
    """Raise `Interrupted` again if torch reports it as the reason why a rank failed."""
    failures = error.failures.values() if isinstance(error, CheckpointException) else ()
    for failure, _ in failures:
        if isinstance(failure, Interrupted):
            raise failure from error


def _read_index(folder: Path) -> None:
    """Check a checkpoint's index before torch reads it.

    If the index is damaged, torch prints one traceback per rank.

    Raises:
        UserError: if the index or a file that it names cannot be used.
    """
    with _read_errors(folder):
        read_index(folder)


def _reason(error: BaseException) -> str:
    """Return the message of an error as one line.

    If torch collected the errors of several ranks, return the message of the first one.
    """
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = " ".join(str(error).split())
    if not isinstance(error, (OSError, ValueError, CheckpointingException)):
        text = f"{type(error).__name__}: {text}"
    return printable(text, limit=_LONGEST)


def load_checkpoint(run: RunConfig, trained: TrainingState) -> TrainingProgress:
    """Load the checkpoint in `--load` or the weights in `--load-hf`, if given.

    Must be called on all ranks.

    Returns:
        The progress of the run, which is zero unless the run resumes from a checkpoint.

    Raises:
        UserError: if there is no checkpoint in `--load`, or if it is damaged or does not fit the
            run.
    """
    args = run.args
    undo_replacement(args)
    folder = folder_to_load(args)
    if folder is None:
        if args.load_hf is not None:
            load_weights(trained.model, run.hf, args.load_hf)
            if trained.optimizer is not None:
                trained.optimizer.reload_model_params()
        return TrainingProgress()
    if args.load_hf is not None:
        print_rank_0(f"> resuming from --load {args.load}: the weights of --load-hf are not read")
    print_rank_0(f" loading checkpoint from {folder}")
    first_rank_does(lambda: _read_index(folder))
    with _read_errors(folder):
        common = _read_common(folder)
    check_model(args, common, folder)
    if not args.finetune and not converts(args):
        check_run(args, common, folder)
    state: dict[str, Any] = _model_state(trained)
    with _read_errors(folder):
        if histories := amax_histories.sharded_to_load(trained.model, folder):
            state["amax_histories"] = histories
    with_optim = args.load_optim and not args.finetune
    with_rng = random_states_fit(args, common)
    if with_optim:
        check_optimizer(args, common, folder)
        optimizer_state.allocate(trained.optimizer)
        state["optimizer"] = trained.optimizer.sharded_state_dict(
            _model_state(trained), is_loading=True, metadata=_metadata()
        )
    if with_rng:
        state["rng_state"] = random_state.sharded(None)
    state = _loaded(state, folder)
    with _read_errors(folder):
        for key, chunk in _chunks(trained).items():
            chunk.load_state_dict(state[key])
        amax_histories.restore(trained.model, state.get("amax_histories", {}))
    if with_optim:
        numbers = optimizer_state.numbers(trained.optimizer)
        with _read_errors(folder):
            optimizer_state.match_groups(trained.optimizer, state["optimizer"])
            optimizer_state.add_step(trained.optimizer, state["optimizer"])
            trained.optimizer.load_state_dict(state["optimizer"])
            optimizer_state.separate_steps(trained.optimizer)
            with _named(folder / COMMON):
                check_groups(trained.optimizer.param_groups)
        if args.override_opt_param_scheduler:
            optimizer_state.set_numbers(trained.optimizer, numbers)
        with _read_errors(folder):
            _load_scheduler(trained, state["opt_param_scheduler"])
    elif trained.optimizer is not None:
        trained.optimizer.reload_model_params()
    if with_rng:
        with _read_errors(folder):
            random_state.restore(state["rng_state"])
    if args.finetune:
        print_rank_0("  weights loaded; starting at iteration 0 (--finetune)")
        return TrainingProgress()
    progress = TrainingProgress(**common["progress"])
    with _read_errors(folder):
        progress.levels = checked_levels(progress.levels)
    if trained.scheduler is not None and not with_optim:
        trained.scheduler.step(progress.consumed_train_samples)
        print_rank_0("  the optimizer starts anew; the learning rate depends on the samples so far")
    print_rank_0(f"  successfully loaded checkpoint at iteration {progress.iteration}")
    return progress


def loaded_checkpoint(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return a description, for the run card, of the checkpoint that the run starts from, or None.

    The entries are the folder, the iteration, whether only the weights are loaded, and the mean of
    the last normal losses in the checkpoint (at most 32; None if it stores none).
    """
    if not resumes(args):
        return None
    folder = folder_to_load(args)
    assert folder is not None, "`resumes` has found a checkpoint"
    progress = _read_common(folder)["progress"]
    losses = checked_levels(progress["levels"]).get(LOSS)
    return {
        "checkpoint": str(folder),
        "iteration": progress["iteration"],
        "weights_only": bool(args.finetune),
        "lm_loss": sum(losses) / len(losses) if losses else None,
    }


def _read_common(folder: Path) -> dict[str, Any]:
    """Return the content of `common.pt`, which all ranks share, after checking its types."""
    common = read_common(folder)
    with _named(folder / COMMON):
        return check_common(common)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Prepend the path of a file to the message of a `ValueError` raised in the `with` block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _common(args: argparse.Namespace, progress: TrainingProgress, **has: bool) -> dict[str, Any]:
    """Return the state that a checkpoint stores once for all ranks.

    Args:
        args: arguments of the run.
        progress: progress of the run.
        has: `has_optim` and `has_rng`, which state whether the checkpoint contains the states of
            the optimizer and of the random number generators.
    """
    return {
        "checkpoint_version": VERSION,
        "iteration": progress.iteration,
        "progress": asdict(progress),
        **run_description(args),
        **has,
    }


def _load_scheduler(trained: TrainingState, state: dict[str, Any]) -> None:
    try:
        trained.scheduler.load_state_dict(state)
    except AssertionError as error:
        raise UserError(
            f"the checkpoint has a different schedule: {' '.join(str(error).split())}; give "
            "--override-opt_param-scheduler to take that of the command line or "
            "--use-checkpoint-opt_param-scheduler to take that of the checkpoint"
        ) from error
    # `load_state_dict` applies the schedule before it reads the weight decay, so the schedule must
    # be applied again.
    trained.scheduler.step(0)


def _chunks(trained: TrainingState) -> dict[str, torch.nn.Module]:
    chunks = unwrap_model(trained.model)
    if len(chunks) == 1:
        return {"model": chunks[0]}
    return {f"model{index}": chunk for index, chunk in enumerate(chunks)}


def _model_state(trained: TrainingState) -> dict[str, Any]:
    metadata = _metadata()
    return {k: c.sharded_state_dict(metadata=metadata) for k, c in _chunks(trained).items()}


def _metadata() -> dict[str, Any]:
    """Return the settings that select megatron-core's checkpoint layout.

    All state is stored by global position, so that it can be loaded with other parallel sizes.
    """
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
