"""Test `python -m megatron.analysis diff` on small dumps with planted faults."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from megatron.analysis.__main__ import main
from megatron.analysis.diff import text
from megatron.analysis.diff.comparison import Rules
from megatron.analysis.diff.growth import growth_figure
from megatron.analysis.diff.run import open_run, prepare
from megatron.analysis.diff.summary import Summary
from tests.analysis.diff.faults import add_to_first, diff, path_of, plant
from tests.analysis.fake_dump import write_dump
from tests.analysis.verification.verifying import change_card, rewrite
from tests.subprocesses import REPO

OTHER = "20250909_000000_fed987"  #: id of the second run
QKV = "self_attention.linear_qkv"
PAGE = (REPO / "docs" / "diff.md").read_text(encoding="utf-8")
COMMANDS = dict.fromkeys(re.findall(r"^python -m megatron.analysis (diff .*)$", PAGE, re.M))


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Two equal runs, and one with a different quantization type, each in its own folder."""
    folder = tmp_path_factory.mktemp("originals")
    write_dump(folder / "before", quant_type="bf16", iterations=2, layers=2)
    write_dump(folder / "after", quant_type="bf16", run_id=OTHER, iterations=2, layers=2)
    write_dump(folder / "mxfp8", quant_type="mxfp8", run_id=OTHER, iterations=2, layers=2)
    return folder


@pytest.fixture
def runs(originals, tmp_path):
    """Return the folders of two equal runs, the second of which may be damaged."""
    return originals / "before", shutil.copytree(originals / "after", tmp_path / "after")


def test_equal_runs_agree(runs, capsys):
    status, lines = diff(capsys, *runs)
    assert status == 0
    assert lines[0] == ("No difference: 56 pairs of tensors agree: 56 identical in every bit")


def test_a_fault_in_one_weight_is_named_first(runs, capsys):
    a, b = runs
    path = path_of(b, iteration=1, layer=1, tensor_name="weight")
    before = torch.load(path, weights_only=True)["tensor"][0, 0].item()
    plant(path, add_to_first(0.5))
    plant(path_of(b, iteration=2, layer=0, module=QKV, tensor_name="input"), add_to_first(1))
    status, lines = diff(capsys, a, b)
    assert status == 1
    assert lines[0].startswith(
        f"First difference: iteration 1, forward, decoder.layers.1.{QKV} weight: "
        "1 of 6144 values differ, by up to "
    )
    assert f"at [0, 0] {before:.9g} in A" in lines[0]
    [counts] = [line for line in lines if "pairs of tensors:" in line]
    assert "54 identical, 0 equal, 0 close, 2 different" in counts


def test_a_fault_on_one_rank_is_named_first(tmp_path, capsys):
    for name in "ab":
        write_dump(tmp_path / name, layers=1, world_size=2)
    plant(path_of(tmp_path / "b", rank=1, tensor_name="key"), add_to_first(1))
    status, lines = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "core_attention key, rank 1: 1 of 4096 values differ" in lines[0]


def test_additional_replicas_are_compared_with_the_first(tmp_path, capsys):
    write_dump(tmp_path / "a", layers=1)
    write_dump(tmp_path / "b", layers=1, world_size=2)
    first = path_of(tmp_path / "a", tensor_name="key")
    shutil.copy(first, path_of(tmp_path / "b", tensor_name="key", rank=1))
    status, lines = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "rank 0 of A, rank 1 of B" in lines[0], "ranks of fake dumps have different values"
    assert not any("core_attention key, rank" in line for line in lines)


def test_tolerances(runs, capsys):
    a, b = runs
    plant(
        path_of(b, iteration=1, layer=0, module=QKV, tensor_name="output"), lambda x: x.mul_(1.01)
    )
    for options, status in (
        (("--max-relative-error", "0.02"), 0),
        (("--max-relative-error", "0.001"), 1),
        (("--max-relative-error", "linear_qkv.output=0.02"), 0),
        (("--max-relative-error", "0.02", "--max-relative-error", "out*=0"), 1),
        (("--rtol", "0.02"), 0),
        (("--rtol", "0.001"), 1),
        (("--rtol", "0.001", "--atol", "1"), 0),
    ):
        found, lines = diff(capsys, a, b, *options)
        assert found == status, options
        assert lines[0].startswith(
            ("No difference: 56 pairs", "First difference: iteration 1")[status]
        )


def test_signs_of_zeros_matter_only_bit_for_bit(runs, capsys):
    a, b = runs
    for folder, zero in ((b, -0.0), (shutil.copytree(a, b.parent / "before"), 0.0)):
        plant(
            path_of(folder, iteration=1, layer=0, tensor_name="value"),
            lambda x, zero=zero: x.fill_(zero),
        )
    assert diff(capsys, b.parent / "before", b)[0] == 0
    status, lines = diff(capsys, b.parent / "before", b, "--bitwise")
    assert status == 1
    assert "core_attention value: equal in value (but not in" in lines[0]


def test_nan_differs_from_a_number(runs, capsys):
    a, b = runs
    plant(path_of(b, iteration=2, layer=0, tensor_name="query"), add_to_first(torch.nan))
    status, lines = diff(capsys, a, b, "--max-relative-error", "1e9", "--atol", "1e9")
    assert status == 1
    assert "1 of them NaN or Inf in one run only (at [0, 0, 0, 0]" in lines[0]


def test_records_of_only_one_run(runs, capsys):
    a, b = runs
    rewrite(
        b, lambda line: None if line["iteration"] == 2 and line["layer_idx"] == 1 else line, OTHER
    )
    status, lines = diff(capsys, a, b)
    assert status == 1
    assert lines[0] == (
        f"First difference: iteration 2, micro-batch 0, forward, decoder.layers.1.{QKV} input: "
        "only in A"
    )
    assert "  iteration 2: 14 records only in A" in lines
    status, lines = diff(capsys, a, b, "--ignore-missing")
    assert status == 0
    assert lines[0].startswith("No difference: 42 pairs")
    assert "  iteration 2: 14 records only in A" in lines


def test_unreadable_files_are_named_and_the_rest_is_compared(runs, capsys):
    a, b = runs
    path_of(b, iteration=1, layer=0, tensor_name="grad_query").write_bytes(b"garbage")
    path_of(b, iteration=1, layer=0, tensor_name="query").unlink()
    plant(path_of(b, iteration=2, layer=0, tensor_name="value"), add_to_first(1))
    (b / f"run_{OTHER}.json").write_text("{")
    status, lines = diff(capsys, a, b, "--ignore-missing")
    assert status == 1
    assert re.search(r"backward, .* grad_query: cannot be compared: .*grad_query.pt: ", lines[0])
    text = "\n".join(lines)
    assert "forward, decoder.layers.0.self_attention.core_attention query: only in A" in text
    assert (
        "iteration 2, micro-batch 0, forward, decoder.layers.0.self_attention.core_attention value"
        in text
    )
    assert "[ERROR] B: " in text
    assert "1 file(s) listed in an index are missing" in text


def test_json_lines_of_two_types(originals, capsys):
    status, lines = diff(capsys, originals / "before", originals / "mxfp8", "--format", "jsonl")
    assert status == 1
    summary, *pairs = map(json.loads, lines)
    assert summary["kind"] == "summary"
    assert not summary["agrees"]
    assert summary["first_difference"] == pairs[0]
    assert summary["settings_that_differ"]["quant_type"] == ["bf16", "mxfp8"]
    assert len(pairs) == summary["pairs"] == 56
    assert [pair["position"] for pair in pairs] == list(range(56))
    steps = [(pair["iteration"], pair["operation"], pair["layer_idx"]) for pair in pairs]
    assert steps == sorted(steps, key=lambda s: (s[0], s[1] == "backward")), (
        "forward, then backward"
    )
    names = [pair["tensor_name"] for pair in pairs[:8]]
    assert names == [*("input", "weight", "output", "query", "key", "value", "output"), "input"]
    of_result = next(pair for pair in pairs if pair["tensor_name"] == "grad_input")
    assert of_result["status"] == "different"
    assert of_result["relative_error"] > 0.5
    assert of_result["origin"] in ("local", "inherited")
    assert (of_result["quant_type_a"], of_result["quant_type_b"]) == ("bf16", "mxfp8")


def test_the_operation_that_adds_most_is_named(runs, capsys):
    """The operands are equal, so that all of the error is local."""
    a, b = runs
    path = path_of(b, iteration=1, layer=1, module=QKV, tensor_name="output")
    plant(path, lambda x: x.mul_(2))
    _, lines = diff(capsys, a, b)
    assert lines[1] == (
        f"Largest local error: iteration 1, micro-batch 0, forward, decoder.layers.1.{QKV} output: "
        "the operation adds 1, and its operands bring in 0"
    )
    _, lines = diff(capsys, a, b, "--no-origins")
    assert not lines[1]


EVIL = "x\n0 error\x1b[2J\u202e<script>alert(1)</script>$x^{"


def test_the_page(runs, tmp_path, capsys):
    """Hostile names are escaped in the text, in the JSON lines and on the page."""
    folders = []
    for name, folder in zip("ab", runs, strict=True):
        folders.append(shutil.copytree(folder, tmp_path / name))
        run_id = next(folders[-1].glob("run_*")).stem.removeprefix("run_")
        rewrite(
            folders[-1],
            lambda line: line | {"module": f"decoder.layers.{line['layer_idx']}.{EVIL}"},
            run_id,
        )
        change_card(folders[-1], device=f"{name}{EVIL}")
    a, b = folders
    plant(path_of(b, iteration=1, layer=1, tensor_name="weight"), add_to_first(0.5))
    page = tmp_path / "diff.html"
    page.write_text("an earlier file")
    for options in (("--output", str(page)), ("--format", "jsonl")):
        status = main(["diff", str(a), str(b), *options])
        told = "".join(capsys.readouterr())
        assert status == 1
        assert all(letter.isprintable() or letter == "\n" for letter in told)
        assert not any(line.startswith("0 error") for line in told.splitlines())
    text = page.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "\u202e" not in text
    assert 'src="data:image/png;base64,' in text
    assert "First difference: iteration 1, forward, decoder.layers.1.x" in text
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    assert len(list(tmp_path.glob("diff_*.html"))) == 1, "the earlier file was kept"


def test_the_picture(originals):
    stores = [open_run(originals / name, "a", None) for name in ("before", "mxfp8")]
    comparison, keys = prepare((stores[0], stores[1]), Rules())
    summary = Summary(Rules())
    for _ in summary.follow(comparison.run(keys)):
        pass
    figure = growth_figure(summary)
    linear, attention, local, iterations = figure.axes
    assert [ax.get_title(loc="left") for ax in (linear, attention)] == [
        "Linear layers",
        "Attention",
    ]
    for ax, names in (
        (linear, {"input", "weight", "output", "grad_output", "grad_input", "grad_weight"}),
        (attention, {"query", "key", "value", "output", "grad_output"}),
    ):
        labels = set(ax.get_legend_handles_labels()[1])
        assert names | {"first difference"} <= labels
        assert ax.get_ylabel() == "relative error ‖B - A‖ / ‖A‖"
        assert "execution order" in ax.get_xlabel()
    assert [tick.get_text() for tick in linear.get_xticklabels()] == ["0", "1", "0", "1"]
    assert local.get_ylabel() == "local error / ‖A‖"
    labels = local.get_legend_handles_labels()[1]
    assert {"output of linear", "output of attention", "grad_weight of linear"} <= set(labels)
    assert iterations.get_xlabel() == "iteration"
    [legend] = figure.legends
    named = {
        text.get_text(): handle.get_color()
        for text, handle in zip(legend.get_texts(), legend.legend_handles, strict=True)
    }
    for ax in figure.axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            assert handle.get_color() == named[name], f"{name} has one color in all panels"
    assert named["grad_weight"] == named["weight"] == named["grad_weight of linear"]
    assert named["output of linear"] == named["output"] != named["output of attention"]
    figure.draw_without_rendering()
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1, "the legend is not cut off"
    assert len(legend.get_texts()) == 14 + 7


def test_mistakes_end_with_status_2(runs, tmp_path, capsys):
    a, b = runs
    both = tmp_path / "both"
    shutil.copytree(a, both / "one")
    shutil.copytree(b, both / "two")
    for arguments, says in (
        ((a, tmp_path / "none"), "no folder"),
        (
            (a, both),
            f"has 2 runs; choose one with --run-b: latest, 20250908_095200_abc123, {OTHER}",
        ),
        ((a, b, "--run-a", "none"), "no run 'none'"),
        ((a, b, "--max-relative-error", "x"), "is not a limit"),
        ((a, b, "--max-relative-error", "-1"), "give a number of 0 or more"),
        ((a, b, "--max-relative-error", "fc9.*=1"), "no tensor matches 'fc9.*'"),
        ((a, b, "--bitwise", "--rtol", "1"), "--bitwise allows no difference"),
        ((a, b, "--output", "page.txt"), "must end in .html"),
        ((a, b, "--output", tmp_path / "none" / "d.html"), "there is no folder"),
    ):
        status, lines = diff(capsys, *arguments)
        assert status == 2, arguments
        assert says in lines[-1]
        assert lines[-1].startswith("[ERROR]")
    assert diff(capsys, both, both, "--run-a", OTHER, "--run-b", "latest")[0] == 0
    rewrite(b, lambda line: line | {"iteration": 7}, OTHER)
    status, lines = diff(capsys, a, b)
    assert status == 2
    assert "in iteration 1 to 2 in A" in lines[-1]
    assert "in iteration 7 in B" in lines[-1]


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--help"])
    assert ended.value.code == 0
    assert "python -m megatron.analysis diff logs/bf16 logs/mxfp8" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_run(originals, tmp_path, monkeypatch, capsys, command):
    logs = tmp_path / "logs"
    logs.mkdir()
    for name, original in (("bf16", "before"), ("bf16_again", "after"), ("mxfp8", "mxfp8")):
        (logs / name).symlink_to(originals / original)
    monkeypatch.chdir(tmp_path)
    words = [word.strip("'") for word in command.partition("#")[0].split()]
    assert main(words) in (0, 1)
    assert capsys.readouterr().out.startswith(("First difference: ", "No difference: ", "{"))


def rewrite_records(folder, **fields):
    """Change fields of all records of a dump."""
    for path in folder.glob("*.pt"):
        payload = torch.load(path, weights_only=True)
        payload["metadata"] |= fields
        torch.save(payload, path)
    for index in folder.glob("*.jsonl"):
        records = [json.loads(line) | fields for line in index.read_text().splitlines()]
        index.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def test_a_run_without_readable_records_is_named_with_the_reason(tmp_path, capsys):
    for name in "ab":
        write_dump(tmp_path / name, layers=1)
    rewrite_records(tmp_path / "b", slice="junk")
    status, lines = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert status == 2
    assert "b has no readable tensor; " in lines[-1]
    assert "slice" in lines[-1]


def test_a_record_without_a_micro_batch_is_named_without_one(tmp_path, capsys):
    for name in "ab":
        write_dump(tmp_path / name, layers=1)
        rewrite_records(tmp_path / name, micro_batch=None)
    plant(path_of(tmp_path / "b", tensor_name="key"), add_to_first(1))
    _, lines = diff(capsys, tmp_path / "a", tmp_path / "b")
    assert lines[0].startswith("First difference: iteration 1, forward, ")


def test_the_table_of_iterations_has_those_with_the_largest_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(text, "MOST_ITERATIONS", 2)
    for name in ("a", "b"):
        write_dump(tmp_path / name, iterations=5, layers=1)
    for iteration, amount in ((2, 1.0), (4, 1000.0), (5, 10.0)):
        where = {"layer": 0, "tensor_name": "grad_query", "iteration": iteration}
        plant(path_of(tmp_path / "b", **where), add_to_first(amount))
    _, lines = diff(capsys, tmp_path / "a", tmp_path / "b", "--no-origins")
    start = next(at for at, line in enumerate(lines) if line.startswith("Largest errors by iter"))
    assert lines[start].endswith("(2 of 5 iterations, those with the largest errors)")
    assert [line.split()[0] for line in lines[start + 2 : start + 4]] == ["4", "5"]
