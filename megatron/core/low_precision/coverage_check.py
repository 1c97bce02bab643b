"""Refuses a model whose matmuls a format or a collection would not reach.

Our layers take the place of the local implementation's. A model built from other layers
(Transformer Engine's, grouped experts, a specification that names the wheel's own classes) would
train in full precision, with a loss that looks fine, while the run claims a format.
"""

import torch

from megatron.collection.module_identity import Identified, transformer_layers
from megatron.fake_quant import policy

#: Modules within a transformer layer whose matmul stays in high precision by intent.
HIGH_PRECISION = ("router", "shared_experts")
CORE_ATTENTION = "core_attention"
#: Of a configuration, and the values at which they are harmless.
_BYPASSES = {
    "cuda_graph_impl": ("none", None),
    "enable_cuda_graph": (False, None),
    "external_cuda_graph": (False, None),
    "overlap_moe_expert_parallel_comm": (False, None),
}


def check_coverage(model: torch.nn.Module, *, collecting: bool) -> None:
    """Refuse a model with a matmul that the requested format or collection does not reach.

    Args:
        model: as it was built on this rank.
        collecting: whether this run collects tensors.

    Raises:
        ValueError: names the first module that is not reached.
    """
    quant_type = policy.current().quant_type
    if quant_type == policy.DEFAULT_TYPE and not collecting:
        return
    asked = "tensor collection" if quant_type == policy.DEFAULT_TYPE else f"format {quant_type}"
    recipe = model.config.quant_recipe
    if recipe is not None:
        raise ValueError(
            f"{asked} is set and so is the configuration's quant_recipe ({recipe!r}), which our "
            "layers do not read; give the file to --quant-recipe or QUANT_RECIPE, and set none in "
            "the configuration"
        )
    for name, harmless in _BYPASSES.items():
        value = getattr(model.config, name, None)
        if value not in harmless:
            raise ValueError(
                f"{asked} does not reach a model with {name}={value!r}: a replayed graph runs no "
                f"Python, nor is an overlapped schedule seen; choose {harmless[0]!r}"
            )
    for layer_name, layer in transformer_layers(model):
        for name, module in layer.named_modules(prefix=layer_name):
            if _is_matmul(name, module) and not isinstance(module, Identified):
                raise ValueError(
                    f"{asked} does not reach {name}, a {type(module).__qualname__} of "
                    f"{type(module).__module__}; build the model from the local implementation "
                    "(--transformer-impl local, without --moe-grouped-gemm), or switch the format "
                    "and the collection off"
                )


def _is_matmul(name: str, module: torch.nn.Module) -> bool:
    """Whether a module multiplies matrices itself: attention's core, or an owner of a matrix."""
    leaf = name.rpartition(".")[2]
    if leaf == CORE_ATTENTION:
        return True
    matrices = (p for p in module.parameters(recurse=False) if p.dim() >= 2)
    return leaf not in HIGH_PRECISION and next(matrices, None) is not None
