"""Test benchmarks/study_speed.py: both studies find the same errors, and the page states them."""

import re
import sys

import pytest
import torch

from megatron.fake_quant import fake_quantize
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import study_plain
import study_speed
import study_worker

sys.path.remove(str(REPO / "benchmarks"))


def test_both_studies_find_the_same_errors(tmp_path):
    names = ["mxfp8", "mxfp4"]
    passes = study_worker.write_dump(tmp_path / "dump", 64, 64)
    assert len(passes) == 5 * study_worker.LAYERS
    ours = study_worker.ours(tmp_path / "dump", names, 1, budget=True)
    assert len(ours) == study_worker.LAYERS * 6 * 3 * len(names)
    quantizers = {name: lambda x, name=name: fake_quantize(x, name, -1) for name in names}
    plain = study_plain.study(tmp_path / "dump", passes, quantizers, workers=2)
    assert len(plain) == 3 * len(ours), "both operands, and each one alone"
    differences = study_worker.differences(ours, plain)
    assert set(differences) == set(names)
    assert max(value for value, _ in differences.values()) < 1e-3
    study_plain.multiply(tmp_path / "dump", passes, 2, workers=1, budget=True)
    for key, numbers in ours.items():
        for name in ("gain", "cosine", "mean_error"):
            assert plain[key][name] == pytest.approx(numbers[name], abs=1e-4), (key, name)


def test_both_studies_find_the_same_errors_without_budgets(tmp_path):
    passes = study_worker.write_dump(tmp_path / "dump", 64, 32)
    ours = study_worker.ours(tmp_path / "dump", ["mxfp4"], 1, budget=False)
    quantizers = {"mxfp4": lambda x: fake_quantize(x, "mxfp4", -1)}
    plain = study_plain.study(tmp_path / "dump", passes, quantizers, budget=False)
    assert plain.keys() == ours.keys()
    assert study_worker.differences(ours, plain)["mxfp4"][0] < 1e-3


@pytest.mark.parametrize(("budget", "products"), [(True, 3), (False, 1)])
def test_the_products_alone_are_as_many_as_those_of_the_study(budget, products, monkeypatch):
    x = torch.ones(32, 32)
    matmuls = [study_plain.Product("fc1", "linear", x, x, x)]
    counts = []
    matmul = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda *pair: counts.append(1) or matmul(*pair))
    study_plain.study_pass(matmuls, {"a": lambda x: x, "b": lambda x: x}, budget=budget)
    of_study = len(counts)
    study_plain.multiply_pass(matmuls, 2, budget=budget)
    assert of_study == len(counts) - of_study == 3 * (1 + 2 * products)


def event(hidden, ours, intra, inter, difference=1e-4, budget=True):
    times = {"ours": ours, "intra": intra, "inter": inter}
    times |= {"products, intra": [time / 8 for time in intra]}
    times |= {"products, inter": [time / 4 for time in inter]}
    sizes = {"budget": budget, "hidden_size": hidden, "tokens": 64, "operands": 120}
    return sizes | {"kind": "case", "times": times, "differences": {"mxfp8": (difference, 36)}}


PLAN = {"kind": "plan", "releases": {"torch": "2.13.0", "torchao": None}}


def page(*cases):
    return study_speed.page([PLAN, *cases], study_speed.parse(["--quick"]))


def test_the_page_compares_with_the_faster_plain_study():
    text, good = page(
        event(64, [1.0, 2.0, 1.0], [8.0, 8.0, 8.0], [6.0, 6.0, 9.0]),
        event(128, [1.0, 1.0, 1.0], [4.0, 4.0, 4.0], [5.0, 5.0, 5.0]),
    )
    assert good
    assert (
        "| with error budgets | 64 | 64 | 120 | 120 | 15 | 20 | 6.00 (3.00 to 9.00) | 6.00 |"
        in text
    )
    assert (
        "| with error budgets | 128 | 64 | 120 | 120 | 30 | 24 | 4.00 (4.00 to 4.00) | 8.00 |"
        in text
    )
    assert "With error budgets, our study is 4.00 to 6.00 times as fast as" in text
    assert "is met at 1 of 2 sizes." in text
    assert "| `mxfp8` | 72 | 0.0001 |" in text
    assert "torchao -" in text


def test_the_page_reports_each_study_by_itself():
    text, _ = page(
        event(64, [1.0], [4.0], [4.0]),
        event(64, [1.0], [7.0], [7.0], budget=False),
        event(128, [1.0], [3.0], [3.0]),
        event(128, [1.0], [6.0], [6.0], budget=False),
    )
    assert "With error budgets, our study is 3.00 to 4.00 times as fast" in text
    assert "is met at 0 of 2 sizes." in text
    assert "Without error budgets, our study is 6.00 to 7.00 times as fast" in text
    assert "is met at 2 of 2 sizes." in text
    rows = [line.split(" | ") for line in text.splitlines() if " error budgets | " in line]
    assert [row[:2] for row in rows] == [
        ["| with error budgets", "64"],
        ["| with error budgets", "128"],
        ["| without error budgets", "64"],
        ["| without error budgets", "128"],
    ]


def test_a_goal_beyond_the_matmuls_alone_is_out_of_reach():
    case = event(64, [2.0], [8.0], [8.0])
    case["times"]["products, inter"] = [2.0]
    case["times"]["products, intra"] = [4.0]
    text, _ = page(case)
    assert "is met at 0 of 1 sizes and out of reach at 1." in text


def test_errors_that_differ_are_reported():
    text, good = page(event(64, [1.0], [8.0], [6.0], difference=0.02))
    assert not good
    assert "| `mxfp8` | 36 | 0.02 |" in text


def test_without_torchao_only_our_side_is_measured():
    case = event(64, [0.5], [], [])
    case |= {"times": {"ours": [0.5]}, "differences": {}}
    text, good = page(case)
    assert good
    assert "torchao is not installed, so only our side was measured." in text
    assert "| with error budgets | 64 | 64 | 120 | 240 | - | - | - | - |" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden-sizes", "100"], "multiples of 64"),
        (["--tokens", "20"], "a multiple of 32"),
        (["--rounds", "0"], "'0' is not a positive integer"),
    ],
)
def test_mistakes_are_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as ended:
        study_speed.parse(options)
    assert ended.value.code
    assert re.search(rf"^\[ERROR\] .*{message}", capsys.readouterr().err, re.MULTILINE)
