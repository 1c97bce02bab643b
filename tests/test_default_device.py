"""Default devices and dtypes that a program sets change nothing that this project computes."""

import ast
import json
from pathlib import Path

import pytest

from tests import forks
from tests.subprocesses import REPO, environment

#: Functions of torch whose results have the default dtype and device, unless arguments set them.
#: The dtype of the functions in `BY_VALUES` follows from their arguments if these are integers.
FACTORIES = {
    *("empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randn", "scalar_tensor"),
    *("tensor", "zeros"),
}
BY_VALUES = {
    *("arange", "asarray", "as_tensor", "randint", "randperm", "tril_indices", "triu_indices"),
}
#: Packages that other programs import. The commands of `inspect` run in processes of their own.
PACKAGES = ("fake_quant", "collection", "core")
COMPUTE = """
import hashlib, json, sys
import torch
from megatron import cpu_backend
if "backend" in sys.argv:
    cpu_backend.activate()
dtype = getattr(torch, sys.argv[1])
torch.set_default_dtype(dtype)
torch.set_default_device(sys.argv[2])
from megatron.fake_quant import Hadamard, dequantize, fake_quantize, quantize
from megatron.fake_quant.accumulate import accumulated_matmul
from megatron.fake_quant.matmul.delayed_scaling import AmaxHistories
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import GemmFormats
from megatron.fake_quant.names import get_format

generator = torch.Generator().manual_seed(1)
def normal(*shape):
    x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    scales = torch.arange(shape[-1], device="cpu") % 9
    return torch.ldexp(x, scales).float()  # float64 with torch 2.6 and this default dtype
def digest(*tensors):
    return [hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
            for x in tensors]

found, x, small = {}, normal(300, 256), normal(32, 32)
for name in sys.argv[3].split():
    for dtype in (torch.float32, torch.bfloat16):
        for axis in (0, 1):
            values = [fake_quantize(y.to(dtype), name, axis, seed=3) for y in (small, x, small)]
            parts = quantize(x.to(dtype), name, axis, seed=3)
            values += [parts.codes, dequantize(parts)]
            found[f"{name} {dtype} {axis}"] = digest(*values)
    a, b = (y.bfloat16().requires_grad_() for y in (normal(64, 64), normal(32, 64)))
    c = quantized_matmul(a, b, GemmFormats.uniform(get_format(name)), seed=5)
    found[f"{name} matmul"] = digest(c, *torch.autograd.grad(c, (a, b), normal(64, 32).bfloat16()))
    found[f"{name} matmul"].append(str(c.dtype))
for signs in ("none", "nvfp4", 7):
    transform = Hadamard(16, signs)
    found[f"Hadamard {signs}"] = digest(transform.apply(small, -1), transform.apply(x, 1))
for accumulator in ("hopper_fp8", "fp32"):
    a, b = (normal(rows, 64).to(torch.float8_e4m3fn).float() for rows in (40, 24))
    found[accumulator] = digest(accumulated_matmul(a, b, accumulator))
histories = AmaxHistories([4])
found["histories"] = [str(t.dtype) + str(t.device) for t in (histories.history, histories.amax)]
print(json.dumps(found))
"""
FORMATS = (
    "mxfp8 mxfp4:rceil nvfp4 nvfp4:outer-row nvfp4:4over6-mse nvfp4:eden fp8_block hifp8:t224 "
    "hifp4 fp8_e4m3 fp8_rowwise mx9 nf4 if4 mxfp4_macro mxint8 bf16"
)


def found(dtype: str, device: str, *more: str) -> dict[str, list[str]]:
    done = forks.run(
        *("-c", COMPUTE, dtype, device, FORMATS, *more),
        env=environment(PYTHONPATH=REPO),
        libraries_only=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def expected():
    return found("float32", "cpu")


@pytest.mark.parametrize(
    "settings",
    [
        ("bfloat16", "cpu"),
        ("float64", "cpu"),
        ("float32", "meta"),
        ("bfloat16", "meta", "backend"),
    ],
    ids=" ".join,
)
def test_results_do_not_depend_on_them(expected, settings):
    assert found(*settings) == expected


def factory_calls(path: Path) -> list[str]:
    """Return the location of each call of a factory of torch that relies on a default setting."""
    found = []
    for call in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
            continue
        name, given = call.func.attr, {keyword.arg for keyword in call.keywords}
        needed = {"device", "dtype"} if name in FACTORIES else {"device"}
        known = name in FACTORIES | BY_VALUES and ast.unparse(call.func) == f"torch.{name}"
        if known and None not in given and not needed <= given:
            found.append(f"{path.relative_to(REPO)}:{call.lineno}: {ast.unparse(call)}")
    return found


def test_every_new_tensor_has_a_dtype_and_a_device():
    folders = [REPO / "megatron" / package for package in PACKAGES]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 150
    assert [x for path in files if path.parent.name != "inspect" for x in factory_calls(path)] == []
