"""Quantization under torch.compile, torch.export and tracing gives the bits of eager mode."""

import copy
import os
import pickle
import re
import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from megatron.fake_quant import (
    Format,
    Hadamard,
    code_points,
    dequantize,
    fake_quantize,
    format_text,
    get_format,
    names,
    operators,
    quantize,
)
from megatron.fake_quant.elements import E2M1, ELEMENTS
from megatron.fake_quant.format_text import from_text, to_text
from megatron.fake_quant.formats import FORMATS
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.special_scalings import TensorScaling
from tests.torch_releases import TRACES_ALL, traces_all

from .kernel_inputs import NAMES, SEED, bits
from .tracing import GEMMS, KINDS, dtypes, kinds, quantizer, seed_of, special, tensor

inductor = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Forget compiled functions, and let Inductor write scalar code.

    Otherwise, it compiles a program for seconds to learn which vector instructions there are.
    """
    torch._dynamo.reset()
    settings = {"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    if not hasattr(inductor_config, "cpp_cache_precompile_headers"):  # older releases of torch
        del settings["cpp_cache_precompile_headers"]
    with inductor_config.patch(settings):
        yield


def layouts(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return small and large tensors, with and without gaps, and empty ones."""
    small, large = tensor(6, 70).to(dtype), tensor(260, 300).to(dtype)
    return [
        small,
        small.t(),
        small[:, ::2],
        small[:1].expand(6, 70),
        tensor(6, 0).to(dtype),
        large,
        large.t(),
        large[:, ::2],
        large.view(4, 65, 300).permute(2, 0, 1),
    ]


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


# torch.compile


@traces_all
def test_a_format_of_the_user_s_own_is_compiled():
    own = Format("mine", E2M1, TensorScaling(5.0))
    function, x = compiled(lambda x: fake_quantize(x, own)), tensor(6, 70)
    assert torch.equal(bits(function(x)), bits(fake_quantize(x, own)))


@kinds
@pytest.mark.parametrize("shape", [(6, 70), (260, 300)])
def test_compiled_it_gives_the_bits_of_eager_mode(name, shape):
    if ":" in name and not TRACES_ALL:
        pytest.skip("torch 2.6 cannot trace names with variants")

    def function(x: Tensor) -> Tensor:
        first = fake_quantize(x * 2, name, axis=0, seed=seed_of(name))
        return fake_quantize(first.t() + 1, name, seed=seed_of(name))

    x = special(tensor(*shape))
    assert torch.equal(bits(compiled(function)(x)), bits(function(x)))


@pytest.mark.parametrize("name", ["mxfp8", "fp8_e4m3"])
def test_one_graph_serves_sizes_on_both_sides_of_the_threshold(name):
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(quantizer(name), backend=counter, fullgraph=True, dynamic=True)
    for shape in ((64, 80), (65, 300), (300, 300), (2, 5)):
        x = tensor(*shape)
        assert torch.equal(bits(function(x)), bits(quantizer(name)(x)))
    assert counter.frame_count == 1


@traces_all
def test_seeds_change_without_compiling_again():
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(
        lambda x, seed: fake_quantize(x, "mxfp4:sr", seed=seed), backend=counter, fullgraph=True
    )
    x = tensor(8, 64)
    for seed in (0, 1, 2, SEED, (1 << 62) - 1):
        expected = fake_quantize(x, "mxfp4:sr", seed=seed)
        assert torch.equal(function(x, seed), expected)
        assert torch.equal(fake_quantize(x, "mxfp4:sr", seed=torch.tensor(seed)), expected)
    assert counter.frame_count <= 3, "compiled for the first number, the second one, and all others"


@traces_all
def test_each_compiled_call_draws_a_number_as_eager_mode_does():
    function, x = compiled(lambda x: fake_quantize(x, "mxfp4:sr")), tensor(8, 64)
    function(x)  # compiles
    torch.manual_seed(5)
    found = [function(x) for _ in range(3)]
    torch.manual_seed(5)
    expected = [fake_quantize(x, "mxfp4:sr") for _ in range(3)]
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(found[0], found[1])


@inductor
def test_inductor_draws_the_numbers_of_eager_mode_where_it_is_told_to():
    function, x = torch.compile(lambda x: fake_quantize(x, "mxfp4:sr")), tensor(8, 64)
    with inductor_config.patch(fallback_random=True):
        function(x)  # compiles
    torch.manual_seed(5)
    found = [function(x) for _ in range(2)]
    torch.manual_seed(5)
    expected = [fake_quantize(x, "mxfp4:sr") for _ in range(2)]
    assert all(map(torch.equal, found, expected))


@traces_all
def test_the_python_of_the_formats_page_runs():
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.S)
    exec(code, {})


def test_a_generator_is_used_by_partly_compiled_code():
    function = torch.compile(
        lambda x, generator: fake_quantize(x, "mxfp4:sr", generator=generator) + 1,
        backend="aot_eager",
    )
    ours, theirs = (torch.Generator().manual_seed(3) for _ in range(2))
    x = tensor(8, 64)
    for _ in range(3):
        expected = fake_quantize(x, "mxfp4:sr", generator=theirs) + 1
        assert torch.equal(function(x, ours), expected)


@inductor
@kinds
def test_inductor_calls_the_operator(name):
    x = tensor(260, 300)[:, ::2]
    function = torch.compile(lambda x: fake_quantize(x.t(), name, seed=seed_of(name)))
    assert torch.equal(bits(function(x)), bits(quantizer(name)(x.t())))


@pytest.mark.parametrize("name", ["nvfp4", "hifp4", "mxfp4:sr", "fp8_e5m2", "hifp8", "bf16"])
@pytest.mark.parametrize("shape", [(6, 71), (260, 300)])
def test_compiled_codes_and_scales_are_those_of_eager_mode(name, shape):
    if ":" in name and not TRACES_ALL:
        pytest.skip("torch 2.6 cannot trace names with variants")

    def parts(x: Tensor) -> tuple[Tensor, ...]:
        packed = quantize(x, name, axis=0, seed=seed_of(name))
        return packed.codes, *packed.scales.parts().values(), dequantize(packed)

    x = tensor(*shape)
    for found, expected in zip(compiled(parts)(x), parts(x), strict=True):
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
        assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("shape", [(6, 64), (260, 320)])
def test_a_compiled_hadamard_transform_gives_the_bits_of_eager_mode(shape):
    transform, x = Hadamard(64, 5), tensor(*shape).bfloat16()

    def there_and_back(x: Tensor) -> tuple[Tensor, Tensor]:
        rotated = transform.apply(x)
        return rotated, transform.invert(rotated)

    for found, expected in zip(compiled(there_and_back)(x), there_and_back(x), strict=True):
        assert torch.equal(bits(found), bits(expected))


# Matmuls and models


def step(matmul, a: Tensor, b: Tensor, **autocast) -> list[Tensor]:
    """Return the result and the gradients of a matmul."""
    a, b = (x.clone().requires_grad_() for x in (a, b))
    with torch.autocast("cpu", **autocast or {"enabled": False}):
        c = matmul(a, b)
    c.sin().sum().backward()
    return [c.detach(), a.grad, b.grad]


# The CPU kernels are loaded by now, so that a few rows run the same code as many rows.
@traces_all
@pytest.mark.parametrize(
    ("rows", "name"), [(32, "mxfp8"), (32, "mean split"), *((256, name) for name in GEMMS)]
)
def test_a_compiled_matmul_gives_the_bits_of_eager_mode(rows, name):
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return quantized_matmul(a, b, GEMMS[name], alpha=0.5, seed=SEED)

    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, rows, 256, generator=generator)
    expected = step(matmul, a, b)
    assert all(map(torch.equal, step(compiled(matmul), a, b), expected))


@traces_all
def test_autocast_holds_for_the_backward_pass_compiled_and_not():
    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return quantized_matmul(a, b, GEMMS["mxfp8"])

    a, b = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(1))
    eager = step(matmul, a, b, dtype=torch.bfloat16)
    assert [x.dtype for x in eager] == [torch.bfloat16, torch.float32, torch.float32]
    found = step(compiled(matmul), a, b, dtype=torch.bfloat16)
    assert all(map(torch.equal, found, eager))
    wide = step(matmul, a, b)
    assert torch.equal(eager[0], wide[0].bfloat16()), "the operands are exact in bfloat16"


class Model(nn.Module):
    """A linear layer, attention over heads and a residual, quantized by the public functions."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.qkv = nn.Parameter(torch.randn(192, 64, generator=generator) / 8)
        self.out = nn.Parameter(torch.randn(64, 64, generator=generator) / 8)

    def forward(self, x: Tensor) -> Tensor:
        formats = GEMMS["mxfp8"]
        q, k, v = quantized_matmul(x, self.qkv, formats).view(-1, 4, 48).transpose(0, 1).chunk(3, 2)
        scores = quantized_matmul(q, k, GEMMS["stochastic"], alpha=0.25, seed=7)
        context = quantized_matmul(scores.softmax(-1), v.transpose(1, 2), GEMMS["nvfp4 rotated"])
        context = context.transpose(0, 1).reshape(-1, 64)
        cache = dequantize(quantize(context, "fp8_e4m3"))
        return x + quantized_matmul(cache + context, self.out, formats)


def gradients(model: nn.Module, function, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@traces_all
@pytest.mark.parametrize("tokens", [16, 512])
def test_a_compiled_model_trains_as_the_eager_one(tokens):
    model, x = Model(), torch.randn(tokens, 64, generator=torch.Generator().manual_seed(3))
    expected = gradients(model, model, x)
    found = gradients(model, compiled(model), x)
    assert all(map(torch.equal, found, expected))
    recomputed = gradients(
        model, lambda x: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False), x
    )
    assert all(map(torch.equal, recomputed, expected))
    with torch.inference_mode():
        assert torch.equal(model(x), expected[0])
        assert torch.equal(compiled(model)(x), expected[0])


def test_functional_call_and_per_sample_gradients_are_those_of_a_loop():
    model = Model()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    batch = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(3))

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    found = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, batch)
    for i, x in enumerate(batch):
        expected = gradients(model, model, x)[2:]
        for name, grad in zip(parameters, expected, strict=True):
            torch.testing.assert_close(found[name][i], grad, rtol=1e-5, atol=1e-5)


# Tracing and export


@kinds
@dtypes
def test_traced_shapes_and_strides_are_the_real_ones(name, dtype):
    for x in layouts(dtype):
        real = quantizer(name)(x)
        with FakeTensorMode() as mode:
            fake = quantizer(name)(mode.from_tensor(x))
        meta = quantizer(name)(torch.empty_strided(x.shape, x.stride(), dtype=dtype, device="meta"))
        assert isinstance(fake, FakeTensor)
        for found in (fake, meta):
            assert found.shape == real.shape
            assert found.stride() == real.stride()
            assert found.dtype == dtype


@pytest.mark.parametrize("name", [*NAMES, "nv:e2m1:column:e4m3", "mx:e4m3:tensor:even"])
def test_traced_codes_and_scales_have_the_real_shapes(name):
    for x in (tensor(6, 70), tensor(260, 300).t().half()):
        real = quantize(x, name, axis=0, seed=seed_of(name))
        with FakeTensorMode() as mode:
            fake = quantize(mode.from_tensor(x), name, axis=0, seed=seed_of(name))
            values = dequantize(fake)
        assert (values.shape, values.dtype) == (x.shape, x.dtype)
        pairs = [(fake.codes, real.codes)]
        pairs += zip(fake.scales.parts().values(), real.scales.parts().values(), strict=True)
        for found, expected in pairs:
            assert isinstance(found, FakeTensor)
            assert found.shape == expected.shape
            assert found.stride() == expected.stride()
            assert found.dtype == expected.dtype


def test_tracing_leaves_no_traced_tensor_in_a_cache():
    element = get_format("mx:e3m3:b8:floor").element
    code_points.code_values.cache_clear()
    with FakeTensorMode() as mode:
        dequantize(quantize(mode.from_tensor(tensor(4, 8)), "mx:e3m3:b8:floor"))
    assert type(code_points.code_values(element)) is Tensor
    assert quantize(tensor(4, 8), "mx:e3m3:b8:floor").codes.shape == (4, 8)


@pytest.mark.parametrize("shape", [(6, 70), (260, 300)])
@pytest.mark.parametrize("name", ["mxfp8", "fp8_e4m3", "mxfp4:sr"])
@pytest.mark.parametrize("trace", ["make_fx", "symbolic make_fx", "pre-dispatch", "jit"])
def test_what_is_traced_computes_and_holds_no_values(name, shape, trace):
    x, other = tensor(*shape), tensor(*shape, seed=1)
    if trace == "jit":
        traced = torch.jit.trace(quantizer(name), x)
        graph = str(traced.graph)
    else:
        options = {
            "symbolic make_fx": {"tracing_mode": "symbolic"},
            "pre-dispatch": {"pre_dispatch": True},
        }
        traced = make_fx(quantizer(name), **options.get(trace, {}))(x)
        graph = traced.code
    assert "megatron_fake_quant" in graph
    assert torch.equal(bits(traced(other)), bits(quantizer(name)(other)))


class Everything(nn.Module):
    """A module that calls all public functions, the last one with an unregistered format."""

    own = Format("mine", E2M1, TensorScaling(5.0))

    def forward(self, x: Tensor) -> Tensor:
        y = fake_quantize(x, "mxfp4:sr", seed=3) + dequantize(quantize(x, "nvfp4"))
        return y + Hadamard(16, 7).apply(x) + fake_quantize(x, self.own)


@traces_all
def test_an_exported_model_can_be_saved_and_loaded(tmp_path):
    model, rows = Everything(), torch.export.Dim("rows", min=2, max=1 << 20)
    program = torch.export.export(model, (tensor(6, 80),), dynamic_shapes={"x": {0: rows}})
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for shape in ((7, 80), (1000, 80)):
        x = tensor(*shape)
        assert torch.equal(bits(loaded(x)), bits(model(x)))


@pytest.mark.parametrize("number", range(6))
def test_the_operators_keep_torch_s_contract(number):
    """No input is changed or returned, and no tracing rule differs from the kernel."""
    x = [*layouts()[:5], tensor(70).requires_grad_()][number]
    for name in KINDS[1:]:
        fmt = get_format(name)
        if fmt.square and x.ndim < 2:
            continue
        seed = None if seed_of(name) is None else torch.tensor(SEED)
        torch.library.opcheck(operators.fake_quantize, (x, name, -1, seed, 0))
        if x.ndim == 2 and not fmt.square:
            seeds = None if seed is None else seed.expand(len(x))
            torch.library.opcheck(operators.fake_quantize, (x, name, -1, seeds, 1))
        if x.numel():
            torch.library.opcheck(operators.quantize, (x, name, -1, seed, 0))


@kinds
def test_results_have_memory_of_their_own(name):
    x = fake_quantize(tensor(6, 64).bfloat16(), "bf16")
    before = x.clone()
    quantize(x, name, seed=1).codes.zero_()
    fake_quantize(x, name, seed=1).zero_()
    dequantize(quantize(x, name, seed=1)).zero_()
    assert torch.equal(bits(x), bits(before))
    kept = quantize(x, "bf16")
    dequantize(kept).zero_()
    assert torch.equal(bits(kept.codes), bits(before))


# Formats as text


@pytest.mark.parametrize("name", [*FORMATS, *NAMES])
def test_a_format_is_the_same_after_being_text(name):
    fmt = get_format(name)
    assert to_text(fmt) == fmt.name
    assert from_text(to_text(fmt)) == fmt
    assert names._parsed(to_text(fmt)) == fmt
    own = replace(fmt, name="my own")
    assert from_text(to_text(own)) == own


def test_a_format_that_has_the_name_of_another_one_is_not_taken_for_it():
    mxfp4 = get_format("mxfp4")
    for other in (replace(mxfp4, rounding="stochastic"), replace(mxfp4, element=ELEMENTS["int4"])):
        assert (mxfp4.known_name, other.known_name) == ("mxfp4", None)
        assert from_text(to_text(other)) == other
    unmarked, x = replace(mxfp4), torch.randn(4, 32)
    for order in ((mxfp4, other, unmarked), (unmarked, other), (mxfp4, other, unmarked, other)):
        torch._dynamo.reset()
        compiled = torch.compile(fake_quantize, backend="eager")
        for fmt in order:
            assert torch.equal(compiled(x, fmt), fake_quantize(x, fmt))


def test_a_format_from_a_pickle_has_no_known_name():
    fmt = get_format("mxfp4")
    for copied in (copy.deepcopy(fmt), pickle.loads(pickle.dumps(fmt))):
        assert (copied, copied.known_name) == (fmt, None)
    old = object.__new__(Format)  # as pickled before `known_name` existed
    old.__setstate__([fmt.name, fmt.element, fmt.scaling, fmt.rounding, fmt.square_weights])
    assert (old, to_text(old)) == (fmt, "mxfp4")


def test_every_field_of_a_format_is_written():
    for part, written in format_text._FIELDS.items():
        assert written == tuple(field.name for field in fields(part) if field.init)


def test_a_name_of_any_characters_comes_back():
    own = Format('a "b" \\ {c}\n\u00e9', E2M1, TensorScaling(5.0))
    assert from_text(to_text(own)) == own


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"element": {"class": "object"}, "scaling": null}',
        '{"element": {"class": "Cast", "dtype": "load"}, "scaling": null, "name": "x"}',
    ],
)
def test_text_that_is_no_format_is_refused(text):
    with pytest.raises(ValueError, match="does not describe a format"):
        from_text(text)
