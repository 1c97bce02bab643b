"""Test unusual dumps: they are drawn as far as possible, and messages say what is missing."""

from __future__ import annotations

import json
import math

import pytest
import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.text import Text

from megatron.analysis import drawing
from megatron.analysis.__main__ import main
from megatron.analysis.figures.figure_data import FigureData, NothingToDrawError
from megatron.analysis.outputs.registry import OUTPUTS, QUICK, REPORT
from megatron.analysis.plots.style import RC
from megatron.analysis.report.content import content
from megatron.analysis.stats import compute
from megatron.analysis.store import TensorStore
from tests.analysis.fake_dump import LAYER, write_dump, write_probabilities

FORMATS = ["mxfp8", "nvfp4", "hifp8"]


def change(path, metadata=None, tensor=None):
    """Replace the content of a tensor's file."""
    payload = torch.load(path, weights_only=True)
    payload["metadata"] |= metadata or {}
    payload["tensor"] = payload["tensor"] if tensor is None else tensor
    torch.save(payload, path)


@pytest.fixture
def draw(tmp_path, small_pictures):
    """Draw everything of the dump in `logs`, at a small size."""

    def of(figures=tuple(OUTPUTS)):
        output = tmp_path / "draw"
        result = drawing.draw(tmp_path / "logs", output, formats=FORMATS, figures=figures)
        assert result.failed == {}
        return result

    return of


def test_slices_are_drawn_in_formats_without_blocks(tmp_path, draw):
    for path in write_dump(tmp_path / "logs", layers=1, index=False):
        payload = torch.load(path, weights_only=True)
        shape = list(payload["tensor"].shape)
        part = payload["tensor"][:2].clone()
        cut = {"of": shape, "start": [0] * len(shape), "step": [1] * len(shape)}
        change(path, {"slice": cut, "shape": list(part.shape)}, part)
    result = draw()
    assert result.notes == {"a slice: formats with block scales are left out": len(LAYER)}
    said = (tmp_path / "draw/global_statistics/global_statistics.txt").read_text()
    assert f"{len(LAYER)} tensors: a slice" in said
    assert "heatmaps/sqnr_mxfp8" in result.missing
    assert "block_analysis/blocks" in result.missing
    made = {path.relative_to(tmp_path / "draw").as_posix() for path in result.files}
    assert {"heatmaps/sqnr_hifp8.png", "heatmaps/amax.png", "report.html"} <= made


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_values_that_no_format_takes_still_have_statistics(tmp_path, draw, dtype):
    for path in write_dump(tmp_path / "logs", layers=1, index=False):
        tensor = (8 * torch.load(path, weights_only=True)["tensor"]).to(dtype)
        change(path, {"dtype": str(dtype).removeprefix("torch.")}, tensor)
    result = draw()
    made = {path.relative_to(tmp_path / "draw").as_posix() for path in result.files}
    assert {"heatmaps/amax.png", "distributions/histogram.png", "report.html"} <= made
    assert "no tensor has values that a format" in result.missing["heatmaps/sqnr_mxfp8"]


def test_vanished_gradients_and_names_that_look_like_formulas(tmp_path, draw):
    for number, quant_type in enumerate(("bf16", "mxfp8")):
        for path in write_dump(
            tmp_path / "logs" / f"p$a^$q{quant_type}",
            quant_type=quant_type,
            run_id=f"r{number}",
            layers=1,
            index=False,
        ):
            payload = torch.load(path, weights_only=True)
            name = payload["metadata"]["module"]
            tensor = payload["tensor"]
            if "grad_" in payload["metadata"]["tensor_name"]:
                tensor = torch.zeros_like(tensor)
            change(path, {"module": f"{name}.$\\frac$"}, tensor)
    result = draw()
    assert set(result.missing) == {"overflow_analysis/special_values"}


def test_files_of_which_only_the_name_is_known(tmp_path, draw):
    paths = write_dump(tmp_path / "logs", layers=1, index=False)
    paths.append(write_probabilities(tmp_path / "logs", "mxfp8", "20250908_100000_def456"))
    for path in paths:
        torch.save(torch.load(path, weights_only=True)["tensor"], path)
    result = draw()
    assert any(path.name == "probabilities_L0.png" for path in result.files)


def test_codes_alone_have_no_values_to_draw(tmp_path, capsys):
    [path, *rest] = write_dump(tmp_path / "logs", layers=1, index=False)
    for other in rest:
        other.unlink()
    codes = {"shape": [64, 2, 64], "dtype": "bfloat16", "axis": -1, "rounding": "nearest"}
    change(path, {"tensor_name": "fprop_input_codes", "codes": codes})
    assert main(["draw", str(tmp_path / "logs"), "--output-dir", str(tmp_path / "draw")]) == 2
    assert "has codes only, and no values to draw" in capsys.readouterr().err


def test_the_quick_look_computes_no_format_and_keeps_none(tmp_path):
    write_dump(tmp_path / "logs", layers=1)
    result = drawing.draw(tmp_path / "logs", tmp_path / "draw", figures=["quick"])
    assert [path.name for path in result.files] == ["quick_analysis.png", "tensor_stats.txt"]
    assert result.tensors == len(LAYER)
    assert not (tmp_path / "logs" / ".statistics").exists()


def test_the_manifest_of_another_program_is_no_hindrance(tmp_path, draw):
    write_dump(tmp_path / "logs", layers=1)
    (tmp_path / "draw").mkdir()
    for text in ("[]", "{", json.dumps({"statistics": 5}), json.dumps({"statistics": {}})):
        (tmp_path / "draw" / ".drawn.json").write_text(text)
        assert draw(["statistics"]).kept == []


@pytest.fixture
def strange(tmp_path):
    """Write constant tensors, two without finite values, and one known by its name only."""
    first, weight, output, query, key, *_ = write_dump(tmp_path, layers=1, index=False)
    for path, value in ((first, math.nan), (weight, 0.0), (query, math.inf), (key, 1.0)):
        payload = torch.load(path, weights_only=True)
        payload["tensor"] = torch.full_like(payload["tensor"], value)
        torch.save(payload, path)
    torch.save(torch.randn(8, 8), output.with_name(output.name.replace("_0003_", "_0900_")))
    return tmp_path


def test_strange_values_make_no_figure_fail(strange, small_pictures):
    # each kind of scaling once: tensor, block with and without outer scale, group, none
    formats = ("nvfp4", "hifp8", "fp8_e4m3", "hifp4", "mxfp8:2d", "bf16")
    store = TensorStore(strange)
    figure_data = FigureData(store, compute(store, formats), formats)
    lacking = set()
    for name in OUTPUTS.keys() - {QUICK, REPORT}:
        try:
            made = dict(OUTPUTS[name].load()(figure_data))
        except NothingToDrawError:
            lacking.add(name)
            continue
        assert made
        for title, draw in made.items():
            try:
                with rc_context(RC):
                    drawn = draw()
                    assert drawn, title
                    if isinstance(drawn, Figure):
                        drawn.draw_without_rendering()  # gives ticks their texts
                        assert not [text for text in drawn.findobj(Text) if "$" in text.get_text()]
            except NothingToDrawError:
                lacking.add(f"{name}/{title}")
    assert lacking == {"comparisons"}
    found = content(figure_data)
    # the run card does not record how the run ended
    assert [caution["kind"] for caution in found["cautions"][:2]] == ["unfinished", "nan"]
    json.dumps(found, allow_nan=False)
