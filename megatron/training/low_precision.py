"""Functions that set the matmul formats from the flags and audit the formats of the model.

Flags that bypass the formats or the tensor collection cause an error before the model is built. For
the sake of other trainers, `megatron.core` also raises an error where it can detect such a flag.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core import tensor_saver
from megatron.core.low_precision import matmul_audit, recipe_check
from megatron.core.low_precision.coverage_check import BYPASSES
from megatron.fake_quant import policy
from megatron.training.errors import UserError


def configure_formats(args: argparse.Namespace) -> None:
    """Set the number formats of this process. Must be called before the model is built.

    Raises:
        UserError: if a format is invalid, or if a flag bypasses the formats or the tensor
            collection.
    """
    try:
        formats = policy.configure(
            custom_quant_type=args.custom_quant_type,
            linear=args.linear_quant,
            qk=args.qk_quant,
            pv=args.pv_quant,
            recipe=args.quant_recipe,
            accumulate=args.quant_accumulate,
        )
        if formats.recipe is not None and not args.quant_audit:
            formats.recipe.check_in_run(args.train_iters)
        collecting = args.save_tensors or args.collect_plan or tensor_saver.enabled_by_environment()
    except ValueError as error:
        raise UserError(str(error)) from error
    bypassed = "tensor collection" if collecting else None
    if args.tensor_statistics is not None:
        bypassed = "--tensor-statistics"
    if formats.changes_matmuls:
        bypassed = f"the {formats.request}"
    if bypassed is None:
        return
    for name, bypass in BYPASSES.items():
        value = getattr(args, name, None)
        reached = bypass.collected and not formats.changes_matmuls
        if value not in bypass.harmless and not reached:
            flag = f"--{name.replace('_', '-')}"
            given = flag if value is True else f"{flag} {value}"
            raise UserError(f"{bypassed} does not reach {given}: {bypass.advice}")


def audit_model(
    args: argparse.Namespace, chunks: Sequence[torch.nn.Module], iteration: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the format audit: the formats of every matmul from the next iteration on.

    Must be called on all ranks.

    Returns:
        The audit as lines of text and, for the run card, as a list of dictionaries. The list has
        one entry for each period in which the recipe's formats stay the same.

    Raises:
        UserError: if a part of the recipe has no effect.
    """
    try:
        recipe_check.check(chunks, args.seq_length)
    except ValueError as error:
        raise UserError(str(error)) from error
    recipe, first = policy.current().recipe, iteration + 1
    changes = [] if recipe is None else recipe.changes()
    starts = [first, *(change for change in changes if first < change <= args.train_iters)]
    lines, card = [], []
    for start in starts:
        matmuls = matmul_audit.of_whole_model(chunks, args.seq_length, start)
        part = matmul_audit.period_for_card(matmuls, start)
        when = f"from iteration {start} on, " if len(starts) > 1 else ""
        lines.append(
            f"{when}matmuls in low precision: {100 * part['share_of_matmul_flops']:.4g}% of the "
            "FLOPs of all matmuls"
        )
        lines += [f"  {line}" for line in part["matmuls"]]
        card.append(part)
    return lines, card
