"""Give every layer its name and number in the whole model, across pipeline stages.

A module's own name is local to its pipeline stage (`decoder.layers.0` exists on every stage), and a
linear layer does not know the number of its layer. `GPTModel` is the only place that sees every
module with its name, and assigns both once. Experts need the same: each rank of an expert-parallel
group counts its own experts from 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LM_HEAD = "output_layer"


@dataclass(frozen=True, slots=True)
class ModuleIdentity:
    """The name and the layer number of a module in the whole model."""

    #: dotted name with the global numbers of layer and expert, as in
    #: decoder.layers.5.mlp.experts.local_experts.63.linear_fc1
    name: str
    layer_idx: int  #: global number from 0; -1 outside a transformer layer

    @property
    def is_lm_head(self) -> bool:
        """Return whether this is the projection onto the vocabulary, which is not quantized."""
        return self.name.rpartition(".")[2] == LM_HEAD


class Identified:
    """A module that `assign_identities` names; outside a model it has no identity."""

    identity: ModuleIdentity | None = None
    group_copies: int  #: ranks that hold a copy of each query group; for attention only


def transformer_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the transformer and multi-token-prediction layers of this rank with local names."""
    for name, module in model.named_modules():
        if re.search(r"(^|\.)layers\.\d+$", name) and hasattr(module, "layer_number"):
            yield name, module


def assign_identities(model: torch.nn.Module) -> None:
    """Give every `Identified` module of `model` its global name and layer number.

    The number is that of the enclosing transformer layer, whose `layer_number` megatron-core counts
    globally from 1. Multi-token-prediction layers count from 1 too; they keep their own name and
    follow the decoder's layers.
    """
    for name, module in model.named_modules():
        if isinstance(module, Identified):
            module.identity = ModuleIdentity(name, -1)
        if isinstance(attention := getattr(module, "core_attention", None), Identified):
            # With more ranks than groups, core attention gets a configuration with as many groups
            # as there are ranks. Only the layer around it knows the true number.
            groups = attention.config.num_query_groups, module.config.num_query_groups
            attention.group_copies = groups[0] // groups[1]
    for local_name, layer in transformer_layers(model):
        index = layer.layer_number - 1
        global_name = re.sub(r"\d+$", str(index), local_name)
        if local_name.startswith("mtp."):
            index += model.config.num_layers
        first = _first_expert(layer)
        for name, module in layer.named_modules(prefix=global_name):
            if isinstance(module, Identified):
                module.identity = ModuleIdentity(_with_global_expert(name, first), index)


def global_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield this rank's parameters with their names in the whole model; shared ones come once."""
    layers = {f"{name}.": layer for name, layer in transformer_layers(model)}
    for name, parameter in model.named_parameters():
        prefix = next((prefix for prefix in layers if name.startswith(prefix)), None)
        if prefix is not None:
            layer = layers[prefix]
            whole = re.sub(r"\d+\.$", f"{layer.layer_number - 1}.", prefix)
            name = _with_global_expert(whole + name.removeprefix(prefix), _first_expert(layer))
        yield name, parameter


def _first_expert(layer: torch.nn.Module) -> int:
    """Return the global number of this rank's first expert; 0 in a layer without experts."""
    of_experts = (getattr(module, "local_expert_indices", None) for module in layer.modules())
    return next((indices[0] for indices in of_experts if indices), 0)


def _with_global_expert(name: str, first: int) -> str:
    return re.sub(r"(?<=\blocal_experts\.)\d+", lambda local: str(first + int(local[0])), name)


def unwrapped(name: str) -> str:
    """Return a module's name without the prefixes `module.` that wrappers such as DDP add."""
    return re.sub(r"^(module\.)+", "", name)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key for module names that puts layers.10 after layers.9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
