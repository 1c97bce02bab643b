"""What a layer is called in the whole model, wherever in a pipeline it lies.

A module's own name is local to its pipeline stage (`decoder.layers.0` on every stage) and a linear
layer does not know its layer's number at all. `GPTModel`, the only place that sees every module
with its name, assigns both once.
"""

import re
from dataclasses import dataclass

import torch

LM_HEAD = "output_layer"


@dataclass(frozen=True, slots=True)
class ModuleIdentity:
    """Where a module stands in the whole model."""

    name: str  #: dotted, with the global layer number: decoder.layers.5.self_attention.linear_qkv
    layer_idx: (
        int  #: global over pipeline stages, the first is 0; -1 outside of a transformer layer
    )

    @property
    def is_lm_head(self) -> bool:
        """The projection onto the vocabulary, which stays in high precision unless a recipe names
        it.
        """
        return self.name.rpartition(".")[2] == LM_HEAD


class Identified:
    """A module that `assign_identities` gives its `identity`; None if it is built outside of a
    model.
    """

    identity: ModuleIdentity | None = None

    def finish_init(self, quant_config):
        """Called by GPTModel with what `TransformerConfig.quant_recipe` matches to this layer's
        name.

        Raises:
            ValueError: a recipe matched; it would be ignored, and so train in full precision
                unnoticed.
        """
        if quant_config is not None:
            raise ValueError(
                f"a quantization recipe gives this layer {quant_config.config_key!r}, but formats "
                "are taken from --custom-quant-type, --linear-quant, --qk-quant and --pv-quant "
                "only; remove the recipe"
            )


def assign_identities(model: torch.nn.Module) -> None:
    """Give every `Identified` module of `model` its global name and layer number.

    The number is that of the enclosing transformer layer, whose `layer_number` megatron-core counts
    globally from 1. Multi-token-prediction layers count from 1 too; they keep their own name and
    follow the decoder's layers.
    """
    layers: list[tuple[str, str, int]] = []
    for name, module in model.named_modules():
        if re.search(r"(^|\.)layers\.\d+$", name) and hasattr(module, "layer_number"):
            layers.append((name, *_global(name, module.layer_number - 1, model)))
    for name, module in model.named_modules():
        if isinstance(module, Identified):
            module.identity = ModuleIdentity(name, -1)
            for local, renamed, layer_idx in layers:
                if name.startswith(local + "."):
                    module.identity = ModuleIdentity(renamed + name.removeprefix(local), layer_idx)


def _global(name: str, index: int, model: torch.nn.Module) -> tuple[str, int]:
    """The name with the layer's own global number, and the layer's index over decoder and MTP
    layers.
    """
    renamed = re.sub(r"\d+$", str(index), name)
    if name.startswith("mtp."):
        index += model.config.num_layers
    return renamed, index
