"""Test the split of a difference into parts, with planted errors whose parts are known."""

import pytest
import torch

from megatron.analysis.diff import origin
from megatron.analysis.diff.origin import (
    UnknownOriginError,
    inherited_by_attention,
    of_attention,
    of_linear,
)
from megatron.analysis.verification.recompute_linear import LINEAR
from megatron.analysis.verification.recorded_formats import Softmax

GENERATOR = torch.Generator().manual_seed(3)


def noise(*shape, size=1.0):
    return size * torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def product(name, tensors):
    """Return the exact result of a linear layer."""
    first, second = (tensors[operand].double() for operand in LINEAR[name])
    if name == "output":
        return first @ second.t()
    if name == "grad_input":
        return first @ second
    return first.flatten(0, 1).t() @ second.flatten(0, 1)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("moved", ["nothing", "first", "both"])
def test_parts_of_a_linear_layer(monkeypatch, name, moved):
    monkeypatch.setattr(origin, "_ROWS", 3)
    a = {"input": noise(4, 2, 8), "weight": noise(6, 8), "grad_output": noise(4, 2, 6)}
    changed = {"nothing": (), "first": LINEAR[name][:1], "both": LINEAR[name]}[moved]
    b = {
        key: x + noise(*x.shape, size=1e-3) if key in changed else x.clone() for key, x in a.items()
    }
    exact_a, exact_b = product(name, a), product(name, b)
    error_a, error_b = (noise(*exact_a.shape, size=1e-4) for _ in range(2))
    found = of_linear(name, (a, b), (exact_a + error_a, exact_b + error_b))
    size = float((exact_a + error_a).norm())
    assert found.inherited == pytest.approx(float((exact_b - exact_a).norm()) / size, rel=1e-3)
    assert found.local == pytest.approx(float((error_b - error_a).norm()) / size, rel=1e-2)
    assert found.word == ("local" if moved == "nothing" else "inherited")
    if moved == "nothing":
        assert found.inherited == 0


def attend(query, key, value):
    """Return causal attention [s, b, n * d]; key heads are repeated for the heads of a group."""
    groups = query.shape[2] // key.shape[2]
    key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    scores = torch.einsum("sbnd,tbnd->bnst", query, key) / query.shape[3] ** 0.5
    hidden = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", probs, value).flatten(2)


def results_of(tensors):
    names = ("query", "key", "value")
    operands = [tensors[name].clone().requires_grad_() for name in names]
    output = attend(*operands)
    grads = torch.autograd.grad(output, operands, tensors["grad_output"])
    return {"output": output.detach()} | {
        f"grad_{name}": grad for name, grad in zip(names, grads, strict=True)
    }


@pytest.mark.parametrize("backward", [False, True])
def test_parts_of_attention(backward):
    """Four query heads share two key heads; the heads of values are narrower."""
    shapes = {
        "query": (5, 2, 4, 8),
        "key": (5, 2, 2, 8),
        "value": (5, 2, 2, 6),
        "grad_output": (5, 2, 24),
    }
    a = {name: noise(*shape) for name, shape in shapes.items()}
    b = {name: x + noise(*x.shape, size=1e-2) for name, x in a.items()}
    if not backward:
        a.pop("grad_output"), b.pop("grad_output")
    grads = {"grad_output": noise(*shapes["grad_output"])}
    exact_a, exact_b = results_of(grads | a), results_of(grads | b)
    inherited = inherited_by_attention((a, b), Softmax(), backward=backward)
    assert inherited.keys() == ({*exact_a} - {"output"} if backward else {"output"})
    for name, part in inherited.items():
        torch.testing.assert_close(
            part.double(), exact_b[name] - exact_a[name], rtol=1e-3, atol=1e-5
        )
        error = noise(*part.shape, size=1e-4)
        found = of_attention(part, (exact_a[name], exact_b[name] + error))
        size = float(exact_a[name].norm())
        assert found.local == pytest.approx(float(error.norm()) / size, rel=2e-2)
        assert found.word == "inherited"


def test_unknown_parts_have_a_reason():
    ones = {"input": torch.ones(2, 3), "weight": torch.ones(4, 3)}
    result = torch.ones(2, 4)
    for results, why in (
        ((result, result * torch.inf), "NaN or Inf"),
        ((result * 0, result), "is zero"),
        ((result, torch.ones(2, 5)), "do not fit"),
    ):
        with pytest.raises(UnknownOriginError, match=why):
            of_linear("output", (ones, ones), results)
