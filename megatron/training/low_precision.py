"""From the flags to the formats of the matmuls; what they come to in the model that was built.

What would bypass them, or the collection of tensors, is refused here, before anything is built;
`megatron.core` refuses it again where it can see it, for trainers that do not pass through here.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from megatron.core import tensor_saver
from megatron.core.low_precision import matmul_audit, recipe_check
from megatron.fake_quant import policy
from megatron.training.errors import UserError

#: Flags (and the values at which they are harmless) whose code computes matmuls elsewhere.
_BYPASSES = {
    "transformer_impl": (("local",), "its layers are not ours; give --transformer-impl local"),
    "gradient_accumulation_fusion": (
        (False, None),
        "it computes weight gradients in a kernel of its own; give "
        "--no-gradient-accumulation-fusion",
    ),
    "moe_grouped_gemm": ((False, None), "it multiplies the experts in one kernel; remove it"),
    "overlap_moe_expert_parallel_comm": (
        (False, None),
        "its schedule does not run micro-batch by micro-batch; remove it",
    ),
    "cuda_graph_impl": (("none", None), "a replayed graph runs no Python; give none"),
    "enable_cuda_graph": ((False, None), "a replayed graph runs no Python; remove it"),
    "external_cuda_graph": ((False, None), "a replayed graph runs no Python; remove it"),
}


def configure_formats(args: argparse.Namespace) -> None:
    """Fix the formats of this process; before the model is built.

    Raises:
        UserError: an unknown format, or a flag that would bypass it or the collection.
    """
    try:
        chosen = policy.configure(
            custom_quant_type=args.custom_quant_type,
            linear=args.linear_quant,
            qk=args.qk_quant,
            pv=args.pv_quant,
            recipe=args.quant_recipe,
        )
        collecting = args.save_tensors or args.collect_plan or tensor_saver.enabled_by_environment()
    except ValueError as error:
        raise UserError(str(error)) from error
    asked = "tensor collection" if collecting else None
    if chosen.quant_type != policy.DEFAULT_TYPE:
        asked = f"the format {chosen.quant_type}"
    if asked is None:
        return
    for name, (harmless, why) in _BYPASSES.items():
        value = getattr(args, name, None)
        if value not in harmless:
            flag = f"--{name.replace('_', '-')}"
            given = flag if value is True else f"{flag} {value}"
            raise UserError(f"{asked} does not reach {given}: {why}")


def audit_model(
    args: argparse.Namespace, chunks: Sequence[torch.nn.Module], iteration: int
) -> tuple[list[str], list[dict[str, Any]]]:
    """What each matmul of the whole model goes through from the iteration to come on; on all ranks.

    Returns:
        Lines of text; and the same as plain values for the run card, an entry for each part of a
        recipe's schedule.

    Raises:
        UserError: something of the recipe would not come true.
    """
    try:
        recipe_check.check(chunks, args.seq_length)
    except ValueError as error:
        raise UserError(str(error)) from error
    recipe, first = policy.current().recipe, iteration + 1
    changes = [] if recipe is None else recipe.changes()
    starts = [first, *(each for each in changes if first < each <= args.train_iters)]
    lines, card = [], []
    for start in starts:
        found = matmul_audit.of_whole_model(chunks, args.seq_length, start)
        share, table = matmul_audit.share(found), matmul_audit.table(found)
        when = f"from iteration {start} on, " if len(starts) > 1 else ""
        lines.append(
            f"{when}matmuls in low precision: {100 * share:.4g}% of the FLOPs of all matmuls"
        )
        lines += [f"  {line}" for line in table]
        structured = matmul_audit.for_card(found)
        card.append(
            {
                "iteration": start,
                "share_of_matmul_flops": share,
                "matmuls": table,
                "operands": structured,
            }
        )
    return lines, card
