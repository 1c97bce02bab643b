"""Assign every module its name and layer number in the whole model, across pipeline stages.

The name of a module is local to its pipeline stage (`decoder.layers.0` exists on every stage), and
a linear layer does not know the number of the transformer layer that contains it. Only `GPTModel`
sees all modules with their names, so it assigns the names and numbers once. Experts are renumbered
too, because each rank of an expert-parallel group counts its own experts from 0.
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
    """Name and layer number of a module in the whole model."""

    #: Dotted name with the global numbers of the layer and the expert, such as
    #: decoder.layers.5.mlp.experts.local_experts.63.linear_fc1.
    name: str
    layer_idx: int  #: global layer number, counted from 0; -1 outside the transformer layers

    @property
    def is_lm_head(self) -> bool:
        """True for the LM head (the projection onto the vocabulary), which is not quantized."""
        return self.name.rpartition(".")[2] == LM_HEAD


class Identified:
    """Base class of the modules to which `assign_identities` assigns an identity."""

    identity: ModuleIdentity | None = None  #: name and layer number; None outside a model
    group_copies: int  #: number of ranks that hold each query group; attention only


def transformer_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the rank-local name and the module of each transformer layer of this rank.

    Multi-token-prediction layers are included.
    """
    for name, module in model.named_modules():
        if re.search(r"(^|\.)layers\.\d+$", name) and hasattr(module, "layer_number"):
            yield name, module


def assign_identities(model: torch.nn.Module) -> None:
    """Assign every `Identified` module of `model` its name and layer number in the whole model.

    The layer number is computed from `layer_number` of the enclosing transformer layer, which
    megatron-core counts globally from 1. Multi-token-prediction layers, which are also counted from
    1, keep their own names and are numbered after the decoder's layers.
    """
    for name, module in model.named_modules():
        if isinstance(module, Identified):
            module.identity = ModuleIdentity(name, -1)
        if isinstance(attention := getattr(module, "core_attention", None), Identified):
            # If there are more tensor-parallel ranks than query groups, the configuration of core
            # attention has as many groups as ranks. Only the enclosing module knows the true
            # number.
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
    """Yield (name, parameter) for each parameter of this rank, with names in the whole model.

    A shared parameter is yielded once.
    """
    layers = {f"{name}.": layer for name, layer in transformer_layers(model)}
    for name, parameter in model.named_parameters():
        prefix = next((prefix for prefix in layers if name.startswith(prefix)), None)
        if prefix is not None:
            layer = layers[prefix]
            whole = re.sub(r"\d+\.$", f"{layer.layer_number - 1}.", prefix)
            name = _with_global_expert(whole + name.removeprefix(prefix), _first_expert(layer))
        yield name, parameter


def _first_expert(layer: torch.nn.Module) -> int:
    """Return the global index of this rank's first expert; 0 for a layer without experts."""
    of_experts = (getattr(module, "local_expert_indices", None) for module in layer.modules())
    return next((indices[0] for indices in of_experts if indices), 0)


def _with_global_expert(name: str, first: int) -> str:
    return re.sub(r"(?<=\blocal_experts\.)\d+", lambda local: str(first + int(local[0])), name)


def unwrapped(name: str) -> str:
    """Return `name` without the `module.` prefixes that wrappers such as DDP add."""
    return re.sub(r"^(module\.)+", "", name)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts module names numerically, so that layers.10 follows layers.9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
