"""Test benchmarks/formats.py with the peers that the test environment has, and its tables."""

import csv
import re
import sys

import pytest

from megatron.fake_quant import FORMATS, get_format
from tests import forks
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import formats
import formats_report
import peers_env

sys.path.remove(str(REPO / "benchmarks"))

SCRIPT = REPO / "benchmarks" / "formats.py"


OPTIONS = ("--quick", "--threads", "1", "--peers-python", sys.executable)


def benchmark(*options):
    return forks.run(SCRIPT, *OPTIONS, *options, libraries_only=True)


def test_quick_run_agrees_with_the_peers_that_are_here(tmp_path):
    page = tmp_path / "formats.md"
    found = benchmark(
        *("--formats", "mxfp8", "mxfp4", "hifp8", "bf16"),
        *("--dtypes", "fp32", "bf16", "--output", page),
    )
    assert found.returncode == 0, found.stderr
    text = page.read_text()
    assert text in found.stdout
    assert "mxfp8 mxfp4 hifp8 bf16" in text  # the command
    assert re.search(r"\| quark \| - \| not installed: ModuleNotFoundError", text)

    with (tmp_path / "formats.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["best_ms"]) > 0 for row in rows)
    by_peer = {
        peer: [r for r in rows if r["implementation"] == peer]
        for peer in ("ml_dtypes", "en_dtypes")
    }
    cases = {(row["format"], row["dtype"], row["axis"]) for row in by_peer["ml_dtypes"]}
    assert cases == {
        (fmt, dtype, axis)
        for fmt in ("mxfp8", "mxfp4")
        for dtype in ("fp32", "bf16")
        for axis in ("last", "first")
    }
    assert all(row["differ_randn"] == row["differ_wide"] == "0" for row in by_peer["ml_dtypes"])
    if sys.version_info < (3, 13):  # setup.py explains why
        assert [row["differ_randn"] for row in by_peer["en_dtypes"]] == ["0", "0"]
        assert all("values from 40960 on" in row["note"] for row in by_peer["en_dtypes"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--formats", "mxfp9"), "--formats: unknown format 'mxfp9'"),
        (("--shape", "0", "8"), "'0' is not a positive integer; see --help"),
        (("--axes", "middle"), "invalid choice: 'middle'"),
        (("--peers-python", "nowhere/python"), "nowhere/python does not run"),
    ],
)
def test_mistakes_are_one_line(options, said):
    found = forks.run(SCRIPT, *OPTIONS, *options, libraries_only=True)
    assert found.returncode != 0
    assert "Traceback" not in found.stderr
    assert re.search(rf"^\[ERROR\] .*{re.escape(said)}", found.stderr, re.MULTILINE)


def test_help_shows_commands():
    done = forks.run(SCRIPT, "--help", libraries_only=True)
    assert "python benchmarks/formats.py --quick" in done.stdout


def case(differ, **more):
    times = {"clone": [1.0, 2.0], "ours": [2.0, 3.0]} | {key: [8.0, 6.0] for key in differ}
    same = {"format": "mxfp8", "dtype": "fp32", "axis": "last", "failed": {}, "why": {}, "limit": 2}
    reused = {"clone": [1.0, 1.0], "ours": [4.0, 4.0]} | {key: [6.0, 6.0] for key in differ}
    return same | {"times": times, "reused": reused, "differ": differ, "unlike_cpu": 3} | more


def cells(table, row):
    return [cell.strip() for cell in table.splitlines()[2 + row].strip("|").split("|")]


def test_a_row_has_medians_and_the_medians_of_a_round_s_ratios():
    agreeing = case({"a": {"randn": (0, 0), "wide": (0, 0)}})
    row = cells(formats_report.summary([agreeing], 16777216, cuda=False), 0)
    assert row[3:10] == ["1.5", "2.5", "1.75", "4.00", "a", "7", "3.0"]
    assert row[10] == "1.5"
    assert row[11:] == ["= 0 of 16.8M, 1 peer"] * 2


def test_goals_have_one_row_per_format_with_its_worst_cases():
    slow = {"clone": [1.0], "ours": [2.5], "a": [5.0, 7.0]}
    bound_by_memory = {"clone": [2.0], "ours": [2.0], "b": [6.0]}
    kept = {"clone": [2.0], "ours": [2.0]}
    cases = [
        case({"a": {}}),
        case({}, dtype="bf16", axis="first", times=slow),
        case({"b": {}}, format="hifp8", axis="-", limit=4.0, times=bound_by_memory, reused=kept),
    ]
    text = formats_report.goals(cases)
    assert text.startswith("1 of 2 formats are within their limit in every case. Of the 2 with a")
    table = text.partition("\n\n")[2]
    below = ["3.0 to 3.0", "no, 1 of 1 below (0 out of reach)", "1.5 to 1.5"]
    out_of_reach = ["3.0 to 3.0", "no, 1 of 1 below (1 out of reach)", ""]
    assert [cells(table, row) for row in (0, 1)] == [
        ["`mxfp8`", "2", "1.75", "", "", "2.50", "no, 1 of 2 above", "a", *below],
        ["`hifp8`", "4", "1.00", "", "", "", "yes", "b", *out_of_reach],
    ]


def test_a_goal_is_within_reach_if_any_copy_reaches_it():
    times = {"clone": [2.0], "ours": [2.0], "b": [6.0]}
    verdicts = []
    for huge, reused in ((1.0, 3.0), (3.0, 1.0), (3.0, 3.0)):
        memory = {"clone": [reused], "ours": [2.0]}
        measured = case({"b": {}}, times=times | {formats_report.HUGE: [huge]}, reused=memory)
        verdicts.append(cells(formats_report.goals([measured]).partition("\n\n")[2], 0)[-2])
    assert verdicts == [f"no, 1 of 1 below ({count} out of reach)" for count in (0, 0, 1)]


def test_every_named_format_is_measured_once():
    names = [get_format(name).name for name in formats.FORMATS]
    assert len(set(names)) == len(names)
    assert {*FORMATS} <= {*names}


def test_on_a_gpu_the_row_has_the_bandwidth_and_the_bits():
    row = cells(formats_report.summary([case({})], 4096, cuda=True), 0)
    assert row[5:] == ["1.75", "58%", "3", "-", "-", "-", "-", "-"]


def test_peers_that_differ_are_named_and_explained():
    differ = {
        "a": {"randn": (0, 0), "wide": (5, 5)},
        "b": {"randn": (1234, 0), "wide": (7, 2)},
        "c": {"randn": (0, 0), "wide": (5, 5)},
    }
    why = {"a": "rounds down", "b": "last bit", "c": "rounds down"}
    differing = case(differ, why=why, failed={"d": "broken"})
    row = cells(formats_report.summary([differing], 4096, cuda=False), 0)
    assert row[-2:] == ["a, c: 0; b: 1,234 (0 by > 4 ulp)", "a, c: 5; b: 7 (2 by > 4 ulp)"]
    table = formats_report.every_peer([differing])
    assert cells(table, 0)[3:] == ["a", "6", "7", "3.00", "0", "5", "(1)"]
    assert [cells(table, row)[-1] for row in (1, 2, 3)] == ["(2)", "(1)", "failed (3)"]
    assert table.endswith("(1) rounds down.\n\n(2) last bit.\n\n(3) d: broken.")


def test_every_peer_has_a_pin():
    pins = peers_env.pins()
    assert {"torch", "numpy", "torchao", "amd-quark", "nvidia-modelopt", "ml_dtypes"} <= set(pins)
    assert all(re.fullmatch(r"[\d.]+", pin) for pin in pins.values())
