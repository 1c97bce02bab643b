"""Quantize one operand slot of one layer at a time and compare the results with float64.

The tests run it in a process of its own. It prints a JSON object with the largest relative error of
every result per slot, and with the results that the slot changed.

The float64 chain has no quantizer. Where the layer quantizes an operand, the chain checks that the
operand equals its own up to rounding, and continues with the layer's quantized values. A value that
float32 and float64 round to different sides of a tie therefore causes no error.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import gpt_worker
import torch

FORMATS = ("mxfp4", "hifp8")
SLOTS = ("fprop_a", "fprop_b", "dgrad_c", "dgrad_b", "wgrad_c", "wgrad_a")
OF_FORWARD = {"dgrad_b": "fprop_b", "wgrad_a": "fprop_a"}  #: straight-through operand


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


class Chain:
    """A float64 chain that uses the quantized values of some operands of one operation."""

    def __init__(self, operation: str, formats: dict, seen: list):
        self.operation, self.formats, self.seen = operation, formats, list(seen)
        self.quantized = {}
        self.off = 0.0  #: largest relative difference between operands of layer and chain

    def __call__(self, operation: str, slot: str, x: torch.Tensor) -> torch.Tensor:
        if operation != self.operation:
            return x
        if self.formats.get("straight_through") and slot in OF_FORWARD:
            return self.quantized[OF_FORWARD[slot]]
        if slot not in self.formats:
            return x
        operand, quantized = self.seen.pop(0)
        # exp(s - rowmax) is P divided by the largest P of its row, which is 1 / (the row sum).
        largest = x.amax(-1, keepdim=True) if self.formats.get("unnormalized") else 1.0
        self.off = max(self.off, relative(operand, x / largest))
        self.quantized[slot] = quantized.double() * largest
        return self.quantized[slot]


def attention_chain(q, k, v, do, scale, at: Chain):
    """Return O, dQ, dK, dV of causal attention, [b * heads, s, d] in float64."""
    s = scale * at("qk", "fprop_a", q) @ at("qk", "fprop_b", k).mT
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
    p = s.masked_fill(hidden, -10000.0).softmax(-1)
    # V is the operand B^T of P V: blocks of it run over keys in the forward pass.
    o = at("pv", "fprop_a", p) @ at("pv", "fprop_b", v.mT).mT
    dp = at("pv", "dgrad_c", do) @ at("pv", "dgrad_b", v.mT)
    dv = (at("pv", "wgrad_c", do).mT @ at("pv", "wgrad_a", p)).mT
    ds = (p * (dp - (dp * p).sum(-1, keepdim=True))).masked_fill(hidden, 0.0)
    dq = scale * at("qk", "dgrad_c", ds) @ at("qk", "dgrad_b", k)
    dk = scale * at("qk", "wgrad_c", ds).mT @ at("qk", "wgrad_a", q)
    return o, dq, dk, dv


def linear_chain(x, w, dy, at: Chain):
    """Return Y and dX [tokens, features] and dW [outputs, inputs], in float64."""
    y = at("linear", "fprop_a", x) @ at("linear", "fprop_b", w).mT
    dx = at("linear", "dgrad_c", dy) @ at("linear", "dgrad_b", w)
    dw = at("linear", "wgrad_c", dy).mT @ at("linear", "wgrad_a", x)
    return y, dx, dw


def cases_of(operation: str) -> dict[str, dict]:
    """Return arguments of `GemmFormats` with formats by name: each slot alone, and options."""
    found = {f"{slot} {name}": {slot: name} for slot in SLOTS for name in FORMATS}
    for name in FORMATS:
        both = {"fprop_a": name, "fprop_b": name}
        found[f"straight_through {name}"] = both | {"straight_through": True}
        if operation == "pv":
            found[f"unnormalized {name}"] = {"fprop_a": name, "unnormalized": True}
    return found


def set_formats(module, operation: str, formats: dict) -> None:
    from megatron.fake_quant import get_format
    from megatron.fake_quant.matmul.gemm_formats import GemmFormats
    from megatron.fake_quant.matmul.operand import Operand
    from megatron.fake_quant.policy import OperationPolicy

    made = {k: v if v is True else Operand(get_format(v)) for k, v in formats.items()}
    module._plans = {each: OperationPolicy(each, None, "test") for each in module.operations}
    module._plans[operation] = OperationPolicy(operation, GemmFormats(**made), "test")


def by_head(x):
    """Reshape [s, b, heads, d] to [b * heads, s, d]."""
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def run_attention(module, operation, formats, seen):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(40, 2, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)
    )
    do = torch.randn(40, 2, 64, generator=generator)
    set_formats(module, operation, formats)
    seen.clear()
    o = module(q, k, v, None)
    dq, dk, dv = torch.autograd.grad(o, (q, k, v), do)
    chain = Chain(operation, formats, seen)
    wide = [by_head(x.detach().double().repeat_interleave(4 // x.shape[2], 2)) for x in (q, k, v)]
    wide_do = by_head(do.double().view(40, 2, 4, 16))
    exact = attention_chain(*wide, wide_do, 0.25, chain)
    found = (by_head(o.detach().view(40, 2, 4, 16)), by_head(dq), by_head(dk), by_head(dv))
    results = {}
    for result, ours, value in zip(("o", "dq", "dk", "dv"), found, exact, strict=True):
        if value.shape != ours.shape:  # two heads share a key: their gradients add up
            value = value.view(4, 2, 40, 16).sum(1)
        results[result] = (ours, value)
    return results, chain.off


def run_linear(module, operation, formats, seen):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(20, 2, 64, generator=generator).requires_grad_()
    set_formats(module, operation, formats)
    seen.clear()
    y, _ = module(x)
    dy = torch.randn(y.shape, generator=generator)
    dx, dw = torch.autograd.grad(y, (x, module.weight), dy)
    chain = Chain(operation, formats, seen)
    flat = (x.detach().flatten(0, 1).double(), module.weight.detach().double())
    exact = linear_chain(*flat, dy.flatten(0, 1).double(), chain)
    found = (y.detach().flatten(0, 1), dx.flatten(0, 1), dw)
    return dict(zip(("y", "dx", "dw"), zip(found, exact, strict=True), strict=True)), chain.off


def main() -> None:
    options = gpt_worker.parse([])
    gpt_worker.start(options)
    from megatron.fake_quant import fake_quantize
    from megatron.fake_quant.matmul import gemm

    seen: list = []

    original = gemm.quantize_parts

    def spy(parts, fmt, axis, *, seed=None, amax=None, dtype=None):
        quantized = fake_quantize(parts.values.float(), fmt, axis=axis, seed=seed, amax=amax)
        seen.append((parts.values.detach().clone(), quantized))
        return original(parts, fmt, axis, seed=seed, amax=amax, dtype=dtype)

    gemm.quantize_parts = spy
    layer = gpt_worker.build(options)[0].decoder.layers[0]
    cases = [("linear", layer.mlp.linear_fc1, run_linear)]
    attention = layer.self_attention.core_attention
    cases += [("qk", attention, run_attention), ("pv", attention, run_attention)]
    report = {}
    for operation, module, run in cases:
        plain, _ = run(module, operation, {}, seen)
        for case, formats in cases_of(operation).items():
            results, off = run(module, operation, formats, seen)
            report[f"{operation} {case}"] = {
                "operand": off,
                "errors": {r: relative(*pair) for r, pair in results.items()},
                "changed": [r for r in results if not torch.equal(results[r][0], plain[r][0])],
                "quantized": len(seen),
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
