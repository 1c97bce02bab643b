"""Test the numbers of a study against quantized runs and plain formulas in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.analysis.stats.kernels.product_errors import product_error_sums
from megatron.analysis.store import TensorStore
from megatron.analysis.study import candidates_of, study
from megatron.analysis.study.gemm_errors import numbers_of
from megatron.analysis.study.gemm_results import SeparateGemm, independent, only, results
from megatron.analysis.study.operands import Matmul
from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.matmul.gemm import quantized_matmul
from megatron.fake_quant.matmul.gemm_formats import GEMM_SLOTS, GemmFormats
from megatron.fake_quant.matmul.hadamard import Hadamard
from megatron.fake_quant.matmul.operand import Operand
from megatron.fake_quant.quant_type import gemm_formats
from megatron.fake_quant.scalings.tensor_scale import local_amax
from tests.analysis.study import small_dump

FORMATS = [
    *("mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "mxfp4:rceil", "nvfp4", "nvfp4:2d"),
    *("hifp8", "hifp4", "mxint8", "fp8_e4m3", "mx:e3m4:b16:rceil", "nvfp4:global"),
]
RANDOM = "mxfp4:sr"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_dump.write(tmp_path_factory.mktemp("study") / "bf16", layers=1)


@pytest.fixture(scope="module")
def result(folder):
    names = ["bf16", *FORMATS, RANDOM]
    return study(TensorStore(folder), candidates_of(names, []), draws=3, workers=1)


def live(operands, formats, seed=0):
    """Return the three results of a quantized run, through its autograd function."""
    a, b, c, alpha = operands
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    y = quantized_matmul(
        a, b, formats, alpha=alpha, seed=seed, amax_of=lambda slot, x, fmt: local_amax(x)
    )
    return [y.detach(), *torch.autograd.grad(y, (a, b), c)]


def row(result, operation, gemm, fmt):
    rows = result.rows
    [index] = rows.index[
        (rows["operation"] == operation) & (rows["gemm"] == gemm) & (rows["format"] == fmt)
    ]
    return rows.loc[index]


@pytest.mark.parametrize("operation", small_dump.GEMMS)
def test_errors_are_those_of_a_live_quantized_run(folder, result, operation):
    operands = small_dump.operands(folder)[operation]
    reference = small_dump.exact(operands)
    for name in FORMATS:
        results = live(operands, gemm_formats(operation, get_format(name)))
        for gemm, y, x in zip(small_dump.GEMMS[operation], results, reference, strict=True):
            numbers = row(result, operation, gemm, get_format(name).name)
            e, y = y.double() - x, y.double()
            squared = float((e**2).sum() / (x**2).sum())
            rms = float((x**2).mean().sqrt())
            assert numbers["relative_error"] == pytest.approx(math.sqrt(squared), rel=1e-4)
            assert numbers["sqnr_db"] == pytest.approx(-10 * math.log10(squared), abs=1e-3)
            assert numbers["gain"] == pytest.approx(
                float((x * y).sum() / (x * x).sum()) - 1, abs=1e-5
            )
            assert numbers["cosine"] == pytest.approx(
                float((x * y).sum() / (x.norm() * y.norm())), abs=1e-6
            )
            assert numbers["mean_error"] == pytest.approx(float(e.mean()) / rms, abs=1e-5)
            assert numbers["variance"] == 0, "rounding to nearest is the same in every draw"
            assert numbers["bias"] == numbers["relative_error"]


@pytest.mark.parametrize("operation", small_dump.GEMMS)
def test_operands_that_are_quantized_once_give_the_results_of_whole_runs(folder, operation):
    """Compare bit by bit, with both operands quantized and with only one of them."""
    matmul = Matmul(None, operation, *small_dump.operands(folder)[operation])
    rotated = Operand(get_format("nvfp4"), Hadamard(16))
    cases = [gemm_formats(operation, get_format(name)) for name in (*FORMATS, RANDOM)]
    cases.append(replace(cases[0], wgrad_c=rotated, wgrad_a=rotated, fprop_b=Operand()))
    cases.append(replace(cases[0], fprop_a=Operand(get_format("mxfp4"), split="mean")))
    for formats in cases:
        assert independent(formats)
        whole = results(matmul, formats, seed=5)
        for index, slots in enumerate(GEMM_SLOTS.values()):
            expected = [whole[index]]
            expected += [results(matmul, only(formats, [slot]), seed=5)[index] for slot in slots]
            computed = list(SeparateGemm(matmul, formats, index).products(5, budget=True))
            for y, x in zip(computed, expected, strict=True):
                assert torch.equal(y, x), (formats, index)


def test_gemms_that_depend_on_each_other_are_computed_as_one_run():
    fmt = get_format("mxfp4")
    one = Operand(fmt)
    assert independent(GemmFormats.uniform(fmt))
    dependent = [
        GemmFormats(one, one, straight_through=True),
        GemmFormats(one, one, dgrad_b=Operand(fmt, source="dequantized")),
        replace(GemmFormats.uniform(fmt), unnormalized=True),
        GemmFormats(Operand(fmt, Hadamard(16, "random")), Operand(fmt, Hadamard(16, "random"))),
    ]
    assert not any(independent(formats) for formats in dependent)


def test_bf16_shows_only_the_rounding_of_the_result(result):
    rows = result.rows[result.rows["format"] == "bf16"]
    assert rows["sqnr_db"].between(50, 60).all()
    assert (rows["bits"] == 16).all()


def test_bias_and_variance_of_stochastic_rounding(folder, result):
    """Compare bias and variance with the mean and the spread of many draws."""
    operands = small_dump.operands(folder)["linear"]
    x = small_dump.exact(operands)[0]
    formats = gemm_formats("linear", get_format(RANDOM))
    draws = torch.stack([live(operands, formats, seed)[0].double() for seed in range(40)])
    norm = (x**2).sum()
    variance = float(((draws - draws.mean(0)) ** 2).sum() / 39 / norm)
    numbers = row(result, "linear", "fprop", RANDOM)
    assert numbers["variance"] == pytest.approx(variance, rel=0.05)
    # saturation biases even stochastic rounding
    squared_bias = float(((draws.mean(0) - x) ** 2).sum() / norm) - variance / 40
    assert numbers["bias"] == pytest.approx(math.sqrt(squared_bias), rel=0.05)
    total = numbers["bias"] ** 2 + numbers["variance"]
    assert numbers["relative_error"] ** 2 == pytest.approx(total, rel=1e-9)
    assert row(result, "linear", "fprop", "mxfp4")["variance"] == 0


def test_the_budget_quantizes_one_operand_at_a_time(folder, result):
    a, b, c, _ = small_dump.operands(folder)["linear"]
    x = small_dump.exact((a, b, c, 1.0))
    a, b, c = (t.double() for t in (a, b, c))

    def quantized(t, axis):
        return fake_quantize(t.bfloat16(), "mxfp4", axis).double()

    pairs = {
        ("fprop", "input"): quantized(a, 1) @ b.T,
        ("fprop", "weight"): a @ quantized(b, 1).T,
        ("dgrad", "grad_output"): quantized(c, 1) @ b,
        ("dgrad", "weight"): c @ quantized(b, 0),
        ("wgrad", "grad_output"): quantized(c, 0).T @ a,
        ("wgrad", "input"): c.T @ quantized(a, 0),
    }
    budgets = result.budgets
    budgets = budgets[(budgets["operation"] == "linear") & (budgets["format"] == "mxfp4")]
    budgets = budgets.set_index(["gemm", "operand"])
    assert set(budgets.index) == set(pairs)
    for (gemm, operand), y in pairs.items():
        reference = x[small_dump.GEMMS["linear"].index(gemm)]
        of_operand = budgets.loc[(gemm, operand)]
        y = y.bfloat16().double()  # a run rounds its results to their dtype
        alone = float(((y - reference) ** 2).sum() / (reference**2).sum())
        assert of_operand["alone"] == pytest.approx(alone, rel=1e-3), (gemm, operand)
        [other] = {name for kind, name in pairs if kind == gemm} - {operand}
        assert of_operand["others"] == budgets.loc[(gemm, other), "alone"]
        both = row(result, "linear", gemm, "mxfp4")["relative_error"] ** 2
        assert of_operand["together"] == pytest.approx(both)
        assert of_operand["interaction"] == pytest.approx(
            both - of_operand["alone"] - of_operand["others"]
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_agree_with_float64_and_leave_out_what_is_not_finite(dtype):
    x = torch.randn(3, 37)
    y = (x * 1.01 + 0.003).to(dtype)
    for spoiled in (False, True):
        if spoiled:
            y[1, 3], y[2, 36], x[0, 0] = math.nan, math.inf, -math.inf
        a, b = x.double().numpy().ravel(), y.double().numpy().ravel()
        good = np.isfinite(a) & np.isfinite(b)
        a, e = a[good], b[good] - a[good]
        expected = [len(a), (a * a).sum(), (a * e).sum(), (e * e).sum(), e.sum(), (~good).sum()]
        np.testing.assert_allclose(product_error_sums(y, x), expected, rtol=1e-12)


def test_an_accumulator_changes_the_sums_as_in_a_live_run(folder):
    candidates = candidates_of(["fp8_e4m3"], [], ["hopper_fp8"])
    assert [candidate.name for candidate in candidates] == ["fp8_e4m3", "fp8_e4m3+hopper_fp8"]
    rows = study(TensorStore(folder), candidates, workers=1).rows
    rows = rows[(rows["operation"] == "linear") & (rows["accumulator"] == "hopper_fp8")]
    operands = small_dump.operands(folder)["linear"]
    formats = candidates[1].formats("linear", "", 0, num_layers=1, iteration=1)
    assert formats.simulated
    results = zip(live(operands, formats), small_dump.exact(operands), strict=True)
    errors = [float((y.double() - x).norm() / x.norm()) for y, x in results]
    assert rows["relative_error"].tolist() == pytest.approx(errors, rel=1e-4)
    assert set(rows["format"]) == {"fp8_e4m3"}


def test_an_accumulator_that_multiplies_no_such_format_is_refused():
    with pytest.raises(ValueError, match="hopper_fp8"):
        candidates_of(["nvfp4"], [], ["hopper_fp8"])


@pytest.mark.parametrize(
    ("xx", "ee", "error", "sqnr_db"),
    [(0.0, 0.0, math.nan, math.nan), (0.0, 4.0, math.inf, -math.inf), (4.0, 0.0, 0.0, math.inf)],
)
def test_results_without_a_size_or_without_an_error(xx, ee, error, sqnr_db):
    numbers = numbers_of(np.array([2, xx, 0.0, ee, 0.0, 0.0]))
    assert numbers["relative_error"] == pytest.approx(error, nan_ok=True)
    assert numbers["sqnr_db"] == pytest.approx(sqnr_db, nan_ok=True)
    assert numbers["bias"] == pytest.approx(error, nan_ok=True)


def test_an_inf_in_one_of_several_draws_is_counted():
    sums = np.array([8, 1.0, 0.0, 0.01, 0.0, 0.25])  # the mean over four draws
    assert numbers_of(sums, of_mean=sums, draws=4)["nonfinite"] == 1


def test_a_result_that_is_not_finite_has_an_infinite_error_in_the_budget(tmp_path):
    """Eight inputs overflow to Inf in hifp8:inf, so that results of fprop and wgrad do, too."""
    folder = small_dump.write(tmp_path / "bf16", layers=1)
    [path] = folder.glob("*linear_L0_forward_pre_*_input.pt")
    content = torch.load(path, weights_only=True)
    content["tensor"].view(-1)[:8] = 6e4
    path.unlink()
    torch.save(content, path)
    found = study(TensorStore(folder), candidates_of(["hifp8:inf", "hifp8"], []), workers=1)
    budgets = found.budgets[found.budgets["operation"] == "linear"]
    budgets = budgets.set_index(["format", "gemm", "operand"])[["alone", "together"]]
    for gemm in ("fprop", "wgrad"):
        other = {"fprop": "weight", "wgrad": "grad_output"}[gemm]
        assert budgets.loc["hifp8:inf", gemm, "input"].tolist() == [math.inf, math.inf]
        assert 0 < budgets.loc[("hifp8:inf", gemm, other), "alone"] < 1
        assert budgets.loc["hifp8", gemm, "input"].max() < 1
    assert row(found, "linear", "wgrad", "hifp8:inf")["nonfinite"] > 0
    assert math.isnan(row(found, "linear", "wgrad", "hifp8:inf")["gradient_to_noise"])
    assert row(found, "linear", "wgrad", "hifp8")["gradient_to_noise"] > 1
