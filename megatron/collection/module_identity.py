"""Assign modules their names and layer numbers in the whole model, across pipeline stages.

The name of a module is local to its pipeline stage (`decoder.layers.0` exists on every stage), and
a linear layer has no access to the number of the transformer layer that contains it. Only the
outermost module of a model has access to all modules and their names, so the names and numbers are
assigned from there. Experts are renumbered too, because each rank of an expert-parallel group
counts its own experts from 0.

Each stack of layers has its own layer numbers: T5 has a layer 0 in `encoder.layers` and another in
`decoder.layers`, which differ in their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Last parts of the names of LM heads (projections onto the vocabulary).
LM_HEADS = ("output_layer", "lm_head")
#: Parts that wrappers add to names, at the front (DDP adds `module.`) or within a name.
_FRONT = re.compile(r"^((module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.)+")
_WITHIN = re.compile(r"\b(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


@dataclass(frozen=True, slots=True)
class ModuleIdentity:
    """Name and layer number of a module in the whole model."""

    #: Dotted name with the global numbers of the layer and the expert, such as
    #: decoder.layers.5.mlp.experts.local_experts.63.linear_fc1.
    name: str
    layer_idx: int  #: global layer number, counted from 0; -1 outside the layers

    @property
    def is_lm_head(self) -> bool:
        """True for the LM head, the projection onto the vocabulary. Only a recipe quantizes it."""
        return self.name.rpartition(".")[2] in LM_HEADS


class Identified:
    """Base class of the modules to which `assign_identities` assigns an identity."""

    config: Any
    identity: ModuleIdentity | None = None  #: name and layer number; None outside a model
    layers_in_stack: int | None = None  #: number of layers in the module's stack; None if unnamed
    group_copies: int  #: number of ranks that hold each query group; attention only

    @property
    def num_layers(self) -> int:
        """Number of layers of the module's stack; 0 if it is unknown."""
        if self.layers_in_stack is not None:
            return self.layers_in_stack
        return getattr(self.config, "num_layers", None) or 0

    def identify(self, identity: ModuleIdentity, layers_in_stack: int) -> None:
        """Set the name, the layer number and the number of layers of the stack."""
        self.identity, self.layers_in_stack = identity, layers_in_stack


def transformer_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the rank-local name and the module of each numbered layer of this rank.

    These are the elements of a list that megatron-core has numbered: transformer and Mamba layers.
    Multi-token-prediction layers are included.
    """
    last = None
    for name, module in model.named_modules():
        if last is not None and name.startswith(last):
            continue
        number = getattr(module, "layer_number", None)
        if isinstance(number, int) and re.search(r"(^|\.)\d+$", name):
            last = f"{name}."
            yield name, module


def assign_identities(model: torch.nn.Module, prefix: str = "") -> None:
    """Assign every `Identified` module of `model` its name and layer number in the whole model.

    The layer number is computed from `layer_number` of the enclosing transformer layer, which
    megatron-core counts globally from 1. Multi-token-prediction layers, which are also counted from
    1, keep their own names and are numbered after the decoder's layers. In a model without numbered
    layers, the layer number is the position in the outermost list of modules.

    Args:
        model: outermost module of the model or of one pipeline stage; it may be wrapped.
        prefix: text before each name, to distinguish this model from another one.
    """
    numbered = dict(transformer_layers(model))
    for name, module in model.named_modules():
        if isinstance(module, Identified) and not numbered:
            index, count = _place_in_list(model, name, module)
            module.identify(ModuleIdentity(_named(prefix, name, module), index), count)
        elif isinstance(module, Identified):
            count = getattr(module.config, "num_layers", None) or len(numbered)
            module.identify(ModuleIdentity(_named(prefix, name, module), -1), count)
        if isinstance(attention := getattr(module, "core_attention", None), Identified):
            # If there are more tensor-parallel ranks than query groups, the configuration of core
            # attention has as many groups as ranks. Only the configuration of the enclosing module
            # has the true number.
            groups = attention.config.num_query_groups, module.config.num_query_groups
            attention.group_copies = groups[0] // groups[1]
    for local_name, layer in numbered.items():
        index = layer.layer_number - 1
        global_name = re.sub(r"\d+$", str(index), local_name)
        count = layer.config.num_layers
        if re.search(r"(^|\.)mtp\.", local_name):
            index += count
        first = _first_expert(layer)
        for name, module in layer.named_modules(prefix=global_name):
            if isinstance(module, Identified):
                name = _with_global_expert(_named(prefix, name, module), first)
                module.identify(ModuleIdentity(name, index), count)


def _named(prefix: str, name: str, module: torch.nn.Module) -> str:
    """Return the name of a module; a module that is the whole model has the name of its class."""
    return prefix + (unwrapped(name) or type(module).__name__)


def _place_in_list(model: torch.nn.Module, name: str, module: torch.nn.Module) -> tuple[int, int]:
    """Return a module's position in the outermost list that contains it, and the list's length.

    Outside a list, the position follows from the number of the outermost module that megatron-core
    has numbered. It is -1 if there is no such module either.
    """
    parts = name.split(".") if name else []
    owner, owners = model, [model]
    for part in parts:
        inner = owner.get_submodule(part)
        if part.isdigit() and type(owner).__name__ in ("ModuleList", "Sequential"):
            return int(part), len(owner)  # type: ignore[arg-type]
        owner = inner
        owners.append(owner)
    numbers = (getattr(each, "layer_number", None) for each in owners)
    number = next((number for number in numbers if isinstance(number, int)), None)
    count = getattr(getattr(module, "config", None), "num_layers", None) or 0
    return (-1 if number is None else number - 1), count


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
    """Return `name` without the parts that wrappers such as DDP and torch.compile add."""
    name = _FRONT.sub("", f"{name}.")
    return _WITHIN.sub("", name).removesuffix(".")


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts module names numerically, so that layers.10 follows layers.9."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]
