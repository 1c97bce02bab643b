"""Products of short dtypes on a CPU on which torch multiplies them with scalar code."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron import cpu_matmul
from tests import forks
from tests.subprocesses import REPO, environment

HALVES = (torch.bfloat16, torch.float16)
M, N, K = 24, 40, 96


@pytest.fixture(autouse=True)
def slow_cpu(monkeypatch):
    monkeypatch.setattr(cpu_matmul, "SLOW_DTYPES", frozenset(HALVES))


def operands(dtype: torch.dtype, *batch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((M, K), (K, N), (M, N))
    return [torch.randn(*batch, *shape, generator=generator).to(dtype) for shape in shapes]


#: Calls of each function with A, B and a matrix to add, and what they compute, in any dtype.
CALLS = {
    "matmul": (lambda f, a, b, c: f(a, b), lambda a, b, c: a @ b),
    "matmul other=": (lambda f, a, b, c: f(a, other=b), lambda a, b, c: a @ b),
    "mm": (lambda f, a, b, c: f(a, b), lambda a, b, c: a @ b),
    "bmm": (lambda f, a, b, c: f(a, b), lambda a, b, c: a @ b),
    "addmm": (
        lambda f, a, b, c: f(c, a, b, beta=0.5, alpha=3.0),
        lambda a, b, c: c / 2 + 3 * a @ b,
    ),
    "baddbmm": (
        lambda f, a, b, c: f(c * torch.nan, a, b, beta=0.0, alpha=0.3),
        lambda a, b, c: 0.3 * (a @ b),
    ),
    "linear": (lambda f, a, b, c: f(a, b.mT, bias=c[0]), lambda a, b, c: a @ b + c[0]),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_products_are_summed_in_float32_and_rounded_once(name, dtype, autocast):
    call, meaning = CALLS[name]
    word = name.partition(" ")[0]
    a, b, c = operands(dtype, *[2] * ("bmm" in name))
    exact = meaning(a.double(), b.double(), c.double())
    given = [x.float() for x in (a, b, c)] if autocast else [a, b, c]
    with torch.autocast("cpu", dtype, enabled=autocast):
        result = call(getattr(cpu_matmul, word), *given)
    assert result.dtype == dtype
    assert (result == exact.to(dtype)).double().mean() > 0.99, "a sum next to a tie may differ"
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-5)
    torch_result = call(getattr(torch, word, functional.linear), a, b, c)
    torch.testing.assert_close(result, torch_result, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_are_rounded_once(dtype):
    a, b, dc = operands(dtype)
    a.requires_grad_(), b.requires_grad_()
    da, db = torch.autograd.grad(cpu_matmul.matmul(a, b), (a, b), dc)
    for ours, exact in ((da, dc.double() @ b.double().mT), (db, a.double().mT @ dc.double())):
        assert ours.dtype == dtype
        assert (ours == exact.to(dtype)).double().mean() > 0.99


def test_all_other_tensors_are_multiplied_by_torch(monkeypatch):
    a, b, _ = operands(torch.float32)
    assert torch.equal(cpu_matmul.matmul(a, b), a @ b)
    assert cpu_matmul.matmul(a.double(), b.double()).dtype == torch.float64
    assert cpu_matmul.matmul(a.to("meta").bfloat16(), b.to("meta").bfloat16()).shape == (M, N)
    out = torch.empty(M, N, dtype=torch.bfloat16)
    assert cpu_matmul.matmul(a.bfloat16(), b.bfloat16(), out=out) is out
    with pytest.raises(RuntimeError, match="same dtype"):
        cpu_matmul.matmul(a.bfloat16(), b)
    monkeypatch.setattr(cpu_matmul, "SLOW_DTYPES", frozenset())
    assert torch.equal(cpu_matmul.matmul(a.bfloat16(), b.bfloat16()), a.bfloat16() @ b.bfloat16())


#: Program that trains a layer as if on a slow CPU, and prints which dtypes torch multiplied.
PROGRAM = """
import torch
from megatron import cpu_matmul
cpu_matmul.SLOW_DTYPES = frozenset({torch.bfloat16})
multiplied = set()
for name in ("matmul", "mm", "bmm", "baddbmm", "addmm"):
    def seen(*args, function=getattr(torch, name), **kwargs):
        multiplied.update(x.dtype for x in args if isinstance(x, torch.Tensor))
        return function(*args, **kwargs)
    setattr(cpu_matmul, name, cpu_matmul._through_float32(seen))
from megatron import cpu_backend
cpu_backend.activate()
x, w = (torch.randn(2, 8, 8, dtype=torch.bfloat16) for _ in range(2))
torch.matmul(x, w), torch.bmm(x, w), torch.mm(x[0], w[0]), torch.addmm(x[0], x[0], w[0])
torch.baddbmm(x, x, w, beta=0, alpha=0.5)
assert multiplied == {torch.float32}, multiplied
layer = torch.nn.Linear(8, 8).bfloat16()
layer(x[0]).sum().backward()
assert layer.weight.grad.dtype == torch.bfloat16
for product in (x @ w, x.matmul(w), x.bmm(w), torch.stack([y.mm(z) for y, z in zip(x, w)])):
    assert torch.equal(product, (x.float() @ w.float()).bfloat16())
scripted = torch.jit.script(MODULE.product)
assert torch.equal(scripted(x, w), x @ w)
"""
MODULE = "import torch\n\ndef product(a, b):\n    return torch.matmul(a, b)\n"


def test_the_cpu_backend_replaces_torchs_functions(tmp_path):
    (tmp_path / "product_module.py").write_text(MODULE)
    code = PROGRAM.replace("MODULE.", "__import__('product_module').")
    env = environment(PYTHONPATH=f"{REPO}:{tmp_path}")
    result = forks.run("-c", code, env=env, libraries_only=True)
    assert result.returncode == 0, result.stderr
