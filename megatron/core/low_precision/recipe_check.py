"""Report an error if the requested rules, transforms, tiles or accumulators do not fit the model.

Otherwise the run would train in high precision or in a wrong format without the user's knowledge.
The check finds rules that match no module, rules that never apply because earlier rules take
precedence, formats for operations that the modules do not have, Hadamard transforms and tiles that
do not fit, and accumulators of units that do not multiply tensors of the model's dtype.

A transform of size d applies to whole groups of d values along the reduction axis of a GEMM. The
reduction axis of a weight gradient is the token axis. Its length depends on the data, so it is
padded with zeros (see `gemm.py`). The lengths of all other axes are set by the model, and a
transform whose size does not divide them is refused before training. Blocks of a format need no
check, because the last block may be shorter.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from megatron.collection.module_identity import natural_order
from megatron.core.low_precision.quantized_module import Quantized
from megatron.core.transformer import attention_tiles
from megatron.fake_quant import policy
from megatron.fake_quant.accumulate.element_types import check_accepted
from megatron.fake_quant.accumulate.format_checks import element_name
from megatron.fake_quant.matmul.gemm_formats import GEMM_SLOTS, SLOTS, GemmFormats
from megatron.fake_quant.recipe import Recipe, Rule
from megatron.fake_quant.tiles.checks import misfits

#: Names of the reduction axes of the GEMMs fprop and dgrad, keyed by operation.
AXES = {
    "linear": ("input features", "output features"),
    "qk": ("channels of a head", "keys"),
    "pv": ("keys", "channels of a head"),
}


class Matmul(NamedTuple):
    """A module of the model, on any rank, whose matmuls can be quantized."""

    name: str
    layer: int  #: layer number, counted from 0; -1 outside the transformer layers
    operations: tuple[str, ...]
    num_layers: int | None = None  #: number of layers of its stack; None if all stacks are alike


def check(
    chunks: Sequence[torch.nn.Module], seq_length: int | None, *, alone: bool = False
) -> None:
    """Check that the current policy fits the model.

    Must be called on all ranks, unless `alone` is true.
    Args:
        chunks: pipeline stages of this rank.
        seq_length: number of tokens in a sequence; None to leave it unchecked.
        alone: whether this rank has the whole model and does not wait for the other ranks.

    Raises:
        ValueError: if the recipe has a mistake; raised on all ranks with the same message.
    """
    in_force = policy.current()
    if in_force.recipe is None and in_force.accumulator is None:
        return
    places, num_layers, unfit = [], 0, None
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Quantized) and module.identity is not None:
                identity = module.identity
                num_layers = max(num_layers, module.num_layers)
                operations = module.operations
                places.append(
                    Matmul(identity.name, identity.layer_idx, operations, module.num_layers)
                )
                unfit = unfit or next(_misfits(module, seq_length), None)
    parts = [(places, num_layers, unfit)]
    if torch.distributed.is_initialized() and not alone:
        parts = [([], 0, None)] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, (places, num_layers, unfit))
    whole = sorted({place for part in parts for place in part[0]}, key=_by_name)
    if in_force.recipe is not None:
        layers = max(part[1] for part in parts)
        check_rules(in_force.recipe, in_force.by_recipe, whole, layers)
    if misfits := [part[2] for part in parts if part[2] is not None]:
        raise ValueError(misfits[0])


def _by_name(place: Matmul) -> list[tuple[int, str]]:
    return natural_order(place.name)


def check_rules(
    recipe: Recipe, by_recipe: Collection[str], places: Sequence[Matmul], num_layers: int
) -> None:
    """Raise ValueError if a rule never applies or configures no operation of its modules.

    Args:
        recipe: the recipe.
        by_recipe: operations whose formats the recipe may set, because no flag sets them.
        places: every module of the whole model whose matmuls can be quantized.
        num_layers: number of layers of the whole model.

    Raises:
        ValueError: if there is such a rule; the message names the first one.
    """
    counting = {p: recipe.rules_for(p.name, p.layer, p.num_layers or num_layers) for p in places}
    for rule in recipe.rules:
        fitting = [p for p in places if rule.fits(p.name, p.layer, p.num_layers or num_layers)]
        counted = [place for place in fitting if rule in counting[place]]
        if complaint := _complaint(rule, places, fitting, counted, by_recipe):
            raise ValueError(
                f"recipe {recipe.path}: line {rule.line}: matcher {rule.name!r} {complaint}"
            )


def _complaint(
    rule: Rule,
    places: Sequence[Matmul],
    fitting: Sequence[Matmul],
    counted: Sequence[Matmul],
    by_recipe: Collection[str],
) -> str | None:
    deepest = max((place.layer for place in places), default=-1)
    beyond = [low for low, _ in rule.layers.ranges if low > deepest] if rule.layers else []
    if not fitting:
        chosen = f" and layers {rule.layers.text!r}" if rule.layers else ""
        return (
            f"with the pattern {rule.pattern!r}{chosen} fits none of the {len(places)} modules "
            f"with a matmul; among them are {', '.join(place.name for place in places[:4])}"
        )
    if beyond:
        return f"is for layer {beyond[0]}, but the last layer of the model is {deepest}"
    if not counted:
        return (
            "is never reached: earlier matchers already apply to "
            f"{fitting[0].name} and all other modules that it fits; move or remove this matcher"
        )
    own = {operation for place in counted for operation in place.operations}
    left = sorted(own.intersection(by_recipe))
    if not left:
        return (
            f"applies only to {' and '.join(sorted(own))}, whose formats a flag already sets; "
            "remove the flag or the matcher"
        )
    spoken = [operation for operation, formats in rule.config.items() if formats is not None]
    if spoken and not set(spoken).intersection(left):
        return (
            f"has the config {rule.config_name!r}, which sets "
            f"{' and '.join(spoken)}, but applies to modules with {' and '.join(left)}, such as "
            f"{counted[0].name}; change the pattern or the config"
        )
    return None


def _misfits(module: Quantized, seq_length: int | None) -> Iterator[str]:
    """Yield a message for each setting that does not fit a module.

    These are tiles or unnormalized probabilities that an attention layer cannot use, tiles that
    cut the blocks of a format, Hadamard transforms whose size does not divide the reduction axis,
    and accumulators of units that do not multiply the model's dtype.

    Args:
        module: a named module of this rank, which holds a shard of the features.
        seq_length: number of tokens in a whole sequence, even with context parallelism; None if it
            is unknown.
    """
    assert module.identity is not None
    if "pv" in module.operations:
        yield from _cut_blocks(module)
    for operation in module.operations:
        sizes = dict(zip(("fprop", "dgrad"), _sizes(module, operation, seq_length), strict=True))
        axes = dict(zip(sizes, AXES[operation], strict=True))
        for formats, source in module.plan_of(operation).of_all_times():
            reason = None if formats.tiling is None else attention_tiles.refusal(module)
            if reason is not None:
                yield (
                    f"{source}: {module.identity.name}: attention in {formats.tiling}: {reason}, "
                    "or leave this module out"
                )
            if formats.unnormalized and formats.tiling is None and _is_normalized_only(module):
                yield f"{source}: {module.identity.name}: {attention_tiles.NORMALIZED_ONLY}"
            yield from _other_dtypes(module, operation, formats, source)
            for gemm, slot in (("fprop", "fprop_b"), ("dgrad", "dgrad_b")):
                transform = getattr(formats, slot).hadamard
                if transform is not None and (sizes[gemm] or 0) % transform.size:
                    yield (
                        f"{source}: {module.identity.name}: {gemm} of {operation} has a Hadamard "
                        f"transform of size {transform.size}, which does not divide its "
                        f"{sizes[gemm]} {axes[gemm]}{_shard_note(module, operation)}; choose a "
                        "size that does, or leave this module out"
                    )


def _is_normalized_only(attention: torch.nn.Module) -> bool:
    return attention.softmax_offset is not None or attention.attention_dropout.p > 0


def _cut_blocks(module: Quantized) -> Iterator[str]:
    """Yield a message for each operand of QK^T whose blocks would be cut by the tiles of a recipe.

    A recipe's own formats are checked when it is read. Here, a flag sets the format of QK^T.
    """
    assert module.identity is not None
    qk = module.plan_of("qk").fixed
    if qk is None:
        return
    operands = {slot: getattr(qk, slot) for slot in SLOTS}
    for formats, source in module.plan_of("pv").of_all_times():
        if formats.tiling is not None:
            for message in misfits("qk", operands, formats.tiling.tile):
                yield (
                    f"{source}: {module.identity.name}: attention in {formats.tiling}: the "
                    f"format of QK^T that a flag sets: {message}"
                )


def _other_dtypes(
    module: Quantized, operation: str, formats: GemmFormats, source: str
) -> Iterator[str]:
    """Yield a message for each GEMM whose accumulator does not accept the operands' types."""
    assert module.identity is not None
    for gemm, accumulator in formats.accumulators.items():
        operands = (formats.effective(slot).format for slot in GEMM_SLOTS[gemm])
        names = tuple(element_name(fmt, module.config.params_dtype) for fmt in operands)
        try:
            if accumulator.simulated:
                check_accepted(accumulator, names)
        except ValueError as error:
            yield f"{source}: {module.identity.name}: {gemm} of {operation}: {error}"


def _sizes(
    module: Quantized, operation: str, seq_length: int | None
) -> tuple[int | None, int | None]:
    """Return the lengths of the reduction axes of fprop and dgrad on this rank, where known."""
    if operation == "linear":
        inputs = getattr(module, "input_size_per_partition", module.input_size)
        return inputs, getattr(module, "output_size_per_partition", module.output_size)
    config = module.config
    channels = config.kv_channels
    if getattr(config, "multi_latent_attention", False):
        qk_channels = config.qk_head_dim + config.qk_pos_emb_head_dim
        channels = qk_channels if operation == "qk" else config.v_head_dim
    return (channels, seq_length) if operation == "qk" else (seq_length, channels)


def _shard_note(module: Quantized, operation: str) -> str:
    sharded = operation == "linear" and module.config.tensor_model_parallel_size > 1
    return " (of a tensor-parallel rank)" if sharded else ""
