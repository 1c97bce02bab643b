"""`accumulated_matmul`: shapes, known errors, refusals, and the command that describes units."""

import pytest
import torch

from megatron.fake_quant import accumulated_matmul
from megatron.fake_quant.__main__ import main
from megatron.fake_quant.accumulate import ACCUMULATORS

from .operands import on_grid


def uniform(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return positive e4m3 elements whose maximum is 448."""
    x = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))
    return on_grid(x * (448 / x.max()), "e4m3")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return on_grid(x * (448 / x.abs().max()), "e4m3")


def relative(name: str, a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Return the relative bias and the relative root mean square of the error."""
    exact = a.double() @ b.double().t()
    error = accumulated_matmul(a, b, name).double() - exact
    rms = (error.square().mean() / exact.square().mean()).sqrt()
    return (error.mean() / exact.mean()).item(), rms.item()


@pytest.mark.parametrize(
    ("name", "rms", "bias"),
    [
        ("hopper_fp8", 1.3e-3, -0.0745),
        ("hopper_fp8_promote128", 1.3e-4, -0.00056),
        ("blackwell_fp8", 2.2e-7, -1.1e-6),
    ],
)
def test_errors_of_4096_products_are_as_known(name, rms, bias):
    """DeepSeek-V3 reports errors of up to 2 % for K = 4096; positive sums lose most."""
    assert relative(name, normal(32, 4096), normal(32, 4096, seed=1))[1] == pytest.approx(
        rms, rel=0.1
    )
    assert relative(name, uniform(16, 4096, 2), uniform(16, 4096, 3))[0] == pytest.approx(
        bias, rel=0.1
    )


def test_fp32_is_torch_matmul_bit_for_bit():
    a, b = torch.randn(2, 3, 40), torch.randn(2, 5, 40)
    assert torch.equal(accumulated_matmul(a, b, "fp32"), a @ b.transpose(1, 2))


def test_leading_dimensions_are_batches_of_matrices():
    a, b = normal(2, 3, 4, 70), normal(2, 3, 5, 70, seed=1)
    a_scales, b_scales = (torch.rand(2, 3, rows, 1) for rows in (4, 5))
    whole = accumulated_matmul(a, b, "hopper_fp8_promote128", scales=(a_scales, b_scales))
    assert whole.shape == (2, 3, 4, 5)
    for i in range(2):
        for j in range(3):
            scales = (a_scales[i, j], b_scales[i, j])
            part = accumulated_matmul(a[i, j], b[i, j], "hopper_fp8_promote128", scales=scales)
            assert torch.equal(whole[i, j], part)


@pytest.mark.parametrize("name", ["hopper_fp8", "blackwell_nvfp4", "cdna3_fp8", "fp16", "fp32"])
@pytest.mark.parametrize("shape", [(0, 4, 40), (3, 0, 40), (3, 4, 0)])
def test_empty_operands_give_zeros(name, shape):
    rows, columns, length = shape
    result = accumulated_matmul(torch.ones(rows, length), torch.ones(columns, length), name)
    assert torch.equal(result, torch.zeros(rows, columns))


def test_a_subnormal_element_is_aligned_by_the_exponent_of_its_type():
    """2^-9 has the exponent -6 in e4m3, where it is subnormal, and -9 in e5m2."""
    x = torch.tensor([[2.0**-9]])
    for align_bits, element, expected in (
        (6, "e4m3", 2.0**-18),
        (5, "e4m3", 0),
        (5, "e5m2", 2.0**-18),
    ):
        name = f"fda:l32:f{align_bits}:m13:rz"
        assert accumulated_matmul(x, x, name, elements=(element, element)).item() == expected


def test_two_units_differ_in_a_sum_that_needs_15_bits():
    """Hopper keeps 13 mantissa bits of 1 + 2^-14, and Blackwell all of them."""
    a, b = torch.tensor([[1.0, 2.0**-7]]), torch.tensor([[1.0, 2.0**-7]])
    assert accumulated_matmul(a, b, "hopper_fp8").item() == 1
    assert accumulated_matmul(a, b, "blackwell_fp8").item() == 1 + 2.0**-14


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a_MK": torch.ones(2, 4).to_sparse()}, "A is a torch.sparse_coo tensor .* pass dense"),
        ({"b_NK": torch.ones(3, 4, device="meta")}, "B is .* on the device meta, and A is on cpu"),
        ({"a_MK": torch.ones(2, 4).bfloat16()}, r"A is a tensor of torch.bfloat16 .*pass float32"),
        ({"b_NK": torch.ones(4)}, r"B is a tensor .*with at least two dimensions"),
        ({"b_NK": torch.ones(3, 5)}, r"A \(2, 4\) and B \(3, 5\) do not fit"),
        ({"accumulator": "hopper"}, "unknown accumulator 'hopper', did you mean"),
        ({"elements": ("e4m3", "e2m1")}, "hopper_fp8 does not multiply e2m1 elements; it mult"),
        ({"elements": ("hif8", "hif8")}, "no description of a matrix unit that multiplies"),
        ({"elements": ("e4m3", "e4m9")}, "unknown element 'e4m9'.* or e4m3fnuz, e5m2fnuz"),
        ({"a_MK": torch.full((2, 4), 0.3)}, "A contains 0.3, which is not a number of .*e4m3"),
        ({"a_MK": torch.full((2, 4), torch.inf)}, "A contains inf, which is not a number"),
        ({"scales": (torch.ones(2, 1),) * 2}, "hopper_fp8 applies no block scales; multiply"),
        (
            {"accumulator": "fp32", "scales": (torch.ones(2, 1),) * 2},
            "fp32 applies no block scales",
        ),
        (
            {"accumulator": "hopper_bf16", "elements": ("bfloat16", "float16")},
            "hopper_bf16 does not multiply bfloat16 by float16 elements",
        ),
        (
            {"accumulator": "blackwell_mx", "scales": (torch.ones(2, 2), torch.ones(3, 1))},
            r"scales of A .*one float32 per 32 elements, with the shape \(2, 1\)",
        ),
        (
            {"accumulator": "blackwell_mx", "scales": (torch.ones(2, 1), torch.full((3, 1), 3.0))},
            "scales of B contain 3, which is not an E8M0 scale; pass powers of two",
        ),
        (
            {"accumulator": "blackwell_mx", "scales": (torch.zeros(2, 1), torch.ones(3, 1))},
            "scales of A contain 0, which is not an E8M0 scale",
        ),
        (
            {"accumulator": "blackwell_nvfp4", "scales": (-torch.ones(2, 1), torch.ones(3, 1))},
            "scales of A contain -1, which is not an E4M3 scale; pass nonnegative E4M3 numbers",
        ),
    ],
)
def test_operands_that_a_unit_does_not_multiply_are_refused(change, message):
    arguments = {"a_MK": torch.ones(2, 4), "b_NK": torch.ones(3, 4), "accumulator": "hopper_fp8"}
    arguments |= change
    with pytest.raises(ValueError, match=message):
        accumulated_matmul(
            arguments.pop("a_MK"), arguments.pop("b_NK"), arguments.pop("accumulator"), **arguments
        )


def test_list_has_every_accumulator_or_those_given(capsys):
    assert main(["accumulate", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:]] == list(ACCUMULATORS)
    assert main(["accumulate", "list", "FDA:m9:l4:f9:rz", "fp32"]) == 0
    names = [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:]]
    assert names == ["fda:l4:f9:m9:rz", "fp32"]


@pytest.mark.parametrize(
    ("name", "phrases"),
    [
        ("hopper_fp8", ["wgmma", "32 products", "13 fractional bits", "bias -7.4 %", "MMA-Sim"]),
        ("hopper_fp8_promote128", ["after every 128 products", "bias -0.056 %"]),
        ("blackwell_nvfp4", ["4 groups of 16", "E4M3 scale per 16 elements"]),
        ("blackwell_mx", ["E8M0 scale per 32 elements; its exponent is added"]),
        ("cdna3_fp8", ["the even and the odd products separately", "rounded down to 31"]),
        ("fp32", ["torch.matmul in float32"]),
        ("fda:l2:fx:m7:rne", []),
        ("fda:l1:fx:m7:rne", ["research", "exact", "e8m7|bf16"]),
    ],
)
def test_describe_states_what_a_unit_does(name, phrases, capsys):
    if not phrases:
        assert main(["accumulate", "describe", name]) == 2
        assert "fx sums a step exactly" in capsys.readouterr().err
        return
    assert main(["accumulate", "describe", name]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for phrase in phrases:
        assert any(part in text for part in phrase.split("|")), (phrase, text)


def test_autocast_does_not_round_the_operands():
    a = torch.full((2, 8), 1.001)
    exact = accumulated_matmul(a, a, "fp32")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(accumulated_matmul(a, a, "fp32"), exact)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"elements": ("e4m3",)}, "elements is a tuple of 1"),
        ({"elements": "e4m3"}, "elements is a str"),
        ({"elements": ("e4m3", "e4m3"), "accumulator": "fp32"}, "not a number of the element"),
        ({"scales": (torch.ones(1, 1),) * 3, "accumulator": "blackwell_mx"}, "scales is a tuple"),
        ({"scales": (torch.ones(1, 1), None), "accumulator": "blackwell_mx"}, "a NoneType"),
        ({"accumulator": None}, "None is not an accumulator"),
    ],
)
def test_malformed_arguments_are_refused(arguments, message):
    x = torch.full((1, 4), 0.3 if arguments.get("accumulator") == "fp32" else 1.0)
    with pytest.raises(ValueError, match=message):
        accumulated_matmul(x, x, **({"accumulator": "hopper_fp8"} | arguments))


def test_negated_views_are_accepted():
    x = torch.complex(torch.zeros(2, 4), torch.ones(2, 4)).conj().imag
    assert x.is_neg()
    assert accumulated_matmul(x, x, "hopper_fp8").tolist() == [[4.0, 4.0], [4.0, 4.0]]
