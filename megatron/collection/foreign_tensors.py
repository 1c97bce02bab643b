"""Check the arguments with which a module of another code base saves a tensor."""

import re
from collections.abc import Mapping

import torch

from megatron.collection.module_identity import ModuleIdentity
from megatron.tensor_record import CODES, TENSOR_NAMES, operation_of

_LETTER = re.compile(r"[a-z](?:\[([a-z]+)(?::(?:[1-9]\d*|zigzag))?\])?")
_PARTIAL = re.compile(r"partial\[([a-z]+(?::[1-9]\d*)?(?:,[a-z]+(?::[1-9]\d*)?)*)\]")
DIMS = (
    "give one letter per dimension, with the parallel group that shards it in brackets, as in "
    "'s b h[tp]' or 's b h | partial[tp]'"
)


def check_arguments(
    tensor: torch.Tensor,
    tensor_name: str,
    *,
    layer_type: str,
    dims: str,
    identity: ModuleIdentity | None = None,
    operation: str | None = None,
    phase: str = "pre",
    format: str | None = None,
) -> None:
    """Raise an error if a tensor cannot be saved with these fields; see `Capture.save`.

    Raises:
        TypeError: if the tensor, the identity or the format has a wrong type.
        ValueError: if a name is unknown, or the tensor is not a dense floating-point tensor, or is
            on the meta device.
    """
    if layer_type not in TENSOR_NAMES:
        raise ValueError(f"layer_type={layer_type!r}: choose from {', '.join(TENSOR_NAMES)}")
    codes = {code for names in CODES.values() for code in names}
    names = [name for name in TENSOR_NAMES[layer_type] if name not in codes]
    if tensor_name not in names:
        raise ValueError(
            f"a tensor of layer type {layer_type} cannot have the name {tensor_name!r}; choose "
            f"from {', '.join(names)}"
        )
    if identity is not None and not isinstance(identity, ModuleIdentity):
        raise TypeError(f"identity={identity!r}: give a ModuleIdentity(name, layer number) or None")
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{tensor_name} is {type(tensor).__name__}; give a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.is_floating_point():
        raise ValueError(
            f"{tensor_name} is a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}; "
            "give a dense floating-point tensor that is not on the meta device"
        )
    if operation not in (None, own := operation_of(tensor_name)):
        raise ValueError(f"operation={operation!r}: {tensor_name} belongs to {own!r}")
    if phase not in ("pre", "post"):
        raise ValueError(f"phase={phase!r}: give 'pre' (enters the matmul) or 'post' (leaves it)")
    if not isinstance(format, str | None):
        raise TypeError(f"format={format!r}: give the name of a format, or None")
    _check_dims(dims, tensor.dim())


def _check_dims(dims: str, count: int) -> None:
    letters, bar, partial = str(dims).partition("|")
    words = letters.split()
    sums = partial.split()
    if (
        len(words) != count
        or not all(map(_LETTER.fullmatch, words))
        or (bar and not (sums and all(map(_PARTIAL.fullmatch, sums))))
    ):
        raise ValueError(f"dims={dims!r} does not describe {count} dimensions; {DIMS}")


def check_groups(dims: str, coordinates: Mapping[str, int]) -> None:
    """Raise ValueError if `dims` names a parallel group that does not exist."""
    groups = [key.removesuffix("_size") for key in coordinates if key.endswith("_size")]
    groups.remove("world")
    for word in dims.replace("|", " ").split():
        match = _LETTER.fullmatch(word) or _PARTIAL.fullmatch(word)
        for part in (match[1] or "").split(",") if match else ():
            group = part.partition(":")[0]
            if group and group not in groups:
                raise ValueError(
                    f"dims={dims!r}: there is no parallel group {group!r}; choose from "
                    f"{', '.join(groups)}"
                )
