"""Test accumulators in a study: errors, gains and quantiles against models in float64."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.analysis.__main__ import main
from megatron.analysis.store import TensorStore
from megatron.analysis.study import candidates_of
from megatron.analysis.study.accumulator_errors import dense, errors, study_accumulators
from megatron.fake_quant import fake_quantize, get_format
from megatron.fake_quant.accumulate.names import get_accumulator
from megatron.fake_quant.accumulate.unit_matrix import unit_matrix
from tests.analysis.study import small_dump

TRUNCATED = "fda:l1:fx:m6:rz"  #: every sum is truncated to 7 significant bits


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_dump.write(tmp_path_factory.mktemp("accumulators") / "bf16", layers=1)


def rows_of(folder, formats, accumulators):
    result = study_accumulators(TensorStore(folder), candidates_of(formats, []), accumulators)
    rows = result.rows
    assert not result.problems
    return rows[rows["iteration"] == 1].set_index(["operation", "gemm", "accumulator"]), result


def truncated_product(left, right, bits=7):
    """Sum left @ right one product at a time, and truncate every sum to `bits` bits."""
    total = np.zeros((*np.broadcast_shapes(left.shape[:-2]), left.shape[-2], right.shape[-1]))
    for k in range(left.shape[-1]):
        total = total + left[..., :, k, None] * right[..., None, k, :]
        mantissa, exponent = np.frexp(total)
        total = np.ldexp(np.trunc(np.ldexp(mantissa, bits)), exponent - bits)
    return total


def test_errors_of_all_gemms_equal_a_model_in_float64(folder):
    rows, _ = rows_of(folder, ["bf16"], [TRUNCATED, "fp32"])
    assert len(rows) == 9 * 2
    for operation, (a, b, c, _alpha) in small_dump.operands(folder).items():
        a, b, c = (x.double().numpy() for x in (a, b, c))
        pairs = ((a, b.swapaxes(-1, -2)), (c, b), (c.swapaxes(-1, -2), a))
        for gemm, (left, right) in zip(small_dump.GEMMS[operation], pairs, strict=True):
            exact = left @ right
            error = truncated_product(left, right) - exact
            row = rows.loc[operation, gemm, TRUNCATED]
            size = np.linalg.norm(exact)
            assert row["relative_error"] == pytest.approx(np.linalg.norm(error) / size, rel=1e-5)
            gain = (error * exact).sum() / size**2
            assert row["gain"] == pytest.approx(gain, rel=1e-5)
            assert gain < 0
            rms = np.sqrt((exact**2).mean())
            for name, share in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99)):
                quantile = np.quantile(error, share) / rms
                assert row[name] == pytest.approx(quantile, rel=1e-4, abs=1e-7)
            last = np.array_split(np.arange(exact.shape[-2]), 4)[-1]
            of_last = np.linalg.norm(error[..., last, :]) / np.linalg.norm(exact[..., last, :])
            assert row["rows_4"] == pytest.approx(of_last, rel=1e-5)
            assert row["terms"] == left.shape[-1]
            assert row["nonfinite"] == 0
            assert row["format_error"] < 1e-6, "operands in high precision"
            assert rows.loc[operation, gemm, "fp32"]["relative_error"] < 1e-6


def test_the_error_of_the_format_is_beside_that_of_the_accumulator(folder):
    rows, result = rows_of(folder, ["fp8_e4m3", "mxfp4"], ["hopper_fp8", "hopper_fp8_promote128"])
    assert set(rows["format"]) == {"fp8_e4m3"}
    assert sum(count for reason, count in result.left_out.items() if "mxfp4" in reason) == 2
    a, b, _, _ = small_dump.operands(folder)["linear"]
    quantized = [fake_quantize(x.float(), get_format("fp8_e4m3")).double() for x in (a, b)]
    exact = a.double() @ b.double().mT
    expected = (quantized[0] @ quantized[1].mT - exact).norm() / exact.norm()
    row = rows.loc["linear", "fprop", "hopper_fp8"]
    assert row["format_error"] == pytest.approx(float(expected), rel=1e-4)
    assert 0 < row["relative_error"] < row["format_error"] < 0.1
    assert row["total_error"] == pytest.approx(row["format_error"], rel=0.1)


@pytest.mark.parametrize(
    ("fmt", "accumulator"),
    [
        ("mxfp8", "blackwell_mx"),
        ("nvfp4", "blackwell_nvfp4"),
        ("fp8_block", "hopper_fp8_promote128"),
    ],
)
def test_operands_with_block_scales_have_their_values(fmt, accumulator):
    x = torch.randn(8, 200, generator=torch.Generator().manual_seed(1)) * 3
    unit = get_accumulator(accumulator)
    values = dense(unit_matrix(x, get_format(fmt), -1, unit), unit)
    torch.testing.assert_close(
        values, fake_quantize(x, get_format(fmt)).double(), rtol=1e-6, atol=0
    )


def test_results_that_are_not_finite_are_counted_and_left_out():
    exact = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=torch.float64)
    summed = exact.float().clone()
    summed[0, 0], summed[1, 1] = torch.nan, 7.0
    row = errors(summed, exact, exact.float())
    assert row["nonfinite"] == 1
    assert row["relative_error"] == pytest.approx(1 / np.sqrt(84))
    assert row["gain"] == pytest.approx(-8 / 84)
    assert row["toward_zero"] == 1.0
    # the positions that are left have the errors 0, 0 and -1 and the root mean square sqrt(84 / 3)
    assert row["p01"] == pytest.approx(-0.98 / np.sqrt(28))


def test_the_command_writes_the_table(folder, capsys):
    out = folder.parent / "out"
    options = ["--formats", "fp8_e4m3", "--accumulators", "hopper_fp8", "--no-budget"]
    assert main(["study", str(folder), "--output-dir", str(out), *options]) == 0
    assert "hopper_fp8 with fp8_e4m3: median relative error of the sums" in capsys.readouterr().out
    table = pd.read_parquet(out / "accumulators.parquet")
    csv = pd.read_csv(out / "accumulators.csv")
    pd.testing.assert_frame_equal(csv, table, check_dtype=False, rtol=1e-9)
    assert {"relative_error", "gain", "p50", "rows_4", "format_error"} < set(table)


def test_a_pair_that_no_unit_multiplies_is_left_out_and_named(folder, capsys):
    out = folder.parent / "pairs"
    formats = ["--formats", "fp8_e4m3", "mxfp4"]
    options = [*formats, "--accumulators", "hopper_fp8", "--no-budget", "--select", "layer=0"]
    assert main(["study", str(folder), "--output-dir", str(out), *options]) == 0
    reason = (
        "pairs of a format and an accumulator: the accumulator hopper_fp8 cannot be combined with"
    )
    printed = capsys.readouterr().err
    assert f"[NOTE] left out: {reason} mxfp4" in printed
    assert printed.endswith(": 1\n"), "the number of pairs"
    assert f"{reason} mxfp4" in (out / "study.html").read_text("utf-8")
    for name in ("study", "accumulators", "gradients"):
        [(found, count)] = pd.read_parquet(out / f"{name}.parquet").attrs["left_out"].items()
        assert found.startswith(f"{reason} mxfp4"), name
        assert count == 1, name
    table = pd.read_parquet(out / "study.parquet")
    pairs = table[["format", "accumulator"]].fillna("").drop_duplicates()
    assert len(pairs) == 3, "both formats with torch.matmul, and one with the unit"


def test_an_accumulator_that_fits_no_format_is_refused_before_the_study(folder):
    with pytest.raises(ValueError, match="hopper_fp8 cannot be studied: the accumulator"):
        candidates_of(["mxfp4", "bf16"], [], ["fp32", "hopper_fp8"])


@pytest.mark.parametrize(
    ("accumulators", "words"),
    [(["hopper_fp9"], "hopper_fp9"), (["hopper_fp8"], "hopper_fp8 cannot be studied")],
)
def test_accumulators_that_do_not_fit_are_refused(folder, accumulators, words):
    with pytest.raises(ValueError, match=words):
        study_accumulators(TensorStore(folder), candidates_of(["mxfp4"], []), accumulators)
