"""Test the study command: its files, interrupted studies, and damaged dumps."""

from __future__ import annotations

import json
import math
import re

import pandas as pd
import pytest
import torch

from megatron.analysis.__main__ import main
from megatron.analysis.store import TensorStore
from megatron.analysis.study import candidates_of, engine, study
from megatron.analysis.study.engine import COLUMNS
from megatron.analysis.study.kept_results import NAME
from megatron.analysis.study.pictures import points_of
from megatron.analysis.study.proposal import places_of, propose
from megatron.fake_quant.recipe import load_recipe
from tests.analysis.study import small_dump
from tests.subprocesses import REPO

PAGE = (REPO / "docs" / "study.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    return small_dump.write(tmp_path / "bf16", layers=2)


def run(folder, *options):
    return main(["study", str(folder), "--output-dir", str(folder.parent / "out"), *options])


def test_it_writes_tables_verdict_pictures_and_recipe(folder, capsys):
    recipe = folder.parent / "mine.yaml"
    recipe.write_text(
        "matchers:\n  all: {config: linear_mxfp4, type: glob, pattern: '*', layers: '0', "
        "enabled: true}\nconfigs: {}\n"
    )
    formats = ("--formats", "mxfp8", "mxfp4", "--recipes", str(recipe), "--bits", "6")
    assert run(folder, *formats) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("The median SQNR of 18 GEMM results in 2 layers is ")
    assert "Within 6 bits per value, recipe.yaml takes" in lines[2]
    out = folder.parent / "out"
    table = pd.read_parquet(out / "study.parquet")
    assert tuple(table.columns[: len(COLUMNS)]) == COLUMNS
    assert len(table) == 2 * 9 * 3, "layers, GEMMs and candidates"
    csv = pd.read_csv(out / "study.csv")
    assert table["accumulator"].isna().all()
    both = (frame.drop(columns="accumulator") for frame in (csv, table))
    pd.testing.assert_frame_equal(*both, check_dtype=False, rtol=1e-9)
    assert set(table["gemm"]) == {name for names in small_dump.GEMMS.values() for name in names}
    mine = table[table["recipe"] == "mine"]
    assert set(mine.loc[mine["layer_idx"] == 1, "format"]) == {"none"}
    same = table[(table["layer_idx"] == 0) & (table["operation"] == "linear")]
    values = same.pivot_table(
        index="gemm", columns=same["recipe"].isna(), values="sqnr_db", aggfunc="min"
    )
    assert (values[True] == values[False]).all(), "a recipe of one format is that format"
    assert load_recipe(out / "recipe.yaml").rules
    for name in ("study.png", "budget.png", "study.html", "budget.parquet", "budget.csv"):
        assert (out / name).stat().st_size > 1000
    assert lines[3].startswith("By the gradient rule (a gradient's rms below √3 times that of its ")
    gradients = pd.read_parquet(out / "gradients.parquet")
    assert len(gradients) == 2 * 6 * 3, "layers, backward GEMMs and candidates"
    assert len(pd.read_csv(out / "gradients.csv")) == len(gradients)
    assert "Gradients against quantization noise" in (out / "study.html").read_text("utf-8")


def test_an_interrupted_study_continues(folder, monkeypatch):
    kept = folder.parent / "kept"
    kept.mkdir()
    store, both = TensorStore(folder), candidates_of(["mxfp8", "mxfp4"], [])
    whole = study(store, both, workers=1)
    calls = []

    def interrupting(matmul, candidates, settings):
        calls.append(matmul.operation)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(matmul, candidates, settings)

    original = engine.errors_of
    monkeypatch.setattr(engine, "errors_of", interrupting)
    with pytest.raises(KeyboardInterrupt):
        study(store, both, workers=1, folder=kept)
    with (kept / NAME).open("a") as file:
        file.write('{"key": "torn')
    finished, calls[2:] = len(calls) - 1, [""] * 2
    again = study(store, both, workers=1, folder=kept)
    assert 0 < finished < 6
    pd.testing.assert_frame_equal(again.rows, whole.rows)
    calls.clear()
    pd.testing.assert_frame_equal(study(store, both, folder=kept).budgets, whole.budgets)
    assert calls == [], "nothing is computed twice"


def test_a_damaged_file_is_named_and_the_rest_is_studied(folder, capsys):
    [damaged] = folder.glob("*_L1_*linear_bf16_weight.pt")
    damaged.write_bytes(b"not a tensor")
    assert run(folder, "--formats", "mxfp4", "--no-budget") == 3
    said = capsys.readouterr().err
    assert damaged.name in said
    assert "passes with a file that cannot be read" in said
    table = pd.read_parquet(folder.parent / "out" / "study.parquet")
    assert set(table.loc[table["layer_idx"] == 1, "operation"]) == {"qk", "pv"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--formats", "mxfp9"), "mxfp9"),
        (("--draws", "1"), "--draws is 1; give 2 or more"),
        (("--bits", "0"), "--bits is 0; give a number above 0"),
        (("--workers", "0"), "--workers is 0; give 1 or more"),
        (("--select", "tensor_name=output"), "no operands of a matmul"),
    ],
)
def test_wrong_options_are_explained(folder, capsys, options, message):
    assert run(folder, *options) == 2
    assert message in capsys.readouterr().err


RECIPE = (
    "configs: {}\nmatchers:\n"
    "  all: {config: linear_mxfp4, type: glob, pattern: '*', enabled: true}\n"
)


def test_results_of_a_renamed_recipe_have_its_new_name(folder):
    store, kept = TensorStore(folder), folder.parent / "kept"
    kept.mkdir()
    first, second = folder.parent / "a.yaml", folder.parent / "b.yaml"
    for path in (first, second):
        path.write_text(RECIPE)
        named = study(store, candidates_of([], [path]), folder=kept, budget=False).rows["recipe"]
        assert set(named) == {path.stem}


def test_a_second_call_says_again_what_is_left_out(folder):
    store, kept = TensorStore(folder), folder.parent / "kept"
    kept.mkdir()
    recipes = [folder.parent / "one.yaml", folder.parent / "two.yaml"]
    for path in recipes:
        path.write_text((REPO / "examples/recipes/fa_tiles.yaml").read_text())
    results = [study(store, candidates_of([], recipes), folder=kept, budget=False) for _ in "12"]
    assert results[0].left_out == results[1].left_out
    assert sorted(results[0].left_out) == [
        f"passes whose PV {name} computes in tiles" for name in ("one", "two")
    ]


def test_a_dump_of_zeros_has_no_errors(folder, capsys):
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=True)
        torch.save(content | {"tensor": torch.zeros_like(content["tensor"])}, path)
    options = ("--formats", "mxfp8", "mxfp4", "--accumulators", "blackwell_mx")
    assert run(folder, *options) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("All results are zero, NaN or Inf in high precision")
    assert "blackwell_mx with mxfp8: all results are zero" in printed.out
    zero = "GEMM results that are zero in high precision, which have no relative error: 18"
    assert zero in printed.err
    assert not (folder.parent / "out/study.png").exists()


def test_matmuls_beyond_the_memory_are_left_out(folder, capsys):
    assert run(folder, "--formats", "mxfp4", "--max-memory", "1M", "--no-budget") == 0
    assert "need more than 1 MiB of memory (--max-memory)" in capsys.readouterr().err


def page_commands() -> list[list[str]]:
    """Return the words of each study command on the page."""
    lines = re.findall(r"^python -m megatron.analysis (study .*)$", PAGE, re.M)
    return [line.split() for line in lines]


def test_the_commands_of_the_page_run(folder, monkeypatch, capsys):
    (folder.parent / "enhanced_tensor_logs").mkdir()
    folder.rename(folder.parent / "enhanced_tensor_logs" / "bf16")
    monkeypatch.chdir(folder.parent)
    (folder.parent / "examples").symlink_to(REPO / "examples")
    assert len(page_commands()) == 3
    for words in page_commands():
        assert main(words) == 0, words
    said = capsys.readouterr().out
    assert "Within 5.5 bits per value" in said
    assert "nvfp4_pretraining" in said


def test_the_page_explains_every_column(folder):
    result = study(TensorStore(folder), candidates_of(["mxfp4"], []))
    explained = set(re.findall(r"`(\w+)`", PAGE))
    own = {"operand", "interaction", "together", "others", "alone"}
    assert set(result.rows) <= explained
    assert set(result.budgets) - set(result.rows) == own
    assert own - {"operand"} <= explained


def remove(folder, name, layer):
    for path in folder.glob(f"*_L{layer}_*_{name}.pt"):
        path.unlink()
    for index in folder.glob("index_*.jsonl"):
        lines = index.read_text().splitlines(keepends=True)
        index.write_text(
            "".join(line for line in lines if (folder / json.loads(line)["file"]).exists())
        )


def test_a_missing_gradient_changes_no_bits_and_is_counted(folder, capsys):
    """A recipe quantizes all three GEMMs, so its bits are those of all three."""
    options = ("--formats", "mxfp8", "mxfp4", "--bits", "6", "--select", "layer_type=linear")
    assert run(folder, *options) == 0
    complete = pd.read_parquet(folder.parent / "out" / "study.parquet")
    capsys.readouterr()
    remove(folder, "grad_output", 1)
    assert run(folder, *options) == 0
    told = capsys.readouterr()
    assert "left out: gradients of passes without grad_output: 1" in told.err
    assert "1 of them is judged by fprop alone" in told.out
    table = pd.read_parquet(folder.parent / "out" / "study.parquet")
    assert list(table[table["layer_idx"] == 1]["gemm"].unique()) == ["fprop"]
    columns = ["layer_idx", "format", "matmul_bits", "matmul_values"]
    both = (
        each[each["gemm"] == "fprop"][columns].reset_index(drop=True) for each in (table, complete)
    )
    pd.testing.assert_frame_equal(*both)
    result = study(TensorStore(folder), candidates_of(["mxfp8", "mxfp4"], []), budget=False)
    proposal = propose(places_of(result.rows), 6)
    point = points_of(result, proposal).set_index("candidate").loc["recipe.yaml"]
    assert point["bits"] == pytest.approx(proposal.bits)
    of_gemms = complete.groupby(["layer_idx", "format"], sort=False)
    assert (of_gemms["values"].sum() == of_gemms["matmul_values"].first()).all()


@pytest.mark.parametrize("name", ["bf16", "mxfp4", "None"])
def test_a_recipe_with_the_name_of_a_format_is_refused(folder, capsys, name):
    recipe = folder.parent / f"{name}.yaml"
    rule = "{config: mxfp4, type: glob, pattern: '*', enabled: true}"
    recipe.write_text(f"configs: {{}}\nmatchers:\n  all: {rule}\n")
    assert run(folder, "--formats", "mxfp8", "--recipes", str(recipe)) == 2
    assert f"{name}.yaml has the name of a format; rename the file" in capsys.readouterr().err
    assert not (folder.parent / "out").exists()


def test_a_recipe_that_quantizes_nothing_is_called_that(folder, capsys):
    recipe = folder.parent / "mine.yaml"
    rule = "{config: mxfp4, type: glob, pattern: '*', iterations: 100-, enabled: true}"
    recipe.write_text(f"configs: {{}}\nmatchers:\n  all: {rule}\n")
    assert run(folder, "--formats", "mxfp4", "bf16", "--recipes", str(recipe), "--no-budget") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "dB in bf16 (not quantized)" in first
    assert "dB in mine (which quantizes none of them)" in first


def test_a_given_recipe_is_not_replaced(folder, capsys):
    assert run(folder, "--formats", "mxfp4", "mxfp8", "--bits", "6") == 0
    recipe = folder.parent / "out" / "recipe.yaml"
    before = recipe.read_text()
    options = ("--formats", "mxfp4", "mxfp8", "--bits", "5", "--recipes", str(recipe))
    assert run(folder, *options) == 2
    assert "--bits would replace" in capsys.readouterr().err
    assert recipe.read_text() == before
    assert run(folder, "--formats", "mxfp4", "mxfp8", "--bits", "5") == 0
    assert before in [path.read_text() for path in recipe.parent.glob("recipe_*.yaml")]


def test_only_the_recipe_of_an_earlier_study_stays(folder, capsys):
    out = folder.parent / "out"
    assert run(folder, "--formats", "mxfp4", "mxfp8", "--bits", "6") == 0
    before, recipe = {path.name for path in out.iterdir()}, (out / "recipe.yaml").read_text()
    assert run(folder, "--formats", "mxfp4", "--no-budget", "--select", "operation=forward") == 0
    assert f"[NOTE] {out} also holds recipe.yaml from an earlier study" in capsys.readouterr().err
    assert (out / "recipe.yaml").read_text() == recipe
    gone = {"budget.parquet", "budget.csv", "budget.png", "gradients.parquet", "gradients.csv"}
    assert before - {path.name for path in out.iterdir()} == gone


def test_results_of_saved_operands_with_nan_say_nothing_about_a_format(folder, capsys):
    path = min(folder.glob("*_L1_*_weight.pt"))
    content = torch.load(path, weights_only=True)
    content["tensor"][3, 5] = math.nan
    torch.save(content, path)
    assert run(folder, "--formats", "mxfp4", "mxfp8") == 0
    told = capsys.readouterr()
    assert "left out: GEMM results with NaN or Inf in high precision" in told.err
    assert "have them: 2\n" in told.err, "fprop and dgrad"
    assert "not finite" not in told.out
    assert "no format can be recommended" not in told.out
    table = pd.read_parquet(folder.parent / "out" / "study.parquet")
    assert (table["reference_nonfinite"] > 0).sum() == 2 * 2, "results and candidates"
    budget = pd.read_parquet(folder.parent / "out" / "budget.parquet")
    assert budget["together"].isna().sum() == 2 * 2 * 2


def test_operands_that_are_not_quantized_have_the_bits_of_their_dtype(tmp_path):
    folder = tmp_path / "fp32"
    small_dump.write(folder, layers=1)
    for path in folder.glob("*.pt"):
        content = torch.load(path, weights_only=True)
        content["tensor"] = content["tensor"].float()
        content["metadata"]["dtype"] = "float32"
        torch.save(content, path)
    rows = study(TensorStore(folder), candidates_of(["bf16", "fp16"], []), budget=False).rows
    assert rows.groupby("format")["bits"].unique().map(list).to_dict() == {
        "bf16": [32],
        "fp16": [16],
    }


def test_scales_of_rows_count(folder):
    """A row of the reduction axis has one float32 scale; nf4 has one per 64 values."""
    rows = study(TensorStore(folder), candidates_of(["fp8_rowwise"], []), budget=False).rows
    of_layer = rows[rows["layer_idx"] == 0].set_index(["operation", "gemm"])["bits"]
    for operation, (a, b, _, _) in small_dump.operands(folder).items():
        (m, k), n = a.shape[-2:], b.shape[-2]
        for gemm, length in zip(small_dump.GEMMS[operation], (k, n, m), strict=True):
            assert of_layer[operation, gemm] == pytest.approx(8 + 32 / length)


def test_missing_files_and_several_runs_are_said(folder, capsys):
    small_dump.write_dump(folder, quant_type="mxfp8", run_id="20260101_000000_0000aa", layers=2)
    min(folder.glob("*_L1_*_weight.pt")).unlink()
    assert run(folder, "--formats", "mxfp4", "--no-budget") == 0
    told = capsys.readouterr().err
    assert "left out: files that an index lists but that do not exist: 1\n" in told
    assert f"[NOTE] {folder} has 2 runs, and the verdict averages over them; " in told
    assert run(folder, "--formats", "mxfp4", "--no-budget", "--run", "latest") == 0
    assert "averages over" not in capsys.readouterr().err
