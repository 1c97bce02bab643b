"""Test the errors of formats against the naive formulas of `naive.py`."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch

from megatron.analysis.stats import chunks, direct, tensor
from megatron.analysis.stats.format_groups import AXES, group_formats
from megatron.analysis.stats.kernels import class_tables
from megatron.analysis.stats.matrix_view import matrix_view_of
from megatron.analysis.stats.result_columns import arrays_of, format_numbers
from megatron.fake_quant import fake_quantize, get_format, quantize
from tests.analysis.stats import naive
from tests.analysis.stats.inputs import heavy

PLAIN = (
    "hifp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "bf16",
    "fp16",
    "hifp8:inf",
    "hifp8:t15",
    "hifp8:t224:pow2",
)
BLOCKS = (
    "mxfp8",
    "mxfp4",
    "mxfp6_e2m3",
    "mxint8",
    "nvfp4",
    "mxfp8:rceil",
    "mx:e5m2:b32:ceil",
    "mx:e2m1:b16:even",
    "mx:e3m4:b5:rceil",
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def linear(x: torch.Tensor):
    return matrix_view_of(tuple(x.shape), layer_type="linear", tensor_name="input")


def check(x: torch.Tensor, matrix, names) -> None:
    _, found = tensor.measure(x, matrix, group_formats(names))
    assert {name for name, _ in found} == set(names)
    for (name, axis), errors in found.items():
        numbers = format_numbers(get_format(name), errors)
        for column, expected in naive.errors(x, matrix, name, axis).items():
            # the rounding error of a sum that cancels depends on its order
            loose = 1e-12 * numbers["max_error"] if "bias" in column else 0
            loose = 1e-13 if column == "gain" else loose  # a difference from 1
            assert numbers[column] == pytest.approx(expected, rel=1e-10, abs=loose, nan_ok=True), (
                name,
                axis,
                column,
            )
        if len(errors.codes):
            counted = naive.codes(x, matrix, name, axis)
            np.testing.assert_array_equal(errors.codes, counted, (name, axis))
        if axis in AXES:
            share, sqnr = naive.disagreement(x, matrix, name, axis)
            assert numbers["axis_disagreement"] == pytest.approx(share, rel=1e-12), name
            assert numbers["axis_sqnr_db"] == pytest.approx(sqnr, rel=1e-10), name
            for column, expected in naive.blocks(x, matrix, name, axis).items():
                if column == "scales":
                    np.testing.assert_array_equal(errors.scales, expected, (name, axis))
                else:
                    assert numbers[column] == pytest.approx(expected, rel=1e-10, nan_ok=True), (
                        name,
                        axis,
                        column,
                    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_statistic_is_the_naive_one(dtype):
    x = heavy((37, 2, 77), dtype)
    check(x, linear(x), [*PLAIN, *BLOCKS])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_inf_poison_their_blocks_and_are_left_out_of_the_sums(dtype):
    x = heavy((64, 96), dtype)
    x[3, 5], x[40, 70], x[41, 71] = math.nan, math.inf, -math.inf
    check(x, linear(x), ["hifp8", "hifp8:inf", "fp8_e4m3", "fp16", "mxfp8", "nvfp4", "mxint8"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "values",
    [
        pytest.param([1.7], id="one element"),
        pytest.param([-0.0], id="one negative zero"),
        pytest.param([math.nan] * 3, id="all NaN"),
        pytest.param([math.inf, -math.inf], id="all Inf"),
        pytest.param([1e-44, 3e38, -2e-40], id="both ends of float32"),
    ],
)
def test_tensors_with_hardly_a_number(values, dtype):
    x = torch.tensor(values).to(dtype)
    matrix = matrix_view_of(tuple(x.shape), layer_type="linear", tensor_name="weight")
    names = ["hifp8", "fp8_e5m2", "mxfp8", "mxfp4", "nvfp4", "mxint8"]
    _, found = tensor.measure(x, matrix, group_formats(names))
    for (name, axis), errors in found.items():
        numbers = format_numbers(get_format(name), errors)
        for column, expected in naive.errors(x, matrix, name, axis).items():
            loose = 1e-13 if column == "gain" else None
            found_one = pytest.approx(expected, rel=1e-9, abs=loose, nan_ok=True)
            assert numbers[column] == found_one, (name, axis, column)


@pytest.mark.parametrize("shape", [(0,), (4, 0), (0, 3, 8)])
def test_an_empty_tensor_has_counts_of_zero_and_no_numbers(shape):
    x = torch.zeros(shape, dtype=torch.bfloat16)
    values, found = tensor.measure(x, linear(x), group_formats(["mxfp8", "hifp8"]))
    assert values.moments.count == 0
    assert len(found) == 3
    for (name, _), errors in found.items():
        numbers = format_numbers(get_format(name), errors)
        assert numbers["compared"] == 0
        assert math.isnan(numbers["mse"])
        assert math.isnan(numbers["sqnr_db"])


def test_heads_of_attention_share_no_block_and_columns_run_along_queries():
    x = heavy((40, 2, 3, 24), torch.bfloat16)
    matrix = matrix_view_of(tuple(x.shape), layer_type="attention", tensor_name="query")
    assert (matrix.rows, matrix.columns, matrix.run) == (40, 144, 24)
    check(x, matrix, ["mxfp8", "nvfp4"])
    # the matmul quantizes along head_dim, and along the queries of each sequence and head
    queries = x.permute(1, 2, 0, 3).contiguous()
    _, found = tensor.measure(x, matrix, group_formats(["mxfp4"]))
    for axis, dim in (("row", -1), ("column", -2)):
        error = fake_quantize(queries, "mxfp4", dim).double() - queries.double()
        assert found["mxfp4", axis].numbers()["mse"] == pytest.approx(
            error.square().mean().item(), rel=1e-12
        )


def test_attention_output_has_blocks_within_a_head_and_probabilities_along_keys():
    matrix = matrix_view_of((40, 2, 72), layer_type="attention", tensor_name="output", head_dim=24)
    assert (matrix.rows, matrix.columns, matrix.run) == (40, 144, 24)
    probabilities = torch.softmax(heavy((2, 3, 33, 40), torch.float32), -1).bfloat16()
    matrix = matrix_view_of((2, 3, 33, 40), layer_type="attention", tensor_name="attention_probs")
    check(probabilities, matrix, ["mxfp8", "nvfp4"])


def test_saturation_counts_values_beyond_the_rounding_edge_of_the_largest_number():
    # OCP's rule maps the largest power of two to that of the element. The scale is therefore 1, and
    # 6.5 rounds to 6, the largest number, but 7 would round to 8.
    x = torch.tensor([[7.5, 7.0, 6.5, 6.0] + [0.0] * 28], dtype=torch.bfloat16)
    _, found = tensor.measure(x, linear(x), group_formats(["mxfp4", "hifp8"]))
    numbers = found["mxfp4", "row"].numbers()
    assert numbers["saturated"] == 2 / 32
    assert found["hifp8", "all"].numbers()["saturated"] == 0
    large = torch.tensor([32768.0, 40960.0, -1e30, 1.0])
    _, found = tensor.measure(large, linear(large), group_formats(["hifp8", "hifp8:inf", "fp16"]))
    assert found["hifp8", "all"].numbers()["saturated"] == 2 / 4
    assert found["hifp8:inf", "all"].numbers()["saturated"] == 2 / 4
    assert found["fp16", "all"].numbers()["saturated"] == 1 / 4
    assert found["fp16", "all"].numbers()["compared"] == 3


def test_a_tensor_scale_lets_nothing_saturate():
    for seed in range(20):
        x = heavy((9, 11), torch.float32, seed)
        _, found = tensor.measure(x, linear(x), group_formats(["fp8_e4m3", "fp8_e5m2"]))
        assert all(errors.numbers()["saturated"] == 0 for errors in found.values())


@pytest.mark.parametrize("name", ["mxfp8:2d", "nvfp4:2d", "mx:e2m1:b16:rceil:2d"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_square_blocks_are_one_axis_and_each_counts_once(name, dtype):
    x = heavy((70, 100), dtype)
    _, found = tensor.measure(x, linear(x), group_formats([name]))
    assert list(found) == [(name, "all")]
    numbers = format_numbers(get_format(name), found[name, "all"])
    error = fake_quantize(x, name).double() - x.double()
    assert numbers["mse"] == pytest.approx(error.square().mean().item(), rel=1e-11)
    packed = quantize(x, name)
    np.testing.assert_array_equal(
        found[name, "all"].scales, np.bincount(packed.scales.block().flatten(), minlength=256)
    )
    assert numbers["blocks"] == packed.scales.block().numel()


@pytest.mark.parametrize("name", ["hifp4", "mxfp8:sr", "hifp8:hr", "fp8_e4m3:sr", "nvfp4:2d:sr"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_formats_that_are_computed_pair_by_pair(name, dtype):
    x = heavy((33, 70), dtype)
    _, found = tensor.measure(x, linear(x), group_formats([name]))
    again = tensor.measure(x, linear(x), group_formats([name]))[1]
    for key, errors in found.items():
        numbers = errors.numbers()
        np.testing.assert_array_equal(errors.ints, again[key].ints)
        assert numbers["compared"] == x.numel()
        assert errors.codes.sum() == x.numel()
        if "sr" not in name:
            for column, expected in naive.errors(x, linear(x), *key).items():
                loose = 1e-12 * numbers["max_error"] if "bias" in column else 0
                loose = 1e-13 if column == "gain" else loose  # a difference from 1
                assert numbers[column] == pytest.approx(expected, rel=1e-10, abs=loose), column
            np.testing.assert_array_equal(errors.codes, naive.codes(x, linear(x), *key))
        else:
            nearest = name.replace(":sr", "")
            one = tensor.measure(x, linear(x), group_formats([nearest]))[1][nearest, key[1]]
            assert numbers["mse"] > one.numbers()["mse"]
            np.testing.assert_array_equal(errors.scales, one.scales)
            np.testing.assert_array_equal(errors.block_range, one.block_range)
            np.testing.assert_array_equal(errors.headroom, one.headroom)
    if name == "hifp4":
        share, sqnr = naive.disagreement(x, linear(x), name, "row")
        numbers = found[name, "row"].numbers()
        assert numbers["axis_disagreement"] == pytest.approx(share)
        assert numbers["axis_sqnr_db"] == pytest.approx(sqnr)


@pytest.mark.parametrize("piece", [1 << 20, 1 << 10], ids=["whole", "pieces"])
def test_block_scales_of_every_kind_are_measured(piece, monkeypatch):
    """Some formats are measured by class; others, value by value, in pieces of whole blocks."""
    monkeypatch.setattr(direct, "PIECE", piece)
    x = heavy((70, 200), torch.bfloat16)
    x[3] = 0
    names = [
        "fp8_block",
        "fp8_block:2d",
        "fp8_rowwise",
        "nv:e4m3:column:fp32",
        "nv:e2m1:column:e4m3",
        "mx:e4m3:tensor:even",
        "amdfp4",
        "amdfp4:outer-tensor",
        "nvint4",
        "nvfp4:outer-none:head16/17",
        "nvfp4:bound256",
        "nvfp4:4over6-mae",
        "nvfp4:outer-row",
        "nvfp4:outer-1x64",
        "mx:e2m1:b4x8:rceil",
        "mxfp4:top7.25",
        "mxfp4:head3/4",
    ]
    _, found = tensor.measure(x, linear(x), group_formats(names))
    for (name, axis), errors in found.items():
        error = fake_quantize(x, name, 0 if axis == "column" else -1).double() - x.double()
        assert errors.numbers()["mse"] == pytest.approx(error.square().mean().item(), rel=1e-10)
    assert {axis for name, axis in found if name == "fp8_block:2d"} == {"all"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_give_what_the_whole_gives(dtype, monkeypatch):
    x = heavy((3, 70, 40), dtype)
    matrix = matrix_view_of(tuple(x.shape), layer_type="attention", tensor_name="attention_probs")
    plan = group_formats(["mxfp8", "mx:e2m1:b16:even", "nvfp4", "hifp8", "fp8_e4m3", "hifp4"])
    whole_values, whole = tensor.measure(x, matrix, plan)
    monkeypatch.setattr(chunks, "PIECE", 1000)
    values, found = tensor.measure(x, matrix, plan)
    for key, errors in found.items():
        np.testing.assert_array_equal(errors.ints, whole[key].ints, key)
        np.testing.assert_allclose(errors.floats, whole[key].floats, 1e-10, 1e-300)
    np.testing.assert_array_equal(values.token_amax, whole_values.token_amax)
    np.testing.assert_array_equal(values.channel_amax, whole_values.channel_amax)
    np.testing.assert_array_equal(values.histogram.counts, whole_values.histogram.counts)


@pytest.mark.parametrize("planes", [1, 3, 40])
def test_a_full_table_loses_nothing(planes):
    x = heavy((64, 96), torch.bfloat16)
    x *= torch.exp2(torch.arange(64.0) % 50)[:, None].bfloat16()  # gives many pairs of scales
    plan = group_formats(["mxfp8", "mxfp4"])
    roomy, small = tensor.Workspace(), tensor.Workspace()
    small.pairs = class_tables.PairTable(planes)
    _, whole = tensor.measure(x, linear(x), plan, roomy)
    _, found = tensor.measure(x, linear(x), plan, small)
    for key, errors in found.items():
        np.testing.assert_array_equal(errors.ints, whole[key].ints, key)
        np.testing.assert_allclose(errors.floats, whole[key].floats, 1e-11)
    assert not small.pairs.counts.any()  # the reused tables are empty


def test_histograms_add_up_to_the_numbers():
    x = heavy((64, 96), torch.bfloat16)
    values, found = tensor.measure(x, linear(x), group_formats(["mxfp4", "hifp8"]))
    arrays = arrays_of(values, found)
    a = x.double().abs().flatten().numpy()
    exponents = np.frexp(a[a > 0])[1] - 1
    counted = np.bincount(np.maximum(exponents, -127) + 127, minlength=255)
    np.testing.assert_array_equal(arrays.positive + arrays.negative, counted)
    for (name, axis), of_format in arrays.formats.items():
        numbers = format_numbers(get_format(name), found[name, axis])
        np.testing.assert_array_equal(of_format.values, counted)
        total = of_format.squared_error.sum()
        assert total / x.numel() == pytest.approx(numbers["mse"], rel=1e-12)
        relative = of_format.relative_error.sum() / of_format.values.sum()
        assert relative == pytest.approx(numbers["relative_error"], rel=1e-12)
        assert of_format.codes.sum() == x.numel()
    row = arrays.formats["mxfp4", "row"]
    assert row.scales.sum() == 64 * 3
    assert row.headroom.sum() == row.block_range.sum() == 64 * 3 - row_zero_blocks(x)
    np.testing.assert_array_equal(arrays.channel_amax, x.double().abs().amax(0))
    np.testing.assert_array_equal(arrays.token_amax, x.double().abs().amax(1))
    assert dataclasses.is_dataclass(row)


def row_zero_blocks(x: torch.Tensor) -> int:
    return int((x.reshape(64, 3, 32).abs().amax(-1) == 0).sum())


def test_other_dtypes_have_values_only_and_complex_ones_are_refused():
    x = torch.arange(12, dtype=torch.int64).reshape(3, 4)
    values, found = tensor.measure(x, linear(x), group_formats(["mxfp8"]))
    assert found == {}
    assert (values.moments.max, values.moments.zeros) == (11, 1)
    np.testing.assert_array_equal(values.channel_amax, [8, 9, 10, 11])
    with pytest.raises(TypeError, match="complex64"):
        tensor.measure(
            torch.zeros(2, dtype=torch.complex64), linear(torch.zeros(2)), group_formats([])
        )


def test_outlier_and_dead_channels():
    x = torch.ones(8, 10)
    x[:, 3], x[0, 7] = 0.0, 6.5
    values, _ = tensor.measure(x, linear(x), group_formats([]))
    assert values.outliers.tolist() == [7]
    assert (values.channel_amax == 0).sum() == 1
