"""Report an error if matmuls of a model would not be quantized or collected as requested.

Our layers replace those of the local implementation. A model built from other layers (such as a
specification that names the wheel's own classes) would train in full precision, with a loss that
looks right, while the run claims a format. Inside a transformer layer, such a module is an error.
Outside of the layers, as in an output head or an image encoder, it is listed by `unreached`.

The modules of Transformer Engine can be collected, but no format applies to them, so a format that
includes one of them is an error.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from megatron.collection.module_identity import Identified, transformer_layers, unwrapped
from megatron.core.low_precision.transformer_engine import TransformerEngineLayer
from megatron.fake_quant import policy

#: Names of modules in a transformer layer whose own matmuls stay in high precision on purpose.
HIGH_PRECISION = ("router", "shared_experts")
CORE_ATTENTION = "core_attention"


class Bypass(NamedTuple):
    """A flag that makes some matmuls bypass quantization and collection."""

    harmless: tuple[Any, ...]  #: values of the flag with which no matmul bypasses quantization
    advice: str  #: text that says why some matmuls bypass quantization and what to do
    in_model: bool = False  #: True to check the flag in the model's configuration
    collected: bool = False  #: True if the matmuls that bypass quantization are collected


#: Flags that can make matmuls bypass quantization and collection. For a flag without `in_model`,
#: the check looks at the classes of the layers instead of the flag.
BYPASSES = {
    "transformer_impl": Bypass(
        ("local",),
        "its layers are not this project's; give --transformer-impl local",
        collected=True,
    ),
    "gradient_accumulation_fusion": Bypass(
        (False, None),
        "it computes weight gradients in a kernel of its own; give "
        "--no-gradient-accumulation-fusion",
    ),
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
    configs = {id(module.config): module.config for module in _configured(model)}
    for config in configs.values():
        _check_config(config, request)
    for module in model.modules():
        if isinstance(module, TransformerEngineLayer):
            _check_transformer_engine(module, request, collecting=collecting)
    for layer_name, layer in transformer_layers(model):
        for name, module in layer.named_modules(prefix=layer_name):
            if _is_matmul(name, module) and not isinstance(module, Identified):
                raise ValueError(
                    f"{request} does not reach {name}, a {type(module).__qualname__} of "
                    f"{type(module).__module__}; build the model from the local implementation "
                    "(--transformer-impl local), or switch the format and the collection off"
                )


def _check_transformer_engine(
    module: TransformerEngineLayer, request: str, *, collecting: bool
) -> None:
    """Raise ValueError if the module has a format, or its requested tensors cannot be collected."""
    assert module.identity is not None
    name, layer = module.identity.name, module.identity.layer_idx
    described = f"{name}, a {type(module).__qualname__} of Transformer Engine"
    for operation in module.operations:
        plan = policy.current().plan(
            operation, name, layer, module.num_layers, is_lm_head=module.identity.is_lm_head
        )
        if plan.of_all_times():
            raise ValueError(
                f"{request} does not reach {described}, which multiplies in kernels of its own; "
                "give --transformer-impl local, or build the model from megatron-core's local "
                "layers"
            )
    if collecting and (why := module.refusal()) is not None:
        raise ValueError(f"the tensors of {described}, cannot be collected: {why}")


def _configured(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the model and its layers, except those without a configuration of megatron-core."""
    for module in model.modules():
        if (module is model or isinstance(module, Identified)) and hasattr(module, "config"):
            yield module


def _check_config(config: Any, request: str) -> None:
    """Raise ValueError if a configuration lets matmuls bypass quantization and collection."""
    recipe = getattr(config, "quant_recipe", None)
    if recipe is not None:
        raise ValueError(
            f"{request} is set and so is the configuration's quant_recipe ({recipe!r}), which our "
            "layers do not read; give the file to --quant-recipe or QUANT_RECIPE, and set none in "
            "the configuration"
        )
    for name, bypass in BYPASSES.items():
        harmless, value = bypass.harmless, getattr(config, name, None)
        if bypass.in_model and value not in harmless:
            raise ValueError(
                f"{request} does not reach a model with {name}={value!r}: a replayed graph runs no "
                f"Python, and an overlapped schedule is not observed; choose {harmless[0]!r}"
            )


def _is_matmul(name: str, module: torch.nn.Module) -> bool:
    """Return whether a module inside a transformer layer multiplies matrices itself.

    This is true for core attention and for every module that owns a matrix, except the modules
    named in `HIGH_PRECISION` and convolutions, to which no format applies.
    """
    leaf = name.rpartition(".")[2]
    if leaf == CORE_ATTENTION:
        return True
    if ".parametrizations" in name:  # torch computes a weight from this matrix
        return False
    return leaf not in HIGH_PRECISION and _owns_matrix(module) and not _is_convolution(module)


def _owns_matrix(module: torch.nn.Module) -> bool:
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))


def _is_convolution(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.conv._ConvNd)


def unreached(model: torch.nn.Module) -> list[str]:
    """Return the modules that may multiply matrices and are neither quantized nor collected.

    These are modules that own a matrix, and modules without parameters that are called attention.
    Embeddings multiply nothing. Our own layers, the modules inside them, and routers, which the
    audit lists, are left out.
    """
    results = []
    own = [module for module in model.modules() if isinstance(module, Identified)]
    inside = {id(part) for module in own for part in module.modules()}
    for name, module in model.named_modules():
        kind = type(module).__name__
        leaf = not any(True for _ in module.children())
        attends = leaf and "attention" in kind.lower() and not _has_parameters(module)
        multiplies = _owns_matrix(module) and "embedding" not in kind.lower()
        on_purpose = name.rpartition(".")[2] in HIGH_PRECISION
        if (attends or multiplies) and not on_purpose and id(module) not in inside:
            results.append(f"{unwrapped(name) or 'the model itself'} ({kind})")
    return results


def _has_parameters(module: torch.nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None
