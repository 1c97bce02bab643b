"""Tests of quick_analysis: the content of its picture and of its text."""

from __future__ import annotations

import pytest
import torch
from matplotlib.patches import StepPatch

from megatron.analysis.quick import (
    draw_picture,
    histogram_data,
    magnitude_data,
    quick_analysis,
)
from megatron.analysis.stats.measure import measure_dump
from megatron.analysis.store import TensorStore
from tests.analysis.fake_dump import LAYER, records, write_dump, write_tensor


def measured(folder):
    dump = TensorStore(folder)
    return dump, measure_dump(dump)


def test_the_table_has_a_row_a_tensor_with_the_statistics_of_its_values(tmp_path):
    paths = write_dump(tmp_path, layers=2)
    _, found = measured(tmp_path)
    assert found.table["path"].tolist() == paths
    for row in found.table.to_dict("records"):
        x = torch.load(row["path"], weights_only=True)["tensor"].double()
        assert row["count"] == x.numel()
        assert row["mean"] == pytest.approx(x.mean().item(), rel=1e-12)
        assert row["std"] == pytest.approx(x.std(correction=0).item(), rel=1e-12)
        assert (row["min"], row["max"]) == (x.min().item(), x.max().item())
    assert found.summary().count == found.histogram().total == found.table["count"].sum()
    assert {name: n for name, (n, _) in found.by("operation").items()} == {
        "forward": 14,
        "backward": 14,
    }
    squares = (found.table["count"] * found.table["rms"] ** 2).sum()
    assert found.summary().rms == pytest.approx((squares / found.table["count"].sum()) ** 0.5)


def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path):
    write_dump(tmp_path, layers=2)
    dump = TensorStore(tmp_path)
    one = measure_dump(dump, workers=1)
    many = measure_dump(dump, workers=8)
    assert one.table.drop(columns="summary").equals(many.table.drop(columns="summary"))
    assert (one.histogram().counts == many.histogram().counts).all()
    assert one.histograms.keys() == many.histograms.keys()


def test_every_value_is_in_the_histogram_or_said_to_be_outside(tmp_path):
    record, shape, _ = next(records(run_id="r", quant_type="mxfp8", layers=1))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x[0, 0, 0] = 1e6  # one outlier must not squeeze the other values into one bin
    write_tensor(tmp_path, record, x)
    _, found = measured(tmp_path)
    data, note = histogram_data(found)
    drawn = data[data["group"] == "all values"]
    assert drawn["count"].sum() == x.numel() - 1
    assert drawn["right"].max() < 20
    assert "outside: 1, " in note
    assert "to 9.994e+05" in note


def test_binades_leave_out_only_what_the_note_says(tmp_path):
    record, shape, _ = next(records(run_id="r", quant_type="mxfp8", layers=1))
    x = torch.ones(shape, dtype=torch.bfloat16)
    x[0, 0, :3] = torch.tensor([0.0, -0.0, 1e-30])
    # of 8192 values, a share of 1/10,000 is less than one value, so that none is left out
    write_tensor(tmp_path, record, x)
    _, found = measured(tmp_path)
    data, note = magnitude_data(found)
    assert "zeros: 2, " in note
    assert data["count"].sum() + (1 if "smaller" in note else 0) == x.numel() - 2


def test_groups_are_types_where_there_are_several_else_operations(tmp_path):
    write_dump(tmp_path / "a", layers=1)
    _, one = measured(tmp_path)
    assert set(histogram_data(one)[0]["group"]) == {"all values", "forward", "backward"}
    write_dump(tmp_path / "b", layers=1, quant_type="FA_hifp8", run_id="r2")
    _, two = measured(tmp_path)
    assert set(histogram_data(two)[0]["group"]) == {"all values", "mxfp8", "FA_hifp8"}


def test_the_picture_has_its_panels_title_and_alarms(tmp_path):
    paths = write_dump(tmp_path, layers=2)
    payload = torch.load(paths[0], weights_only=True)
    payload["tensor"][0, 0, :2] = torch.tensor([float("nan"), float("inf")])
    torch.save(payload, paths[0])
    dump, found = measured(tmp_path)
    figure = draw_picture(dump, found, list(dump.problems))
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert [title.partition("\n")[0] for title in titles[:4]] == [
        "mxfp8 (this run)",
        "hifp8",
        "nvfp4",
        "mxfp4",
    ]
    assert titles[4:] == ["", "Operands of matmuls", "By magnitude"]  # "": the color bar
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == [
        *("qkv fprop", "qkv dgrad", "qkv wgrad"),
        *("QK fprop", "QK grad_query", "QK grad_key"),
        *("PV fprop", "PV grad_probs", "PV grad_value"),
    ]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["L0", "L1"]
    assert figure.axes[4].get_ylabel() == "SQNR of the GEMM's result (dB)"
    meshes = [ax.collections[0] for ax in figure.axes[:4]]
    assert len({(mesh.norm.vmin, mesh.norm.vmax) for mesh in meshes}) == 1
    texts = [text.get_text() for text in figure.texts]
    assert texts[0] == "mxfp8: 28 tensors, 205 K values"
    assert str(tmp_path) in texts[1]
    assert "run 20250908_095200_abc123" in texts[1]
    words = " ".join(" ".join(texts).split())
    assert (
        "Left out: GEMM results with NaN or Inf in high precision, because saved operands" in words
    )
    assert "1 NaN and 1 Inf values, not drawn" in texts
    steps = [patch for patch in figure.axes[5].patches if isinstance(patch, StepPatch)]
    assert sum(steps[0].get_data().values) == found.only("operands").summary().finite
    assert found.only("operands").summary().count + found.only("results").summary().count == (
        found.summary().count
    )


@pytest.mark.parametrize("values", [[], [float("nan")] * 3, [0.0, -0.0], [7.0], [1e-44]])
def test_dumps_with_hardly_a_value_are_drawn_too(tmp_path, values):
    record, _, _ = next(records(run_id="r", quant_type="mxfp8", layers=1))
    write_tensor(tmp_path, record, torch.tensor(values, dtype=torch.float32))
    [path] = tmp_path.glob("*.pt")
    payload = torch.load(path, weights_only=True)
    payload["metadata"] |= {"shape": [len(values)], "dtype": "float32"}
    torch.save(payload, path)
    result = quick_analysis(tmp_path, tmp_path / "draw")
    assert result.picture.stat().st_size > 10_000
    assert result.problems == []


def test_the_text_gives_nine_digits_and_a_line_a_tensor(tmp_path):
    write_dump(tmp_path, layers=2)
    result = quick_analysis(tmp_path, tmp_path / "draw")
    text = result.text.read_text()
    summary = result.measurements.summary()
    for value in (summary.mean, summary.std, summary.rms):
        assert f"{value:.9g}" in text
    lines = text.splitlines()
    tensors = lines[lines.index("Tensors") + 1 :]
    assert len(tensors) == 1 + 2 * len(LAYER)
    header, first = tensors[0].split(), tensors[1].split()
    assert len(header) == len(first)
    row = dict(zip(header, first, strict=True))
    assert (row["iteration"], row["layer_idx"], row["tensor_name"]) == ("1", "0", "input")
    assert (row["shape"], row["dtype"], row["format"]) == ("64x2x64", "bfloat16", "mxfp8")
    expected = result.measurements.table["mean"].iloc[0]
    assert row["mean"] == f"{expected:.9g}"
    # the columns are aligned
    assert len({line.rstrip().rfind(line.split()[-1]) for line in tensors}) == 1


def test_the_same_dump_is_drawn_to_the_same_bytes_and_another_one_keeps_the_first(tmp_path):
    write_dump(tmp_path / "a", layers=1)
    write_dump(tmp_path / "b", layers=2)
    first = quick_analysis(tmp_path / "a", tmp_path / "draw")
    before = first.picture.read_bytes(), first.text.read_bytes()
    again = quick_analysis(tmp_path / "a", tmp_path / "draw")
    assert again.kept == []
    assert (again.picture.read_bytes(), again.text.read_bytes()) == before
    other = quick_analysis(tmp_path / "b", tmp_path / "draw")
    assert [path.read_bytes() for path in other.kept] == list(before)
    assert len(list((tmp_path / "draw").iterdir())) == 4


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write to the output folder.*--output-dir"):
        quick_analysis(tmp_path / "missing", tmp_path / "file" / "draw")


def test_nothing_readable_is_an_error_that_names_the_files(tmp_path):
    (tmp_path / "a.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the 1 \.pt files.*\n.*a\.pt: the file is empty"):
        quick_analysis(tmp_path, tmp_path / "draw")


def test_memory_does_not_grow_with_a_group_of_tensors(tmp_path):
    write_dump(tmp_path, layers=4)
    _, found = measured(tmp_path)
    # one per layer type, operation, and operand or result; not one per tensor
    assert len(found.histograms) == 8
