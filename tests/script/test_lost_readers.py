"""Test that programs finish their work if their reader ends early, as with `head -n 1`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.analysis.fake_dump import write_dump
from tests.script.stub_tree import stub_tree
from tests.script.watching import command
from tests.subprocesses import REPO, TIMEOUT, environment

PYTHON = (sys.executable,)
ANALYSIS = ("-m", "megatron.analysis")


def unread(words, *, cwd=REPO, **variables):
    """Run a command whose standard output is a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env=environment(PYTHONPATH=REPO, LAB_PYTHON=sys.executable, **variables),
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
        )
    finally:
        os.close(write)


def unread_fork(*words, **options):
    """Run a Python program as `unread` does, without importing torch again."""
    return forks.run(*words, env=environment(PYTHONPATH=REPO), unread=True, **options)


def check(done, status=0):
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
    assert "roken pipe" not in done.stderr
    assert done.returncode == status, done.stderr


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unread") / "dump"
    write_dump(folder, layers=1)
    return folder


DRAWN = {"quick": "quick_analysis.png", "report": "report.html", "draw": "heatmaps"}


@pytest.mark.parametrize("reader", DRAWN)
def test_what_is_drawn_is_drawn_to_its_end(tmp_path, dump, reader):
    words = [*ANALYSIS, reader, dump, "--output-dir", tmp_path / "draw"]
    words += [] if reader == "quick" else ["--formats", "mxfp8"]
    words += ["--figures", "heatmaps"] if reader == "draw" else []
    check(unread_fork(*words))
    assert (tmp_path / "draw" / DRAWN[reader]).exists()


def test_statistics_and_findings_keep_their_exit_status(tmp_path, dump):
    words = [*ANALYSIS, "stats", dump, "--formats", "mxfp8", "--output", tmp_path / "a.csv"]
    check(unread_fork(*words))
    assert (tmp_path / "a.csv").exists()
    check(unread_fork(*ANALYSIS, "verify", dump), 1)  # the values are random, so it fails


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "megatron.fake_quant", "list"),
        ("-m", "megatron.fake_quant", "--help"),
        ("script/collect/run.py", "--help"),
        ("script/train_config.py", "--list"),
        ("script/flash_attention_config.py", "--help"),
        ("script/quant_type_modifier.py", "--help"),
        ("script/tensor_visualizer.py", "--help"),
        ("script/quick_visualize.py", "--help"),
        ("script/visualize_tensors.py", "--help"),
        ("script/configs", "nearest", "--word=--a", "--options=--ab --ac"),
        ("script/data/prepare.py", "--help"),
        ("script/data/default_corpus.py", "--help"),
        ("script/data/preprocess.py", "--help"),
    ],
    ids=lambda words: " ".join(words),
)
def test_programs_that_only_print(words):
    imports_torch = "megatron.fake_quant" in words
    check(unread_fork(*words, libraries_only=True) if imports_torch else unread([*PYTHON, *words]))


def test_preprocessing_ends_with_its_output(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "1 2 3"}) + "\n")
    words = ["--input", tmp_path / "a.jsonl", "--output-prefix", tmp_path / "a", "--workers", "1"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"]
    check(unread_fork("script/data/preprocess.py", *words, libraries_only=True))
    assert (tmp_path / "a_text_document.idx").exists()
    words = ["script/data/preprocess.py", "--check", tmp_path / "a_text_document"]
    check(unread_fork(*words, libraries_only=True))


def test_a_collection_goes_on_without_its_reader(tmp_path):
    done = unread(command(tmp_path, "slow", "--verbose"))
    check(done)
    assert len(list((tmp_path / "tensors").glob("*.pt"))) == 6
    assert done.stderr == ""


@pytest.mark.parametrize(
    "words",
    [("run_tensor_collection.sh", "batch"), ("run_tensor_draw.sh", "collect", "batch")],
    ids=lambda words: words[0],
)
def test_a_driver_goes_on_without_its_reader(tmp_path, files, words):
    tree, dumps = stub_tree(tmp_path / "tree", "ok"), tmp_path / "dumps"
    check(
        unread(
            ["bash", tree / words[0], *words[1:], "--preset", "tiny", "--tensor-dir", dumps, *files]
        )
    )
    for name in ("bf16", "mxfp8", "mxfp4", "hifp8"):
        assert len(list((dumps / name).glob("*.pt"))) == 6


def test_the_help_of_a_driver_never_runs_it(tmp_path):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            ["bash", REPO / "run_tensor_collection.sh", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT,
            env=environment(),
        )
    assert done.returncode != 0
    assert "unknown option" not in done.stderr
