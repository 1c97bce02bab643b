"""Tests of judged tensors, of recomputed tensors, and of how runs ended."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch

from megatron.analysis.__main__ import main
from megatron.analysis.diagnostics import diagnose, find_diagnostics
from megatron.analysis.dump.run_endings import NO_END, ending
from megatron.analysis.figures import (
    attention_maps,
    block_analysis,
    heatmaps,
    quantization_analysis,
)
from megatron.analysis.figures.figure_data import FigureData, NothingToDrawError, median_of
from megatron.analysis.plots.block_map import scale_ticks
from megatron.analysis.quick import draw_picture, quick_analysis
from megatron.analysis.report.content import content
from megatron.analysis.stats import compute
from megatron.analysis.stats.export import summary
from megatron.analysis.stats.matrix_view import is_operand
from megatron.analysis.stats.measure import measure_dump
from megatron.analysis.store import TensorStore
from megatron.analysis.verification.verify import Verification
from megatron.tensor_record import run_card_name
from tests.analysis.fake_dump import (
    FORMATS,
    LAYER,
    RUNS,
    records,
    values,
    write_dump,
    write_tensor,
    write_two_types,
)

OPERANDS = {
    "qkv input",
    "qkv weight",
    "qkv grad_output",
    "core query",
    "core key",
    "core value",
    "core grad_output",
    "core attention_probs",
}
RESULTS = {
    "qkv output",
    "qkv grad_input",
    "qkv grad_weight",
    "core output",
    "core grad_query",
    "core grad_key",
    "core grad_value",
}


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    write_two_types(folder)
    return folder


def figure_data_of(folder, judge="operands", formats=FORMATS):
    store = TensorStore(folder)
    return FigureData(store, compute(store, formats), tuple(formats), judge=judge)


@pytest.fixture(scope="module")
def figure_data(dump):
    return figure_data_of(dump)


def note_of(figure):
    """Return the lines below the title of a figure."""
    return [text.get_text() for text in figure.texts]


def test_every_tensor_of_a_layer_is_an_operand_or_a_result(figure_data):
    places = figure_data.tensors.groupby("place")["operand"].first()
    assert set(places.index[places]) == OPERANDS
    assert set(places.index[~places]) == RESULTS
    assert is_operand(None, None)  # tensors of a foreign dump count as operands
    assert is_operand("linear", "no such name")


def test_formats_are_judged_by_operands_and_by_results_on_request(figure_data, dump):
    assert set(figure_data.judged["place"]) == OPERANDS == set(figure_data.judged_places())
    assert (
        len(figure_data.judged) == 4 * 58
    )  # 4 formats, 2 runs x 2 iterations x 2 layers x 7 operands, and probabilities
    results = figure_data_of(dump, "results")
    assert set(results.judged["place"]) == RESULTS
    assert set(figure_data.uses["place"]) == OPERANDS | RESULTS
    both = [figure_data.summed("mxfp4"), results.summed("mxfp4")]
    assert (
        sum(part.values.sum() for part in both)
        == (figure_data.tensors["finite"] - figure_data.tensors["zeros"]).sum()
    )


def test_a_heat_map_has_a_column_for_each_operand_and_says_what_a_cell_is(figure_data):
    figure = heatmaps.layer_by_tensor_sqnr(figure_data, "hifp8", heatmaps.sqnr_norm(figure_data))
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert set(labels) == OPERANDS
    text = " ".join(note_of(figure))
    assert "a cell is the median of 1 to 4 tensors" in text or "median of 2 to 4 tensors" in text
    assert "58 operands of matmuls of bf16, mxfp8, 2 iterations" in text
    assert "114" not in text
    figure = heatmaps.layer_by_tensor_value(figure_data, "rms", "Root mean square", "rms")
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert set(labels) == OPERANDS | {f"{place} (result)" for place in RESULTS}
    assert all("(result)" in label for label in labels[len(OPERANDS) :])


def test_the_count_behind_a_median_is_that_of_its_group(figure_data):
    mine = figure_data.judged[figure_data.judged["quantized_format"] == "mxfp8"]
    linear = mine[mine["layer_type"] == "linear"]
    assert median_of(linear, ["layer_idx", "place"], "cell") == (
        "a cell is the median of 4 tensors"
    )
    assert median_of(mine.head(1), ["place"], "dot") == "a dot is one tensor"
    assert median_of(mine.head(0), ["place"], "dot") == "a dot is one tensor"


def test_warnings_and_worst_lists_are_of_operands(figure_data):
    worst = content(figure_data)["worst"]
    for rows in worst.values():
        assert rows
        assert set(figure_data.tensors.loc[[row[0] for row in rows], "place"]) <= OPERANDS
    all_of_them = find_diagnostics(figure_data.uses, figure_data.tensors)
    judged = diagnose(figure_data)
    kinds = ("underflow", "clipping", "overflow", "low_sqnr", "bias", "gain", "outliers")
    assert any(caution.kind in kinds for caution in judged)
    for caution in judged:
        if caution.kind in kinds:
            assert set(figure_data.tensors.loc[list(caution.tensors), "place"]) <= OPERANDS
    assert sum(len(c.tensors) for c in judged) < sum(len(c.tensors) for c in all_of_them) + 2


def test_the_summary_shows_results_apart(figure_data):
    text = summary(figure_data.statistics)
    operands, results = text.split("Results of matmuls, which are never quantized")
    assert "Operands of matmuls" in operands
    counts = [int(re.search(r"hifp8 +all +(\d+)", part)[1]) for part in (operands, results)]
    assert counts == [58, 56]
    worst = [line for line in text.splitlines() if line.endswith(".pt")]
    names = [re.search(r"(?:FA|linear)_(?:bf16|mxfp8)_(\w+)\.pt", line)[1] for line in worst]
    assert {name for name in names} <= {place.split()[1] for place in OPERANDS}


def test_a_dump_of_results_only_says_how_to_draw_them(tmp_path):
    record, shape, scale = next(
        x
        for x in records(run_id="r", quant_type="bf16", layers=1)
        if x[0].tensor_name == "grad_input"
    )
    write_tensor(tmp_path, record, values(shape, scale, torch.Generator().manual_seed(0)))
    figure_data = figure_data_of(tmp_path, formats=["mxfp8"])
    with pytest.raises(NothingToDrawError, match="no operands of matmuls; --judge results"):
        quantization_analysis.error_by_magnitude(figure_data)
    of_results = figure_data_of(tmp_path, "results", ["mxfp8"])
    assert quantization_analysis.error_by_magnitude(of_results).axes
    assert "Results of matmuls" in summary(figure_data.statistics)
    assert quick_analysis(tmp_path, tmp_path / "draw").picture.exists()


def test_the_command_judges_results_on_request(dump, tmp_path):
    options = ["--figures", "global_statistics", "--formats", "hifp8", "--output-dir"]
    counts = {}
    for judge in ("operands", "results"):
        folder = tmp_path / judge
        assert main(["draw", str(dump), *options, str(folder), "--judge", judge]) == 0
        path = folder / "global_statistics" / "global_statistics.json"
        found = json.loads(path.read_text())
        counts[judge] = found["formats"]["hifp8"]["tensors"]
        assert f"{judge} of matmuls" in found["judged"]
    assert counts == {"operands": 58, "results": 56}


def recompute(folder):
    """Write the attention inputs of a run again, as recomputation does."""
    generator = torch.Generator().manual_seed(7)
    added = []
    for record, shape, scale in records(run_id=RUNS["mxfp8"], quant_type="mxfp8", layers=2):
        if record.layer_type == "attention" and record.operation == "forward":
            again = dataclasses.replace(
                record, recomputed=True, counter=record.counter + 100, wall_time=2e9
            )
            added.append(write_tensor(folder, again, values(shape, scale, generator)))
    return added


def test_a_recomputed_tensor_counts_once_and_the_dump_says_so(tmp_path, capsys):
    folder = tmp_path / "dump"
    write_dump(folder, run_id=RUNS["mxfp8"], layers=2)
    before, measured = compute(TensorStore(folder), ["mxfp8"]), measure_dump(TensorStore(folder))
    added = recompute(folder)
    store = TensorStore(folder)
    assert len(store) == 2 * len(LAYER) + len(added) == 28 + 8
    found, again = compute(store, ["mxfp8"]), measure_dump(store)
    assert (before.repeats, found.repeats, again.repeats) == (0, 8, 8)
    assert found.tensors["path"].tolist() == before.tensors["path"].tolist()
    assert found.formats.equals(before.formats)
    assert again.table["path"].tolist() == measured.table["path"].tolist()
    words = "8 tensors: saved again by activation recomputation; skipped, because"
    assert words in summary(found)
    assert words in quick_analysis(folder, tmp_path / "quick").text.read_text()
    assert (
        main(
            ["draw", str(folder), "--figures", "statistics", "--output-dir", str(tmp_path / "draw")]
        )
        == 0
    )
    assert words in capsys.readouterr().out
    assert words in content(FigureData(store, found, ("mxfp8",)))["repeats"]


def test_a_recomputed_tensor_whose_first_pass_is_missing_counts(tmp_path):
    write_dump(tmp_path, run_id=RUNS["mxfp8"], layers=2)
    added = recompute(tmp_path)
    store = TensorStore(tmp_path)
    alone = compute(store, select=store.select(recomputed=True))
    assert (len(alone.tensors), alone.repeats) == (len(added), 0)


def test_verify_checks_both_passes(dumps):
    store = TensorStore(dumps / "mxfp8")
    recomputed = store.select(recomputed=True)
    # the backward tensors of a recomputed pass are saved only once
    repeated = int((recomputed["operation"] == "forward").sum())
    assert 0 < repeated < len(recomputed)
    assert compute(store).repeats == repeated
    verdict = Verification(store).run()
    assert not verdict.errors
    assert verdict.checked["files"] == len(store)


@pytest.mark.parametrize(
    ("card", "words"),
    [
        ({"status": "finished"}, "finished"),
        ({"status": "running"}, "no end in its run card: the run was killed or is in progress"),
        ({"seed": 1}, "no end in its run card: the run was killed or is in progress"),
        ({"status": "limited", "limit": "1 GiB is reached"}, "ended by a limit: 1 GiB is reached"),
        ({"status": "failed", "error": "No space left"}, "failed: No space left"),
        ({"status": "aborted", "reason": "ValueError: x"}, "training was aborted: ValueError: x"),
        ({"status": ["a"]}, "status ['a']"),
        ({}, "end unknown: there is no run card"),
    ],
)
def test_how_a_run_ended_in_words(card, words):
    assert ending(card) == words


def test_everything_that_is_drawn_says_that_a_run_was_killed(tmp_path, capsys):
    folder = tmp_path / "dump"
    write_two_types(folder)
    for quant_type, status in (("bf16", "finished"), ("mxfp8", "running")):
        path = folder / quant_type / run_card_name(RUNS[quant_type])
        path.write_text(json.dumps(json.loads(path.read_text()) | {"status": status}))
    words = f"run {RUNS['mxfp8']} (mxfp8): {NO_END}"
    figure_data = figure_data_of(folder, formats=["mxfp8", "hifp8"])
    for figure in (
        quantization_analysis.error_by_magnitude(figure_data),
        heatmaps.layer_by_tensor_value(figure_data, "rms", "rms", "rms"),
        block_analysis.code_usage(figure_data),
        dict(attention_maps.draw(figure_data))["head_error"](),
        draw_picture(figure_data.store, measure_dump(figure_data.store), []),
    ):
        assert words in " ".join(note_of(figure))
    page = content(figure_data)
    assert page["alarm"] == words
    assert page["cautions"][0]["text"] == words
    assert [run["ending"] for run in page["runs"]] == ["finished", ending({"status": "running"})]
    quick = quick_analysis(folder, tmp_path / "quick")
    assert "no end in its run card" in quick.text.read_text()
    for command in (["quick"], ["draw", "--figures", "global_statistics"], ["stats"]):
        where = [] if command == ["stats"] else ["--output-dir", str(tmp_path / command[0])]
        assert main([command[0], str(folder), *command[1:], *where]) == 0
        said = capsys.readouterr()
        assert f"[NOTE] run {RUNS['mxfp8']}: no end in its run card" in said.out + said.err


def test_a_finished_run_has_no_alarm(tmp_path):
    write_dump(tmp_path, run_id=RUNS["mxfp8"], layers=1)
    path = tmp_path / run_card_name(RUNS["mxfp8"])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"status": "finished"}))
    figure_data = figure_data_of(tmp_path, formats=["mxfp8"])
    assert figure_data.alarm == ""
    assert content(figure_data)["cautions"] == [
        caution for caution in content(figure_data)["cautions"] if caution["kind"] != "unfinished"
    ]


def test_attention_figures_say_whose_they_are(figure_data):
    figures = dict(attention_maps.draw(figure_data))
    for name in ("probabilities_L0", "head_error"):
        text = " ".join(note_of(figures[name]()))
        assert f"mxfp8 run {RUNS['mxfp8']} (the newest), iteration 2 (its last)" in text


def test_the_color_bar_of_nvfp4_names_scales_by_their_values(figure_data):
    figure = block_analysis.scale_maps(figure_data, "nvfp4")
    figure.canvas.draw()
    bars = [ax for ax in figure.axes if ax.get_label() == "<colorbar>"]
    assert bars
    for bar in bars:
        labels = [label.get_text() for label in bar.get_yticklabels()]
        assert len(set(labels)) == len(labels)
        for label in labels:  # the values of E4M3 scales
            number = torch.tensor(float(label))
            assert torch.isclose(number.to(torch.float8_e4m3fn).float(), number, rtol=1e-2)
    assert scale_ticks(torch.tensor([float("nan")]).numpy()) == []
