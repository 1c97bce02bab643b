"""Observe which modules of a model multiply matrices in its first forward pass, and how.

The format audit lists the modules that were built. A layer may be replaced or skipped afterwards,
and a subclass may compute attention differently. The first training forward pass shows what
runs. Hooks note which modules are called, and our layers note that their own code runs, which other
code may have replaced. At the end of each call, the autograd graph of the module's output shows the
operations of this call, because earlier ones have already been visited. No operation is
intercepted, so no result changes, and the hooks are removed after this one pass.

Operations that autograd does not record are not seen, such as those of a forward pass that will be
recomputed, or of a module whose weights are frozen and whose input needs no gradient. Operations
that a module performs on its inputs before it calls another module count as those of the inner
module if their results are passed as keyword arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from megatron.collection import session
from megatron.collection.module_identity import transformer_layers, unwrapped
from megatron.collection.training_clock import clock
from megatron.core.low_precision import matmul_audit
from megatron.core.low_precision.coverage_check import HIGH_PRECISION
from megatron.core.low_precision.explicit_iteration import tensors_in
from megatron.core.low_precision.findings import Findings
from megatron.core.low_precision.quantized_module import Collected, Quantized, observers

#: Operations by the names of their autograd nodes.
OPERATIONS = {
    **dict.fromkeys(("MmBackward0", "AddmmBackward0", "MvBackward0", "AddmvBackward0"), "matmul"),
    **dict.fromkeys(("BmmBackward0", "BaddbmmBackward0", "AddbmmBackward0"), "batched matmul"),
    "LinearBackward0": "matmul",
    "ConvolutionBackward0": "convolution",
}
#: Parts of the names of autograd nodes of fused attention.
ATTENTION = ("scaleddotproduct", "flashattn", "fusedattn", "flash_attn", "flexattention")
FUSED_ATTENTION = "fused attention"
#: Autograd nodes of our quantized matmuls, with the number of operations that each performs.
QUANTIZED = {"_QuantizedMatmulBackward": 1, "_TiledAttentionBackward": 2}


def _is_compiled(module: torch.nn.Module) -> bool:
    """Return whether torch.compile compiles this module or one of its methods."""
    own = (module.__dict__.get(name) for name in ("forward", "_forward_impl"))
    return (
        hasattr(module, "_orig_mod")
        # if torch.compile is disabled, it returns the function itself
        or getattr(module, "_compiled_call_impl", None) not in (None, module._call_impl)
        or any(hasattr(method, "_torchdynamo_orig_callable") for method in own)
    )


def _eager_layers(module: torch.nn.Module) -> Iterator[Quantized]:
    """Yield the layers of a model that are neither compiled nor inside a compiled module."""
    if _is_compiled(module):
        return
    if isinstance(module, Quantized):
        yield module
    for child in module.children():
        yield from _eager_layers(child)


_open: list[FirstForward] = []  #: observers of passes that have not ended


def abandon() -> list[FirstForward]:
    """Stop the observers of all passes that have not ended, and return the observers."""
    observers_of_passes = _open[:]
    for observer in observers_of_passes:
        observer.abandoned = True
        observer.stop()
    return observers_of_passes


class FirstForward:
    """Observer of one forward pass of a model.

    If a part of the model is compiled, only the layers outside of it are observed, and not their
    operations.
    """

    def __init__(self, model: torch.nn.Module, inputs: Any) -> None:
        """Begin to observe a forward pass; called by a hook before this pass."""
        self.model = model
        self.abandoned = False  #: True if an exception has ended the pass
        self._names = {module: unwrapped(name) for name, module in model.named_modules()}
        self._stack: list[torch.nn.Module] = []
        self._called: set[torch.nn.Module] = set()
        #: trained parameters of each layer that has returned; none if autograd records nothing.
        #: They are stored because FSDP replaces the parameters of a module after its forward pass.
        self._returned: dict[Quantized, list[torch.Tensor]] = {}
        self._ran: set[Quantized] = set()
        self._parameters: set[int] = set()  #: parameters that operations depend on, by `id`
        observers.append(self._ran)
        _open.append(self)
        self._visited: set[Any] = set()
        self._nodes: dict[Collected, Counter[str]] = {}
        self._outside: dict[torch.nn.Module, Counter[str]] = {}
        self._keys = 1
        # Adding or removing global hooks would cause compiled code to be recompiled.
        self._in_parts = any(map(_is_compiled, model.modules()))
        if self._in_parts:
            self._handles = [
                layer.register_forward_hook(self._after_layer) for layer in _eager_layers(model)
            ]
            return
        self._before(model, inputs)
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after),
        ]

    def _after_layer(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """Note that a layer has returned, and find the parameters on which its output depends."""
        self._note_return(module)
        for _ in self._new_nodes(output):
            pass

    def _note_return(self, module: torch.nn.Module) -> None:
        if isinstance(module, Quantized):
            own = module.parameters(recurse=False) if torch.is_grad_enabled() else ()
            self._returned[module] = [x for x in own if x.requires_grad]

    def _before(self, module: torch.nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._note_operations(inputs)  # of the calling module
        self._stack.append(module)
        self._called.add(module)
        if isinstance(module, Quantized) and "qk" in module.operations and len(inputs) > 1:
            self._keys = max(self._keys, inputs[1].shape[0])
            matmul_audit.note_mask(module, inputs[3] if len(inputs) > 3 else None)

    def _after(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._note_operations(output)
        self._note_return(module)
        while self._stack and self._stack.pop() is not module:
            pass  # the call of an inner module has ended with an exception that was handled

    def _note_operations(self, output: Any) -> None:
        """Count the new operations that led to `output` for the layer or module that is running."""
        operations = Counter(self._new_nodes(output))
        if not operations or not self._stack:
            return
        layer = next((m for m in reversed(self._stack) if isinstance(m, Collected)), None)
        if layer is not None:
            self._nodes.setdefault(layer, Counter()).update(operations)
        elif not any(self._leaf(module) in HIGH_PRECISION for module in self._stack):
            self._outside.setdefault(self._stack[-1], Counter()).update(operations)

    def _leaf(self, module: torch.nn.Module) -> str:
        return self._names.get(module, "").rpartition(".")[2]

    def _new_nodes(self, output: Any) -> Iterator[str]:
        """Visit the new nodes in the graph of `output`, and yield the kinds of their operations."""
        nodes = [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node in self._visited:
                continue
            self._visited.add(node)
            nodes += [inner for inner, _ in node.next_functions if inner is not None]
            name = type(node).__name__
            if name == "AccumulateGrad":
                self._parameters.add(id(node.variable))
            if name in QUANTIZED:
                yield name
            elif any(part in name.lower() for part in ATTENTION):
                yield FUSED_ATTENTION
            elif name in OPERATIONS:
                yield OPERATIONS[name]

    def stop(self) -> None:
        """Stop observing."""
        for handle in self._handles:
            handle.remove()
        observers[:] = [ran for ran in observers if ran is not self._ran]
        _open[:] = [each for each in _open if each is not self]
        self._visited.clear()

    def end(self) -> Findings:
        """Stop observing, and return the findings."""
        self.stop()
        layers = [layer for layer in self.model.modules() if isinstance(layer, Collected)]
        quantized = any(name in QUANTIZED for kinds in self._outside.values() for name in kinds)
        called = any(layer in self._called for layer in layers)
        findings = Findings(keys=self._keys, any_called=called or quantized or self._in_parts)
        if self._in_parts:
            for layer in layers:
                if isinstance(layer, Quantized) and self._was_replaced(layer):
                    self._note_replaced(layer, findings)
            return findings
        for layer in self.model.modules():
            if isinstance(layer, Quantized):
                self._compare(layer, findings)
            elif isinstance(layer, Collected) and layer.is_called and layer not in self._called:
                findings.not_called.append(layer.identity.name)
        within = {
            id(part) for _, layer in transformer_layers(self.model) for part in layer.modules()
        }
        for module, operations in self._outside.items():
            name = self._names.get(module) or "the model itself"
            text = f"{name} ({type(module).__name__})"
            findings.outside[text] = operations
            if operations[FUSED_ATTENTION] and id(module) in within:
                findings.foreign_attention.append(text)
        return findings

    def _compare(self, layer: Quantized, findings: Findings) -> None:
        """Compare a layer's operations in the first forward pass with its formats."""
        if layer not in self._called:
            findings.not_called.append(layer.identity.name)
            return
        name = f"{layer.identity.name} ({type(layer).__name__})"
        if self._was_replaced(layer):
            self._note_replaced(layer, findings)
            return
        operations = self._nodes.get(layer, Counter())
        iteration = max(clock.iteration, 1)
        plans = [layer.plan_of(operation).at(iteration) for operation in layer.operations]
        expected = sum(formats is not None for formats in plans)
        quantized = sum(count * operations[kind] for kind, count in QUANTIZED.items())
        others = sum(count for kind, count in operations.items() if kind not in QUANTIZED)
        allowed = (len(plans) - expected) * (quantized // expected if expected else 0)
        if expected and quantized >= expected and others > allowed:  # such as a low-rank adapter
            plain = {kind: count for kind, count in operations.items() if kind not in QUANTIZED}
            findings.outside[name] = Counter(plain)
        if quantized < expected and others:
            findings.without_format.append(name)
        elif operations[FUSED_ATTENTION]:
            findings.foreign_attention.append(name)

    def _was_replaced(self, layer: Quantized) -> bool:
        """Return whether other code ran in place of a layer's own code, and used its parameters.

        A layer that is skipped uses none. If autograd does not record the pass, this is unknown,
        and the result is True.
        """
        if layer in self._ran or layer not in self._returned:
            return False
        trained = self._returned[layer]
        return not trained or any(id(x) in self._parameters for x in trained)

    def _note_replaced(self, layer: Quantized, findings: Findings) -> None:
        """Add a layer with replaced code to the findings if it has a format or is collected."""
        name = f"{layer.identity.name} ({type(layer).__name__})"
        if any(layer.plan_of(operation).of_all_times() for operation in layer.operations):
            findings.without_format.append(name)
        elif session.includes(layer.identity, layer.layer_type):
            findings.not_collected.append(name)
