"""Read and check the arguments of the script, if its trainer keeps them as Megatron-LM does."""

import argparse
import sys
from typing import Any, NamedTuple

from megatron import cpu_backend


class Requirement(NamedTuple):
    """A flag of Megatron-LM that a CPU needs, because the default needs a GPU."""

    flag: str
    name: str  #: name of the argument that the flag sets
    value: Any  #: value that works on a CPU
    only_with: tuple[str, Any] | None = None  #: argument and value that make the flag necessary


#: flags to give where the default needs Transformer Engine, Apex, or CUDA kernels
REQUIREMENTS = (
    Requirement("--transformer-impl local", "transformer_impl", "local"),
    Requirement("--no-persist-layer-norm", "no_persist_layer_norm", True),
    Requirement("--no-gradient-accumulation-fusion", "gradient_accumulation_fusion", False),
    Requirement("--no-masked-softmax-fusion", "masked_softmax_fusion", False),
    Requirement(
        "--no-rope-fusion", "apply_rope_fusion", False, ("position_embedding_type", "rope")
    ),
)


def _is_missing(requirement: Requirement, args: argparse.Namespace) -> bool:
    """Return whether the run needs a flag that is not given."""
    if requirement.only_with is not None:
        name, value = requirement.only_with
        if getattr(args, name, None) != value:
            return False
    return getattr(args, requirement.name, requirement.value) != requirement.value


def current() -> dict[str, Any]:
    """Return the arguments that Megatron-LM's trainer has parsed; empty for other trainers."""
    module = sys.modules.get("megatron.training.global_vars")
    args = getattr(module, "_GLOBAL_ARGS", None)
    return dict(vars(args)) if isinstance(args, argparse.Namespace) else {}


def check(args: argparse.Namespace) -> None:
    """Exit with a message if arguments of Megatron-LM have values that need a GPU.

    All flags to add are named at once.
    """
    if not cpu_backend.is_active():
        return
    missing = [needed.flag for needed in REQUIREMENTS if _is_missing(needed, args)]
    if missing:
        raise SystemExit(
            "[ERROR] there is no CUDA device, and these defaults of the script need one; add "
            + " ".join(missing)
        )
