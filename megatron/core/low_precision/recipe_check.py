"""Refuses a recipe of which something would not come true in this model.

The run would train in high precision, or in another format, where the user believes that it does
not: a rule that reaches no module, one behind others that decide already, formats for operations
that the modules do not have, a Hadamard transform that does not divide what it runs along.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from megatron.collection.module_identity import natural_order
from megatron.core.low_precision import transform_sizes
from megatron.core.low_precision.quantized_module import Quantized
from megatron.fake_quant import policy
from megatron.fake_quant.recipe import Recipe, Rule


class Matmul(NamedTuple):
    """A module with matmuls of ours, in the whole model."""

    name: str
    layer: int  #: number from 0; -1 outside of the layers
    operations: tuple[str, ...]


def check(chunks: Sequence[torch.nn.Module], seq_length: int) -> None:
    """Check the recipe in force, if there is one; to be called on all ranks.

    Raises:
        ValueError: on all ranks alike; names the first mistake.
    """
    in_force = policy.current()
    if in_force.recipe is None:
        return
    places, num_layers, unfit = [], 0, None
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Quantized) and module.identity is not None:
                identity = module.identity
                places.append(Matmul(identity.name, identity.layer_idx, module.operations))
                num_layers = module.config.num_layers
                unfit = unfit or next(transform_sizes.mistakes(module, seq_length), None)
    parts = [(places, num_layers, unfit)]
    if torch.distributed.is_initialized():
        parts = [([], 0, None)] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, (places, num_layers, unfit))
    whole = sorted({place for part in parts for place in part[0]}, key=_by_name)
    check_rules(in_force.recipe, in_force.by_recipe, whole, max(part[1] for part in parts))
    if found := [part[2] for part in parts if part[2] is not None]:
        raise ValueError(found[0])


def _by_name(place: Matmul) -> list[tuple[int, str]]:
    return natural_order(place.name)


def check_rules(
    recipe: Recipe, by_recipe: Collection[str], places: Sequence[Matmul], num_layers: int
) -> None:
    """Refuse a rule that is never in force, or for nothing that it speaks of.

    Args:
        recipe: what was read.
        by_recipe: the operations that no flag decides.
        places: every module of the whole model with matmuls of ours.
        num_layers: of the whole model.

    Raises:
        ValueError: names the first such rule.
    """
    counting = {p: recipe.rules_for(p.name, p.layer, num_layers) for p in places}
    for rule in recipe.rules:
        fitting = [place for place in places if rule.fits(place.name, place.layer, num_layers)]
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
        return f"is for layer {beyond[0]} too, and the last layer of the model is {deepest}"
    if not counted:
        return (
            "is never reached: the matchers before it already decide for "
            f"{fitting[0].name} and whatever else it fits; move it up or remove it"
        )
    own = {operation for place in counted for operation in place.operations}
    left = sorted(own.intersection(by_recipe))
    if not left:
        return (
            f"decides for {' and '.join(sorted(own))} only, of which a flag has decided already; "
            "remove the flag or the matcher"
        )
    spoken = [operation for operation, formats in rule.config.items() if formats is not None]
    if spoken and not set(spoken).intersection(left):
        return (
            f"has the config {rule.config_name!r}, which says something of "
            f"{' and '.join(spoken)}, but is for modules with {' and '.join(left)}, as "
            f"{counted[0].name}; change the pattern or the config"
        )
    return None
