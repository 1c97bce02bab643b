"""Test that the examples run and that their results are correct."""

from __future__ import annotations

import math
import re
import runpy
import shlex
import sys

import pytest

from tests import forks
from tests.subprocesses import REPO, environment, run

ENVIRONMENT = environment(PYTHONPATH=REPO, LAB_PYTHON=sys.executable)
DEEPSEEK = REPO / "examples/deepseek/train_deepseek2_lite.sh"


def example(name, *arguments):
    """Run an example and return its output."""
    script = REPO / "examples/python" / name
    done = forks.run(script, *arguments, env=ENVIRONMENT, libraries_only=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main_of(name):
    """Return the main function of an example, to be called in this process."""
    return runpy.run_path(str(REPO / "examples/python" / name))["main"]


def recomputed(text):
    """Return the share of reproduced values and the SQNR, with and without quantization."""
    found = re.findall(r"operands .+? +([0-9.]+)% of y as saved, SQNR (\S+) dB", text)
    return [(float(share), float(sqnr)) for share, sqnr in found]


def test_formats_are_compared():
    lines = example("compare_formats.py").splitlines()
    found = {name: list(map(float, rest)) for name, *rest in map(str.split, lines[1:])}
    assert lines[0].split() == ["SQNR", "in", "dB", "normal", "outliers", "small"]
    for name, (normal, outliers, small) in found.items():
        if name == "hifp8":  # no scale: outliers are harmless, small values underflow
            assert abs(normal - outliers) < 0.1
            assert small < normal - 10
        else:
            assert small == pytest.approx(normal, abs=0.1)
    assert found["mxfp4"][1] < found["mxfp4"][0] - 10, "outliers take their block's range"
    assert found["mxfp8"][0] > found["mxfp4"][0] + 10


def test_the_formats_can_be_named(capsys):
    main = main_of("compare_formats.py")
    assert main(["mx:e3m4:b16:rceil"]) == 0
    assert "mx:e3m4:b16:rceil" in capsys.readouterr().out
    assert main(["mxpf8"]) == 2
    assert capsys.readouterr().err.startswith("[ERROR] unknown format 'mxpf8', did you mean mxfp8")


def test_a_saved_output_is_recomputed(tmp_path, capsys):
    worker = REPO / "tests/analysis/dump/layouts_worker.py"
    made = forks.run(worker, tmp_path, "mxfp8", env=ENVIRONMENT)
    assert made.returncode == 0, made.stderr[-3000:]
    dump, main = tmp_path / "mxfp8", main_of("recompute_gemm.py")
    assert main(dump, "linear_fc1") == 0
    for text in (example("recompute_gemm.py", dump), capsys.readouterr().out):
        quantized, plain = recomputed(text)
        assert quantized == (100, math.inf)
        assert plain[0] < 50
        assert 15 < plain[1] < 40
    for arguments in ((tmp_path / "none",), (dump, "linear_zz")):
        assert main(*arguments) == 1
        assert capsys.readouterr().err.startswith("[ERROR] no ")


def test_the_deepseek_example_is_a_cell_of_the_matrix():
    done = run(
        ["bash", DEEPSEEK, "linear_mxfp4", "--dry-run", "--", "--seed", "7"], env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[words.index("--custom-quant-type") + 1] == "linear_mxfp4"
    assert "--multi-latent-attention" in words
    assert words[-2:] == ["--seed", "7"]
    default = run(["bash", DEEPSEEK, "--dry-run", "--dataset", "dolma"], env=ENVIRONMENT)
    assert "_dolma_FA_linear_mxfp8 " in default.stdout


@pytest.mark.slow
def test_the_deepseek_example_trains_and_its_dump_is_recomputed(tmp_path):
    options = ["--preset", "tiny", "--training-config", "fast", "--train-iters", "1"]
    events = ["--tensorboard-path", tmp_path / "events"]
    collect = ["--save-tensors", "--tensor-save-dir", tmp_path / "dump", "--control-iter", "1"]
    done = run(["bash", DEEPSEEK, *options, *events, "--", *collect], env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-3000:]
    quantized, plain = recomputed(
        example("recompute_gemm.py", tmp_path / "dump", "linear_kv_up_proj")
    )
    assert quantized == (100, math.inf)
    assert plain[0] < 50
