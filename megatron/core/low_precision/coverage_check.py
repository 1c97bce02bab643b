"""Report an error if matmuls of a model would not be quantized or collected as requested.

Our layers replace those of the local implementation. A model built from other layers (Transformer
Engine's, grouped experts, a specification that names the wheel's own classes) would train in full
precision, with a loss that looks right, while the run claims a format.
"""

from typing import Any, NamedTuple

import torch

from megatron.collection.module_identity import Identified, transformer_layers
from megatron.fake_quant import policy

#: Names of modules in a transformer layer whose matmuls stay in high precision on purpose.
HIGH_PRECISION = ("router", "shared_experts")
CORE_ATTENTION = "core_attention"


class Bypass(NamedTuple):
    """A flag that makes some matmuls bypass quantization and collection."""

    harmless: tuple[Any, ...]  #: values of the flag with which no matmul bypasses quantization
    advice: str  #: text that says why some matmuls bypass quantization and what to do
    in_model: bool = False  #: True to check the flag in the model's configuration


#: Flags that can make matmuls bypass quantization and collection. For a flag without `in_model`,
#: the check looks at the classes of the layers instead of the flag.
BYPASSES = {
    "transformer_impl": Bypass(
        ("local",), "its layers are not ours; give --transformer-impl local"
    ),
    "gradient_accumulation_fusion": Bypass(
        (False, None),
        "it computes weight gradients in a kernel of its own; give "
        "--no-gradient-accumulation-fusion",
    ),
    "moe_grouped_gemm": Bypass((False, None), "it multiplies the experts in one kernel; remove it"),
    "overlap_moe_expert_parallel_comm": Bypass(
        (False, None), "its schedule does not run micro-batch by micro-batch; remove it", True
    ),
    "cuda_graph_impl": Bypass(("none", None), "a replayed graph runs no Python; give none", True),
    "enable_cuda_graph": Bypass((False, None), "a replayed graph runs no Python; remove it", True),
    "external_cuda_graph": Bypass(
        (False, None), "a replayed graph runs no Python; remove it", True
    ),
}


def check_coverage(model: torch.nn.Module, *, collecting: bool) -> None:
    """Raise an error if a matmul of the model would not be quantized or collected as requested.

    Args:
        model: the model of this rank.
        collecting: whether this run collects tensors.

    Raises:
        ValueError: if there is such a matmul; the message names its module or the setting at fault.
    """
    current = policy.current()
    if not (current.changes_matmuls or collecting):
        return
    request = current.request if current.changes_matmuls else "tensor collection"
    recipe = model.config.quant_recipe
    if recipe is not None:
        raise ValueError(
            f"{request} is set and so is the configuration's quant_recipe ({recipe!r}), which our "
            "layers do not read; give the file to --quant-recipe or QUANT_RECIPE, and set none in "
            "the configuration"
        )
    for name, (harmless, _, in_model) in BYPASSES.items():
        value = getattr(model.config, name, None)
        if in_model and value not in harmless:
            raise ValueError(
                f"{request} does not reach a model with {name}={value!r}: a replayed graph runs no "
                f"Python, nor is an overlapped schedule seen; choose {harmless[0]!r}"
            )
    for layer_name, layer in transformer_layers(model):
        for name, module in layer.named_modules(prefix=layer_name):
            if _is_matmul(name, module) and not isinstance(module, Identified):
                raise ValueError(
                    f"{request} does not reach {name}, a {type(module).__qualname__} of "
                    f"{type(module).__module__}; build the model from the local implementation "
                    "(--transformer-impl local, without --moe-grouped-gemm), or switch the format "
                    "and the collection off"
                )


def _is_matmul(name: str, module: torch.nn.Module) -> bool:
    """Return whether a module multiplies matrices itself.

    Core attention does so. Every module that owns a matrix does so too, except the modules named in
    `HIGH_PRECISION`.
    """
    leaf = name.rpartition(".")[2]
    if leaf == CORE_ATTENTION:
        return True
    matrices = (p for p in module.parameters(recurse=False) if p.dim() >= 2)
    return leaf not in HIGH_PRECISION and next(matrices, None) is not None
