"""Tests of the command draw: every output, and its numbers against naive computations."""

from __future__ import annotations

import errno
import json
import math
import multiprocessing
import os
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from megatron.analysis import drawing, quick
from megatron.analysis.__main__ import main
from megatron.analysis.cli import draw_command
from megatron.analysis.figures import gradients
from megatron.analysis.figures.deviations import relative_distance
from megatron.analysis.figures.figure_data import FigureData, short_module
from megatron.analysis.outputs import render
from megatron.analysis.outputs.registry import OUTPUTS, QUICK, REPORT
from megatron.analysis.stats import compute
from megatron.analysis.store import TensorStore
from megatron.fake_quant import fake_quantize
from tests.analysis.fake_dump import FORMATS, write_dump, write_two_types

PNG = b"\x89PNG\r\n\x1a\n"
FIGURES = {
    "distributions": ["exponents", "histogram", "box"],
    "heatmaps": [
        *(f"sqnr_{name}" for name in FORMATS),
        "amax",
        "rms",
        "kurtosis",
    ],
    "comparisons": ["deviation"],
    "quantization_analysis": [
        "sqnr_by_tensor",
        "error_by_magnitude",
        "bias",
        "gain",
        "row_against_column",
    ],
    "statistics": ["scales"],
    "attention_maps": ["probabilities_L0", "head_error"],
    "hifp8_analysis": ["regions", "error_by_region", "error_by_magnitude", "code_usage"],
    "overflow_analysis": ["underflow", "saturation", "error_causes", "underflow_by_magnitude"],
    "layer_analysis": ["activations", "weights", "iterations"],
    "block_analysis": [
        *(f"scale_map_{name}" for name in FORMATS if name != "hifp8"),
        "blocks",
        "code_usage",
    ],
    "gradients": ["by_layer", "exponents", "underflow", "iterations"],
}


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write_two_types(folder)
    return folder


@pytest.fixture(scope="module")
def drawn(dump, tmp_path_factory):
    """Draw everything except the report at a low resolution; return the folder and the result."""
    output = tmp_path_factory.mktemp("draw")
    with pytest.MonkeyPatch.context() as patch:
        for module in (render, quick):
            patch.setattr(module, "DPI", 40)
        everything = [name for name in OUTPUTS if name != "report"]
        return output, drawing.draw(dump, output, formats=FORMATS, figures=everything)


@pytest.fixture(scope="module")
def figure_data(dump):
    store = TensorStore(dump)
    return FigureData(store, compute(store, FORMATS), tuple(FORMATS))


def test_the_names_for_help_are_those_of_the_outputs():
    folders = {name for name in OUTPUTS if name not in (QUICK, REPORT)}
    assert folders == {*FIGURES, "global_statistics"}
    assert all(callable(OUTPUTS[name].load()) for name in folders)
    listed = draw_command.epilog("draw").partition("figures:\n")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in listed.splitlines()] == list(OUTPUTS)


def test_every_output_is_there_and_nothing_else(drawn):
    output, result = drawn
    expected = {f"{folder}/{name}.png" for folder, names in FIGURES.items() for name in names}
    expected |= {
        "quick_analysis.png",
        "tensor_stats.txt",
        "statistics/tensors.csv",
        "statistics/formats.csv",
        "global_statistics/global_statistics.json",
        "global_statistics/global_statistics.txt",
    }
    assert (output / ".drawn.json").exists()
    found = {
        path.relative_to(output).as_posix() for path in output.rglob("[!.]*") if path.is_file()
    }
    assert found == expected
    assert {path.relative_to(output).as_posix() for path in result.files} == expected
    assert all((output / name).read_bytes()[:8] == PNG for name in found if name.endswith("png"))
    assert (result.failed, result.problems, result.tensors) == ({}, [], 114)
    assert result.missing == {"overflow_analysis/special_values": "every value is finite"}


def test_one_process_makes_the_same_bytes_as_several(dump, drawn, monkeypatch, tmp_path):
    for module in (render, quick):
        monkeypatch.setattr(module, "DPI", 40)
    some = ["quick", "gradients", "global_statistics"]
    one = drawing.draw(dump, tmp_path, formats=FORMATS, figures=some, workers=1)
    assert len(one.files) == 2 + len(FIGURES["gradients"]) + 2
    for path in one.files:
        assert path.read_bytes() == (drawn[0] / path.relative_to(tmp_path)).read_bytes()


@pytest.mark.parametrize("other", ["idle", "drawing"])
def test_a_process_that_is_killed_ends_in_words_not_in_waiting(dump, monkeypatch, tmp_path, other):
    started = multiprocessing.get_context("fork").Event()

    def killed(figure_data):
        started.wait()
        time.sleep(1 if other == "idle" else 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def quick(*_, **__):
        started.set()
        while other == "drawing":
            time.sleep(0.01)
        return SimpleNamespace(picture=tmp_path, text=tmp_path)

    def give_up():
        for process in multiprocessing.active_children():
            process.kill()

    monkeypatch.setattr(gradients, "draw", killed)
    monkeypatch.setattr(render, "quick_analysis", quick)
    watchdog = threading.Timer(240, give_up)
    watchdog.start()
    with pytest.raises(ValueError, match=r"the system ended a drawing process.*--workers 1"):
        drawing.draw(dump, tmp_path, formats=FORMATS, figures=["gradients", "quick"], workers=2)
    assert watchdog.is_alive(), "the other process did not end by itself"
    watchdog.cancel()


def test_a_figure_that_fails_takes_no_other_with_it(dump, monkeypatch, tmp_path, capsys):
    def broken(figure_data):
        yield "first", lambda: "text"
        yield "second", lambda: 1 / 0
        yield "third.txt", lambda: "text"

    monkeypatch.setattr(gradients, "draw", broken)
    options = ["--output-dir", str(tmp_path), "--figures", "gradients", "global_statistics"]
    assert main(["draw", str(dump), *options, "--formats", "mxfp8"]) == 1
    assert (tmp_path / "gradients" / "third.txt").read_text() == "text"
    assert (tmp_path / "global_statistics" / "global_statistics.txt").exists()
    errors = capsys.readouterr().err
    assert "[ERROR] gradients/second failed because of a bug in this program" in errors
    assert "ZeroDivisionError" in errors


def test_a_disk_that_takes_nothing_is_an_error_and_no_missing_figure(
    dump, monkeypatch, tmp_path, capsys
):
    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(render, "write", full)
    options = ["--output-dir", str(tmp_path), "--figures", "statistics", "gradients"]
    assert main(["draw", str(dump), *options, "--formats", "mxfp8"]) == 2
    assert "No space left on device" in capsys.readouterr().err


def test_the_global_numbers_are_those_of_the_files(dump, drawn):
    found = json.loads((drawn[0] / "global_statistics/global_statistics.json").read_text())
    store = TensorStore(dump)
    values = torch.cat([store.load(i).double().flatten() for i in range(len(store))])
    assert found["overall"]["tensors"] == len(store)
    assert found["overall"]["values"] == values.numel()
    assert found["overall"]["zeros"] == int((values == 0).sum())
    assert found["overall"]["max"] == values.max()
    assert found["overall"]["rms"] == pytest.approx(float(values.square().mean().sqrt()), rel=1e-9)
    assert found["overall"]["mean"] == pytest.approx(float(values.mean()), abs=1e-9)
    assert set(found["groups"]["quant_type"]) == {"bf16", "mxfp8"}
    text = (drawn[0] / "global_statistics/global_statistics.txt").read_text()
    assert f"values   {values.numel()}" in text


def test_a_cell_is_the_sqnr_of_its_tensor(figure_data):
    mine = figure_data.uses
    [row] = mine[
        (mine["quantized_format"] == "mxfp4")
        & (mine["place"] == "qkv input")
        & (mine["layer_idx"] == 1)
        & (mine["iteration"] == 2)
        & (mine["quant_type"] == "bf16")
    ].to_dict("records")
    x = figure_data.load(row["tensor"])
    error = fake_quantize(x, "mxfp4", axis=-1).double() - x.double()
    sqnr = 10 * math.log10(x.double().square().sum() / error.square().sum())
    assert row["sqnr_db"] == pytest.approx(sqnr, rel=1e-9)


def test_an_operand_is_quantized_as_in_its_first_gemm(figure_data):
    """Check that V has blocks along keys, for PV, and the others along the last dimension."""
    mine = figure_data.uses[figure_data.uses["quantized_format"] == "mxfp8"]
    axes = mine.groupby("place")["axis"].unique()
    assert axes["core value"].tolist() == ["column"]
    assert axes["core query"].tolist() == axes["qkv weight"].tolist() == ["row"]
    assert not mine["tensor"].duplicated().any()
    requested_order = list(dict.fromkeys(figure_data.uses["quantized_format"]))
    assert requested_order == FORMATS


def test_the_sums_are_those_of_the_tensors(figure_data):
    found = figure_data.summed("mxfp4", ["qkv input"])
    mine = figure_data.uses[
        (figure_data.uses["place"] == "qkv input")
        & (figure_data.uses["quantized_format"] == "mxfp4")
    ]
    assert found.values.sum() == (mine["count"] - mine["zeros"]).sum()
    assert found.codes.sum() == mine["count"].sum()
    squares = (mine["mse"] * mine["compared"]).sum()
    assert found.squared_error.sum() == pytest.approx(squares, rel=1e-9)


def test_places_come_forward_first_and_experts_are_one_place(figure_data):
    assert figure_data.places[:3] == ["qkv input", "qkv weight", "qkv output"]
    assert figure_data.places[-1] == "qkv grad_weight"
    assert short_module("decoder.layers.3.mlp.experts.local_experts.12.linear_fc1") == (
        "experts.fc1"
    )


def test_the_distance_of_two_runs_is_relative_to_the_one_without_quantization(figure_data):
    data = figure_data.deviations
    assert set(data["quant_type"]) == {"mxfp8"}
    assert set(data["iteration"]) == {2}  # the last iteration
    assert len(data) == 29  # the tensors of one run
    x, base = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
    assert relative_distance(x, base) == pytest.approx(1 / math.sqrt(2))
    assert relative_distance(x, torch.zeros(2)) == math.inf
    assert relative_distance(torch.zeros(2), torch.zeros(2)) == 0
    with pytest.raises(ValueError, match="shape"):
        relative_distance(x, torch.zeros(3))


def test_a_nan_in_one_run_is_an_infinite_distance():
    nan, inf = math.nan, math.inf
    base = torch.tensor([3.0, 4.0, nan])
    assert relative_distance(base.clone(), base) == 0  # NaN equals NaN
    assert relative_distance(torch.tensor([3.0, 4.5, nan]), base) == pytest.approx(0.1)
    assert relative_distance(torch.tensor([nan, 4.0, nan]), base) == inf
    assert relative_distance(torch.tensor([3.0, 4.0, 5.0]), base) == inf
    assert relative_distance(torch.tensor([inf, 4.0, nan]), base) == inf


def test_a_bad_file_is_named_the_rest_is_drawn_and_the_status_is_3(dump, tmp_path, capsys):
    folder = tmp_path / "logs"
    shutil.copytree(dump / "mxfp8", folder)
    empty, cut = sorted(folder.glob("*.pt"))[:2]
    empty.write_bytes(b"")
    cut.write_bytes(cut.read_bytes()[:500])
    (folder / "foreign.pt").write_bytes(b"no tensor")
    options = ["--output-dir", str(tmp_path / "draw"), "--figures", "global_statistics"]
    assert main(["draw", str(folder), *options]) == 3
    errors = capsys.readouterr().err
    assert all(f"[ERROR] {path}" in errors for path in (empty, cut, folder / "foreign.pt"))
    assert "[ERROR] 3 file(s) were left out" in errors
    found = json.loads((tmp_path / "draw/global_statistics/global_statistics.json").read_text())
    assert found["overall"]["tensors"] == 55
    assert len(found["left_out"]) == 3
    assert main(["draw", str(folder), *options, "--strict"]) == 3
    assert "[ERROR]" in capsys.readouterr().err


def test_what_a_dump_lacks_is_said(tmp_path, capsys):
    write_dump(tmp_path / "logs", layers=1)
    names = ["comparisons", "hifp8_analysis", "block_analysis"]
    options = ["--output-dir", str(tmp_path / "draw"), "--formats", "fp8_e4m3", "--figures", *names]
    assert main(["draw", str(tmp_path / "logs"), *options]) == 0
    said = capsys.readouterr().out
    assert "no comparisons: there is only one quantization type (mxfp8)" in said
    assert "no hifp8_analysis: hifp8 is not among the formats" in said
    assert "no block_analysis: none of the formats has blocks" in said
    assert not list((tmp_path / "draw").rglob("*.png"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--formats", "mxfp9"], "unknown format 'mxfp9'"),
        (["--figures", "pie"], "invalid choice: 'pie'"),
        (["--workers", "0"], "--workers is 0; give 1 or more"),
        (["--run", "none_such"], "no run 'none_such'"),
    ],
)
def test_wrong_options(dump, tmp_path, capsys, options, message):
    try:
        status = main(["draw", str(dump), "--output-dir", str(tmp_path), *options])
    except SystemExit as error:
        status = error.code
    assert status == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.p*"))


def test_a_folder_without_tensors(tmp_path, capsys):
    assert main(["report", str(tmp_path), "--output-dir", str(tmp_path / "draw")]) == 2
    assert "[ERROR]" in capsys.readouterr().err


@pytest.mark.parametrize(("image", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_other_images(dump, tmp_path, image, start):
    options = ["--output-dir", str(tmp_path), "--figures", "statistics", "--image", image]
    assert main(["draw", str(dump), *options]) == 0
    assert (tmp_path / "statistics" / f"scales.{image}").read_bytes().startswith(start)


def test_the_tables_are_written_as_they_are(drawn, figure_data):
    found = pd.read_csv(drawn[0] / "statistics" / "formats.csv")
    assert len(found) == len(figure_data.statistics.formats)
    np.testing.assert_allclose(found["mse"], figure_data.statistics.formats["mse"], rtol=1e-12)
