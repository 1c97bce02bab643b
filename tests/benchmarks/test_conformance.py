"""Test benchmarks/conformance.py with the peers that the test environment has, and its page."""

import math
import re
import sys

import pytest

from megatron.fake_quant import get_format
from tests import forks
from tests.subprocesses import REPO

sys.path.insert(0, str(REPO / "benchmarks"))

import conformance_report
import peer_reasons
import peers

sys.path.remove(str(REPO / "benchmarks"))

SCRIPT = REPO / "benchmarks" / "conformance.py"


def test_page_has_the_peers_that_are_here_and_where_they_differ(tmp_path):
    page = tmp_path / "conformance.md"
    words = ("--peers-python", sys.executable, "--output", page, "--formats", "mxfp4", "hifp8")
    done = forks.run(SCRIPT, *words, libraries_only=True)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text in done.stdout
    assert re.search(r"\| torchao \| - \| ModuleNotFoundError", text)
    assert re.search(r"\| fouroversix \| - \| ModuleNotFoundError", text)
    assert re.search(
        r"\| ml_dtypes \| `mxfp4` \| \d+ \| 0 \| 2 \| 2 \| 0 beside NaN \| 0 \| NaN \|", text
    )
    assert "| ml_dtypes | `mxfp4` | nan, infinity |\n" in text
    assert "| ml_dtypes | `mxfp4` | odd_length, first_axis | ValueError: cannot reshape" in text
    if sys.version_info < (3, 13):  # setup.py explains why
        assert re.search(r"\| en_dtypes \| `hifp8` .* \| 40960 alone \| Inf \| 2\^15 \|", text)
    assert "not examined" not in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--formats", "mxfp9"), "--formats: unknown format 'mxfp9'"),
        (("--transformer-engine", "nowhere"), "--transformer-engine nowhere is not a folder"),
        (("--peers-python", "nowhere"), "--peers-python "),
    ],
)
def test_mistakes_end_with_a_message(options, words):
    done = forks.run(SCRIPT, *options, libraries_only=True)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_smallest_input_is_shown_with_the_values_beside_it():
    case = {"vector": "edges", "x": 0.25, "theirs": 0.5, "ours": 0.0}
    shown = conformance_report.shown_input
    assert shown(case | {"values": [0.25]}) == "0.25 alone"
    assert shown(case | {"values": [6.0, 0.25]}) == "0.25 beside 6"
    assert shown(case | {"values": [6.0] * 9}) == "0.25 in `edges`"
    assert [conformance_report.number(x) for x in (math.nan, -math.inf, 2.0**-149, 0.1)] == [
        "NaN",
        "-Inf",
        "2^-149",
        "0.1",
    ]


def test_peers_get_mx_formats_only_if_they_have_all_their_parts():
    assert peers.mx_of(get_format("mxfp4")) == ("e2m1", 32, "floor")
    for name in ("nvfp4", "mxfp4:2d", "mxfp4:top7.25", "mxfp4:head3/4", "mxfp4_macro", "mxfp4:sr"):
        assert peers.mx_of(get_format(name)) is None
    assert peers.mx_of(get_format("fp8_e4m3")) is None


def test_rows_that_differ_only_in_the_format_are_joined():
    rows = [
        ("p", "mxfp4", "edges", "a | b"),
        ("p", "mxfp4", "random", "a | b"),
        ("p", "mxfp8", "edges", "a | b"),
        ("p", "mxfp8", "random", "a | b"),
        ("p", "nvfp4", "edges", "a | b"),
        ("q", "mxfp4", "edges", "a | b"),
    ]
    assert conformance_report.grouped(rows) == [
        ["p", "`mxfp4`, `mxfp8`", "edges, random", r"a \| b"],
        ["p", "`nvfp4`", "edges", r"a \| b"],
        ["q", "`mxfp4`", "edges", r"a \| b"],
    ]


def test_a_reason_belongs_to_a_package_a_format_and_a_vector():
    why = peer_reasons.why
    assert "OCP allows" in why("gfloat", "mxint8", ["edges"])
    assert "left open" in why("gfloat", "mxint8", ["nan"])
    assert why("gfloat", "mxfp8", ["edges"]) == "not examined"
    assert why("torchao compiled", "nvfp4") == why("torchao", "nvfp4", ["random"])
