"""Collect the tensors of Transformer Engine's linear layers and attention.

Transformer Engine (TE) multiplies in kernels of its own, which no simulated format reaches. Its
tensors can still be collected where they enter and leave a module, whether the module is one of
megatron-core (`TELinear`, `TEDotProductAttention`, ...) or of `transformer_engine.pytorch` itself.
`attach` changes the class of each such module to a subclass whose `forward` passes the tensors to
the collection. No tensor changes, so the results do not change either.

The field `implementation` of the records names TE's class. What TE computed within the module,
such as values in FP8, is not visible, so the results cannot be recomputed. These tensors differ
from those of the local layers:

- The input of a `LayerNormLinear` is the one before its norm, and `grad_input` is its gradient.
- An output contains the bias, unless TE returns the bias separately.
- TE exchanges inputs and outputs between ranks within the module. With sequence parallelism, the
  input of a column-parallel layer and the output of a row-parallel one are this rank's part of the
  sequence. If TE sums an output over the ranks, the collected output is the sum.

A module whose tensors TE hides is refused: it multiplies twice (`LayerNormMLP`), or its weight
gradient is computed elsewhere. The code was tested with a stand-in for TE, and not yet on a GPU.

Letters of the recorded dims: see `megatron.core.tensor_parallel.layers` and
`megatron.core.transformer.dot_product_attention`.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from megatron.collection import session
from megatron.collection.capture import Capture, watch
from megatron.collection.module_identity import Identified, ModuleIdentity
from megatron.core import parallel_state
from megatron.core.low_precision import model_roots
from megatron.core.low_precision.quantized_module import Collected

PACKAGE = "transformer_engine.pytorch"
#: Classes of megatron-core that split their weight over ranks without TE's knowledge, by the axis
#: that is split.
_MODES = {
    "column": (
        "TEColumnParallelLinear",
        "TELayerNormColumnParallelLinear",
        "TEColumnParallelGroupedLinear",
    ),
    "row": ("TERowParallelLinear", "TERowParallelGroupedLinear"),
}


class TransformerEngineLayer(Collected):
    """A module of Transformer Engine whose tensors can be collected."""

    config: Any = None  #: configuration of megatron-core; None for a module of TE itself
    kind: str  #: name of the class in `transformer_engine.pytorch`

    def capture(self) -> Capture | None:
        """Return the recorder of this forward pass; None if nothing is collected or measured."""
        return session.capture(
            self.identity,
            self.layer_type,
            training=self.training,  # type: ignore[attr-defined]
            implementation=f"transformer_engine.{self.kind}",
        )

    def prepare(self) -> None:
        """Add the attributes that `forward` needs; called once for each module."""

    def refusal(self) -> str | None:
        """Return why the tensors of this module cannot be collected; None if they can."""
        return None

    def flops(self, operation: str, seq_length: int) -> float:
        """Return the number of FLOPs per token of one GEMM, over all shards of the module."""
        raise NotImplementedError


class _Linear(TransformerEngineLayer):
    """A `Linear` or `LayerNormLinear` of TE."""

    operations = ("linear",)
    layer_type = "linear"
    #: recorders of the micro-batch whose backward pass runs, one per weight
    _in_backward: Sequence[Capture | None] = ()

    @property
    def sources(self) -> list[TransformerEngineLayer]:
        """Modules that the records name, one per weight."""
        return [self]

    @property
    def weight_names(self) -> list[str]:
        """Names of the weights' parameters."""
        return ["weight"]

    def refusal(self) -> str | None:
        """Return why the tensors of this module cannot be collected; None if they can."""
        delayed = getattr(self.config, "delay_wgrad_compute", False)
        store = getattr(self, "wgrad_store", None)
        if getattr(self, "fuse_wgrad_accumulation", False):
            return (
                "it adds up its weight gradients in a kernel of its own; give "
                "--no-gradient-accumulation-fusion"
            )
        if delayed or (store is not None and store.delay_wgrad_compute()):
            return "it computes its weight gradient later; leave out --delay-wgrad-compute"
        if missing := [name for name in self.weight_names if not hasattr(self, name)]:
            return f"it has no parameter {missing[0]}, because its weight is split or packed"
        if self._splits_sequence() and _size_of("context") > 1:
            return (
                "sequence parallelism and context parallelism both split the sequence of its "
                "tensors; leave one of them out"
            )
        return None

    def flops(self, operation: str, seq_length: int) -> float:
        """Return the number of FLOPs per token of one GEMM, over all shards of the module."""
        weight = getattr(self, self.weight_names[0])
        group = "expert_tensor" if self.is_expert else "tensor_model"
        return 2.0 * weight.numel() * (_size_of(group) if self._mode() is not None else 1)

    def forward(self, inp: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        captures = [source.capture() for source in self.sources]
        if not any(captures):
            return super().forward(inp, *args, **kwargs)  # type: ignore[misc]
        sizes = self._tokens(*args, **kwargs)
        dims = self._dims(inp)

        def save(name: str, tensor: torch.Tensor, phase: str, operation: str = "forward") -> None:
            parts = [tensor] if sizes is None else tensor.split(sizes)
            for capture, part in zip(captures, parts, strict=True):
                if capture is not None:
                    how = {"dims": dims[name], "phase": phase, "operation": operation}
                    capture.save(name, _flat(part), **how)

        save("input", inp, "pre")
        for capture, name in zip(captures, self.weight_names, strict=True):
            if capture is not None:
                capture.save("weight", _values(getattr(self, name)), dims=dims["weight"])
        self._watch_weights()
        if torch.is_grad_enabled() and inp.requires_grad:
            inp = watch(inp, lambda grad: save("grad_input", grad, "post", "backward"))
        results = super().forward(inp, *args, **kwargs)  # type: ignore[misc]
        output = _first(results)
        save("output", output, "post")

        def begin_backward(grad: torch.Tensor) -> None:
            self._in_backward = list(captures)
            save("grad_output", grad, "pre", "backward")

        if output.requires_grad:
            output.register_hook(begin_backward)
        return results

    def _tokens(self, *args: Any, **kwargs: Any) -> list[int] | None:
        """Return the number of tokens that each weight multiplies; None if there is one weight."""
        return None

    def _watch_weights(self) -> None:
        """Register hooks that save the gradients of the weights, including replaced parameters."""
        hooked = self.__dict__.setdefault("_hooked", {})
        for number, name in enumerate(self.weight_names):
            weight = getattr(self, name)
            if weight.requires_grad and (name not in hooked or hooked[name]() is not weight):
                hooked[name] = weakref.ref(weight)
                weight.register_hook(partial(self._save_weight_gradient, number))

    def _save_weight_gradient(self, number: int, grad: torch.Tensor) -> None:
        """Save the gradient of a weight with the recorder that the hook of the output has set."""
        if not self._in_backward:
            return
        capture = self._in_backward[number]
        self._in_backward[number] = None  # type: ignore[index]
        if capture is not None:
            dims = self._dims(None)["grad_weight"]
            capture.save("grad_weight", grad, dims=dims, operation="backward", phase="post")

    @property
    def is_expert(self) -> bool:
        """True if this is a layer of experts, which have their own tensor-parallel group."""
        name = "" if self.identity is None else self.identity.name
        return bool(re.search(r"\bexperts\.", name))

    def _mode(self) -> str | None:
        """Return the axis of the weight that is split over ranks: column, row or None."""
        names = {cls.__name__ for cls in type(self).__mro__}
        known = (mode for mode, classes in _MODES.items() if names.intersection(classes))
        return next(known, getattr(self, "parallel_mode", None))

    def _splits_sequence(self) -> bool:
        """Return whether this rank has only a part of the sequence of the input or the output.

        This holds for a duplicated layer of megatron-core if its weight gradients are added up over
        the ranks that share the sequence.
        """
        if self.is_expert:
            return False
        weight = getattr(self, self.weight_names[0], None)
        if getattr(weight, "sequence_parallel", False) is True:
            return True
        sharded = self._mode() is not None and getattr(self, "tp_size", 1) > 1
        return sharded and bool(getattr(self, "sequence_parallel", False))

    def _dims(self, inp: torch.Tensor | None) -> dict[str, str]:
        """Return `dims` by tensor name; without `inp`, only for the weight and its gradient."""
        tp = "[etp]" if self.is_expert else "[tp]"
        mode, split = self._mode(), f"{tp}" if self._splits_sequence() else ""
        in_tp, out_tp = tp if mode == "row" else "", tp if mode == "column" else ""
        of_input, of_output = (split if mode != m else "" for m in ("row", "column"))
        partial_groups = ["cp"] if not self.is_expert and _size_of("context") > 1 else []
        if split and mode is None:
            partial_groups.append("tp")
        sums = f" | partial[{','.join(partial_groups)}]" if partial_groups else ""
        weight = f"o{out_tp} h{in_tp}"
        dims = {"weight": weight, "grad_weight": weight + sums}
        if inp is not None:
            letters = ("s", " b") if inp.dim() == 3 else ("t", "")
            before, after = (f"{letters[0]}{each}{letters[1]}" for each in (of_input, of_output))
            dims |= dict.fromkeys(("input", "grad_input"), f"{before} h{in_tp}")
            dims |= dict.fromkeys(("output", "grad_output"), f"{after} o{out_tp}")
        return dims


class _Expert(TransformerEngineLayer, torch.nn.Module):
    """A module without parameters that gives one weight of a `GroupedLinear` its own records."""

    operations = ("linear",)
    layer_type = "linear"
    is_called = False
    flops_per_token = 0.0  #: FLOPs per token of one GEMM if each token went to this expert

    def flops(self, operation: str, seq_length: int) -> float:
        """Return the number of FLOPs per token of one GEMM, over all shards of the module."""
        if self.config is None:
            return self.flops_per_token
        share: float = self.config.moe_router_topk / self.config.num_moe_experts
        return self.flops_per_token * share

    def identify(self, identity: ModuleIdentity, layers_in_stack: int) -> None:
        """Set the name that the layer has in `SequentialMLP`: `local_experts.3.linear_fc1`."""
        name = re.sub(r"([^.]+)\.(local_experts\.\d+)$", r"\2.\1", identity.name)
        super().identify(ModuleIdentity(name, identity.layer_idx), layers_in_stack)


class _GroupedLinear(_Linear):
    """A `GroupedLinear` of TE, whose records name one expert each."""

    operations = ()  # the experts have the operations

    def prepare(self) -> None:
        """Create one module per expert; the records name these modules."""
        self.local_experts = torch.nn.ModuleList(
            _Expert()
            for _ in range(self.num_gemms)  # type: ignore[attr-defined]
        )
        for expert in self.local_experts:
            expert.kind, expert.config = self.kind, self.config
            expert.flops_per_token = self.flops("linear", 1)

    @property
    def sources(self) -> list[TransformerEngineLayer]:
        """Modules that the records name, one per weight."""
        return list(self.local_experts)  # type: ignore[arg-type]

    @property
    def weight_names(self) -> list[str]:
        """Names of the weights' parameters."""
        return [f"weight{number}" for number in range(len(self.local_experts))]

    def tensor_names(self) -> set[str]:
        """Return an empty set, because all tensors belong to the experts."""
        return set()

    def _tokens(self, m_splits: Any, *_: Any, **__: Any) -> list[int]:
        return m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)


class _Attention(TransformerEngineLayer):
    """A `DotProductAttention` of TE that collects its inputs, its output and their gradients."""

    operations = ("qk", "pv")
    layer_type = "attention"
    group_copies = 1  #: number of consecutive tensor-parallel ranks that share a query group

    def flops(self, operation: str, seq_length: int) -> float:
        """Return the number of FLOPs per token of one GEMM, over all shards of the module."""
        sizes = {"qk": "hidden_size_per_attention_head_k", "pv": "hidden_size_per_attention_head_v"}
        channels = getattr(self, sizes[operation], 0)
        return 2.0 * seq_length * channels * getattr(self, "num_attention_heads", 0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        capture = self.capture()
        forward = super().forward  # type: ignore[misc]
        if capture is None:
            return forward(*args, **kwargs)
        bound = inspect.signature(forward).bind(*args, **kwargs)
        before = self._before_features(bound.arguments)
        names = list(bound.arguments)[:3]  # query, key and value, or query_layer, ...
        for name, argument in zip(("query", "key", "value"), names, strict=True):
            tensor = bound.arguments[argument]
            heads = "a[tp]" if name == "query" else "g[tp]"
            dims = of_grad = f"{before} {heads} d"
            if name != "query" and self.group_copies > 1:
                dims = f"{before} g[tp:{self.group_copies}] d"
                of_grad = f"{dims} | partial[tp:{self.group_copies}]"
            capture.save(name, _values(tensor), dims=dims)
            bound.arguments[argument] = capture.watch_operand(
                tensor, f"grad_{name}", dims=of_grad, phase="post"
            )
        results = forward(*bound.args, **bound.kwargs)
        output = _first(results)
        dims = f"{before} h[tp]"
        capture.save("output", _values(output), dims=dims, phase="post")
        capture.watch_result(output, "grad_output", dims=dims)
        return results

    def _before_features(self, arguments: dict[str, Any]) -> str:
        """Return the letters of the dimensions before the heads, from the layout of the tensors."""
        packed = arguments.get("packed_seq_params")
        layout = getattr(packed, "qkv_format", None) or arguments.get("qkv_format")
        layout = layout or arguments.get("kwargs", {}).get("qkv_format")
        layout = layout or getattr(self, "qkv_format", "sbhd")
        letters = {"sbhd": "s b", "bshd": "b s", "thd": "t"}
        if layout not in letters or (layout == "thd" and _size_of("context") > 1):
            raise ValueError(
                f"{self.identity and self.identity.name} cannot be collected: it is unknown which "
                f"rank has which tokens in the layout {layout!r} of Transformer Engine's "
                "attention; use the layout sbhd or bshd, or leave the module out of "
                "--collect-modules"
            )
        return letters[layout]


#: Names of classes in `transformer_engine.pytorch`, with the class that collects their tensors.
_KINDS: dict[str, type[TransformerEngineLayer]] = {
    "LayerNormLinear": _Linear,
    "GroupedLinear": _GroupedLinear,
    "Linear": _Linear,
    "DotProductAttention": _Attention,
}
#: subclasses that `_attach` assigns to modules, by the original class of the module
_changed: dict[type, type] = {}


def attach(model: torch.nn.Module) -> None:
    """Make a model's Transformer Engine modules pass their tensors to the collection.

    Modules that were attached before stay as they are. Without Transformer Engine, nothing changes.
    """
    package = sys.modules.get(PACKAGE)
    if package is None:
        return
    for module in list(model.modules()):
        if isinstance(module, Identified):
            continue
        for kind, ours in _KINDS.items():
            cls = getattr(package, kind, None)
            if isinstance(cls, type) and isinstance(module, cls):
                _attach(module, kind, ours)
                break


def _attach(module: torch.nn.Module, kind: str, ours: type[TransformerEngineLayer]) -> None:
    cls = type(module)
    if cls not in _changed:
        _changed[cls] = type(
            cls.__name__, (ours, cls), {"kind": kind, "__module__": cls.__module__}
        )
    # TE's own `__setattr__` may treat this attribute differently from Python's
    object.__setattr__(module, "__class__", _changed[cls])
    assert isinstance(module, TransformerEngineLayer)
    module.prepare()
    for part in module.modules():
        if isinstance(part, TransformerEngineLayer):
            model_roots.expect_name(part)


def _size_of(axis: str) -> int:
    """Return the number of ranks in a parallel group, such as `context`."""
    if not parallel_state.model_parallel_is_initialized():
        return 1
    return getattr(parallel_state, f"get_{axis}_parallel_world_size")()  # type: ignore[no-any-return]


def _first(results: Any) -> torch.Tensor:
    """Return a module's output from its return value, which may also contain a bias."""
    return results[0] if isinstance(results, tuple | list) else results


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values; TE may keep a parameter in FP8, as a subclass of Tensor."""
    plain = type(tensor).dequantize is torch.Tensor.dequantize
    return tensor if plain else tensor.dequantize()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values; join all axes but the last unless there are 2 or 3 axes."""
    tensor = _values(tensor)
    return tensor if tensor.dim() in (2, 3) else tensor.reshape(-1, tensor.shape[-1])
