"""Products of short dtypes on a CPU where torch would multiply them with scalar code."""

import pytest
import torch
from torch import Tensor

from megatron import cpu_matmul
from tests import forks
from tests.subprocesses import REPO, environment

HALVES = (torch.bfloat16, torch.float16)
M, N, K = 24, 40, 96
#: Calls of each function with A, B and a matrix to add, and what they compute, in any dtype.
CALLS = {
    "matmul": (lambda f, a, b, c: f(a, b), lambda a, b, c: a @ b),
    "bmm": (lambda f, a, b, c: f(a, b), lambda a, b, c: a @ b),
    "addmm": (
        lambda f, a, b, c: f(c, a, b, beta=0.5, alpha=3.0),
        lambda a, b, c: c / 2 + 3 * a @ b,
    ),
    "baddbmm": (
        lambda f, a, b, c: f(c * torch.nan, a, b, beta=0.0, alpha=0.3),
        lambda a, b, c: 0.3 * (a @ b),
    ),
}


@pytest.fixture(autouse=True)
def slow_cpu(monkeypatch):
    monkeypatch.setattr(cpu_matmul, "SLOW_DTYPES", frozenset(HALVES))
    monkeypatch.setattr(cpu_matmul, "_libraries", [])  # another test may have replaced the kernels


def operands(dtype: torch.dtype, *batch: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((M, K), (K, N), (M, N))
    return [torch.randn(*batch, *shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_products_are_summed_in_float32_and_rounded_once(name, dtype, autocast):
    call, meaning = CALLS[name]
    a, b, c = operands(dtype, *[2] * ("bmm" in name))
    exact = meaning(a.double(), b.double(), c.double())
    given = [x.float() for x in (a, b, c)] if autocast else [a, b, c]
    multiplied = []

    def spy(*args, **kwargs):
        multiplied.append(({x.dtype for x in args}, torch.is_autocast_enabled("cpu")))
        return getattr(torch, name)(*args, **kwargs)

    assert getattr(cpu_matmul, name).__wrapped__ is getattr(torch, name)
    with torch.autocast("cpu", dtype, enabled=autocast):
        result = call(cpu_matmul._through_float32(spy), *given)
        assert torch.equal(result, call(getattr(cpu_matmul, name), *given))
    assert multiplied == [({torch.float32}, False)]
    assert result.dtype == dtype
    assert (result == exact.to(dtype)).double().mean() > 0.99, "a sum next to a tie may differ"
    torch.testing.assert_close(result.double(), exact, rtol=2**-8, atol=1e-5)


def test_all_other_tensors_are_multiplied_by_torch(monkeypatch):
    a, b, _ = operands(torch.float32)
    assert torch.equal(cpu_matmul.matmul(a, b), a @ b)
    assert cpu_matmul.matmul(a.double(), b.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert cpu_matmul.matmul(a.double(), b.double()).dtype == torch.float64
    assert cpu_matmul.matmul(a.to("meta").bfloat16(), b.to("meta").bfloat16()).shape == (M, N)
    with pytest.raises(RuntimeError, match="same dtype"):
        cpu_matmul.matmul(a.bfloat16(), b)
    monkeypatch.setattr(cpu_matmul, "SLOW_DTYPES", frozenset())
    assert torch.equal(cpu_matmul.matmul(a.bfloat16(), b.bfloat16()), a.bfloat16() @ b.bfloat16())


#: Program that runs as if on a slow CPU, and records the dtypes that torch's kernels multiply.
PREAMBLE = """
import torch
from torch import nn
from torch.nn import functional
from megatron import cpu_backend, cpu_matmul
cpu_matmul.SLOW_DTYPES = frozenset({torch.bfloat16, torch.float16})
multiplied, own_kernel = [], cpu_matmul._kernel
def spied(out_of):
    def recorded(*args, **kwargs):
        multiplied.append({x.dtype for x in args if isinstance(x, torch.Tensor)})
        return out_of(*args, **kwargs)
    return own_kernel(recorded)
cpu_matmul._kernel = spied
x, w, c = (torch.randn(2, 8, 8, dtype=torch.DTYPE) for _ in range(3))
a, b, d = x.float(), w.float(), c.float()
def rounded(x, w):
    return (x.float() @ w.float()).to(torch.DTYPE)
cpu_backend.activate()
cpu_backend.activate()
"""
#: Products of x and w, and the same products in float32.
PRODUCTS = [
    ("x @ w", "a @ b"),
    ("torch.matmul(x, w)", "a @ b"),
    ("x.bmm(w)", "a @ b"),
    ("torch.mm(x[0], w[0])", "a[0] @ b[0]"),
    ("torch.einsum('bij,bjk->bik', x, w)", "a @ b"),
    ("functional.linear(x, w[0].t())", "a @ b[0]"),
    ("functional.linear(x[0], w[0].t(), c[0, 0])", "torch.addmm(d[0, 0], a[0], b[0])"),
    (
        "torch.addmm(c[0], x[0], w[0], beta=0.5, alpha=3)",
        "torch.addmm(d[0], a[0], b[0], beta=0.5, alpha=3)",
    ),
    ("torch.baddbmm(c, x, w, alpha=0.3)", "torch.baddbmm(d, a, b, alpha=0.3)"),
    ("torch.baddbmm(x * torch.nan, x, w, beta=0)", "a @ b"),
    ("torch.func.vmap(torch.mm)(x, w)", "a @ b"),
    ("x[0, :, :0] @ w[0, :0]", "torch.zeros(8, 8)"),
]


def run_as_on_a_slow_cpu(code: str, dtype: str = "bfloat16") -> None:
    env = environment(PYTHONPATH=REPO)
    program = PREAMBLE.replace("DTYPE", dtype) + code
    result = forks.run("-c", program, env=env, libraries_only=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_backend_replaces_the_kernels_of_every_product(dtype):
    checks = [
        f"multiplied.clear()\nresult = {product}\n"
        f"assert multiplied == [{{torch.float32}}], ({product!r}, multiplied)\n"
        f"assert torch.equal(result, ({expected}).to(torch.{dtype})), {product!r}\n"
        "assert result.is_contiguous() and not result._version\n"
        for product, expected in PRODUCTS
    ]
    run_as_on_a_slow_cpu("".join(checks), dtype)


def test_gradients_and_autocast_use_the_kernels_and_keep_their_operands():
    run_as_on_a_slow_cpu(
        "layer = nn.Linear(8, 8, bias=False).bfloat16()\n"
        "saved = []\n"
        "def keep(x):\n"
        "    saved.append(x)\n"
        "    return x\n"
        "with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):\n"
        "    y = layer(x[0])\n"
        "assert {t.dtype for t in saved} == {torch.bfloat16}\n"
        "y.backward(w[0])\n"
        "assert torch.equal(layer.weight.grad, rounded(w[0].t(), x[0]))\n"
        "class Sub(torch.Tensor):\n"
        "    pass\n"
        "v = torch.randn(8, 8).requires_grad_()\n"
        "y = torch.mm(v, b[0])\n"
        "(g,) = torch.autograd.grad(y, v, torch.ones_like(y).as_subclass(Sub))\n"
        "assert type(g) is torch.Tensor\n"
        "multiplied.clear()\n"
        "with torch.autocast('cpu', torch.bfloat16):\n"
        "    assert torch.equal(x[0].float() @ w[0].float(), rounded(x[0], w[0]))\n"
        "assert all(dtypes == {torch.float32} for dtypes in multiplied)\n"
    )


def test_all_else_is_as_in_torch():
    run_as_on_a_slow_cpu(
        "import pickle\n"
        "class Right:\n"
        "    def __rmatmul__(self, other):\n"
        "        return 'right'\n"
        "assert x @ Right() == 'right'\n"
        "assert pickle.loads(pickle.dumps(torch.matmul)) is torch.matmul\n"
        "for a, b in ((x[0], w[0].float()), (x[0].float(), w[0])):\n"
        "    try:\n"
        "        torch.mm(a, b)\n"
        "    except RuntimeError as error:\n"
        "        assert 'same dtype' in str(error)\n"
        "    else:\n"
        "        raise AssertionError('two dtypes')\n"
        "z = torch.randn(3, 3, dtype=torch.complex64)\n"
        "torch.testing.assert_close(z.conj() @ z, z.conj().resolve_conj() @ z)\n"
        "assert torch.mm(torch.ones(2, 0), torch.ones(0, 3)).tolist() == [[0.0] * 3] * 2\n"
        "assert torch.equal(torch.eye(2, dtype=torch.int64) @ torch.tensor([[1, 2], [3, 4]]),"
        " torch.tensor([[1, 2], [3, 4]]))\n"
        "torch.fx.symbolic_trace(nn.Linear(2, 2))\n"
    )


def test_a_fast_cpu_keeps_torchs_kernels():
    run_as_on_a_slow_cpu("assert len(cpu_matmul._libraries) == 1\n")
    code = (
        "from megatron import cpu_backend, cpu_matmul\n"
        "cpu_matmul.SLOW_DTYPES = frozenset()\n"
        "cpu_backend.activate()\n"
        "assert cpu_matmul._libraries == []\n"
    )
    result = forks.run("-c", code, env=environment(PYTHONPATH=REPO), libraries_only=True)
    assert result.returncode == 0, result.stderr
