"""From the flags to the collection of tensors."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from megatron.core import tensor_saver
from megatron.training.collection_options import CollectionOptions
from megatron.training.errors import RunError, UserError
from megatron.training.report import print_rank_0

#: Those that `tensor_saver.configure` hands on to the selection and the limits.
FLAGS = {
    field.name: field.default
    for field in fields(CollectionOptions)
    if field.name.startswith("collect_") and field.name != "collect_plan"
}


def check_collection(args: argparse.Namespace) -> None:
    """Refuse, before anything is built, flags that are not understood or collect nothing.

    Raises:
        UserError: see above.
    """
    given = [name for name, default in FLAGS.items() if getattr(args, name) != default]
    try:
        asked = args.save_tensors or args.collect_plan or tensor_saver.enabled_by_environment()
        if given and not asked:
            flag = given[0].replace("_", "-")
            raise ValueError(
                f"--{flag} was given, but no tensors are collected; add --save-tensors, or "
                "--collect-plan to see what would be"
            )
        if asked:
            flags = {name: getattr(args, name) for name in FLAGS}
            directory, control_iter = args.tensor_save_dir, args.control_iter
            tensor_saver.read_settings(
                dict(vars(args)) | {"train_iters": None}, directory, control_iter, 0, flags
            )
    except ValueError as error:
        raise UserError(str(error)) from error


def configure_collection(
    args: argparse.Namespace,
    chunks: Sequence[torch.nn.Module],
    iteration: int,
    quantization: list[dict[str, Any]],
) -> None:
    """Fix what is collected; on all ranks, once the process groups exist.

    Args:
        args: the run's arguments.
        chunks: this rank's pipeline stages.
        iteration: the last one done.
        quantization: the audit, for the run card.

    Raises:
        UserError: on all ranks alike.
    """
    try:
        tensor_saver.configure(
            dict(vars(args)),
            save_tensors=args.save_tensors,
            save_dir=args.tensor_save_dir,
            control_iter=args.control_iter,
            iteration=iteration,
            quantization=quantization,
            plan=args.collect_plan,
            **{name: getattr(args, name) for name in FLAGS},
        )
        tensor_saver.check_reached(chunks)
    except ValueError as error:
        raise UserError(str(error)) from error


def report_limits() -> None:
    """Say at the end of training which ranks did not collect everything; on all ranks."""
    for line in tensor_saver.settle():
        print_rank_0(f"> the collection is not complete: {line}")


def close_collection() -> None:
    """End the collection.

    Raises:
        RunError: this rank could not write.
    """
    failure = tensor_saver.close()
    if failure is not None:
        raise RunError(failure)
