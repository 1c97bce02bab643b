"""From the flags to the formats of the matmuls and the collection of their tensors.

What would bypass either is refused here, before anything is built; `megatron.core` holds the same
refusals again, for trainers that do not pass through here.
"""

import argparse

from megatron.core import tensor_saver
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
        )
        collecting = args.save_tensors or tensor_saver.enabled_by_environment()
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


def configure_collection(args: argparse.Namespace, iteration: int) -> None:
    """Fix what is collected; on all ranks, once the process groups exist.

    Raises:
        UserError: on all ranks alike.
    """
    try:
        tensor_saver.configure(
            dict(vars(args)),
            save_tensors=args.save_tensors,
            save_dir=args.tensor_save_dir,
            control_iter=args.control_iter,
            collect_micro_batches=args.collect_micro_batches,
            collect_layers=args.collect_layers,
            iteration=iteration,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
