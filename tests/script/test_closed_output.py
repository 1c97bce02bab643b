"""Test programs whose reader ends early, as in `... | head`: no traceback, no error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forks

REPO = Path(__file__).resolve().parents[2]
CELL = ("--model", "llama32-1b", "--dataset", "dolma", "--quantization", "bf16", "--dry-run")
PROGRAMS = {
    "train_config": ("script/train_config.py", "--list"),
    "dry_run": ("script/train_config.py", *CELL),
    "flash_attention_config": ("script/flash_attention_config.py", "--list"),
}
#: Programs that import torch.
FORKED = {
    "quant_type_modifier": ("script/quant_type_modifier.py", "--check"),
    "formats": ("-m", "megatron.fake_quant", "list"),
    "compare_formats": ("examples/python/compare_formats.py", "mxfp8"),
}
DRIVERS = (
    "run_tensor_collection.sh",
    "run_tensor_draw.sh",
    "script/visualization/one_click_visualize.sh",
    "script/data/prepare_wikipedia.sh",
    "script/data/prepare_dolma.sh",
    "examples/llama/train_llama32_1b_h100_fp8.sh",
    "examples/deepseek/train_deepseek2_lite.sh",
)


def without_reader(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose stdout is a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    try:
        return subprocess.run(
            command, cwd=REPO, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120
        )
    finally:
        os.close(write)


def forked(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program as `without_reader` does, without importing torch again."""
    return forks.run(*words, unread=True, libraries_only=True)


@pytest.mark.parametrize("name", [*PROGRAMS, *FORKED])
def test_a_program_whose_reader_has_gone_ends_quietly(name):
    if name in FORKED:
        ended = forked(*FORKED[name])
    else:
        ended = without_reader(sys.executable, *PROGRAMS[name])
    assert "Traceback" not in ended.stderr
    assert "[ERROR]" not in ended.stderr
    assert "Broken pipe" not in ended.stderr
    assert ended.returncode == 0


@pytest.mark.parametrize("driver", DRIVERS)
def test_help_without_a_reader_is_not_taken_for_an_option(driver):
    ended = without_reader("bash", driver, "--help")
    assert "[ERROR]" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.returncode in (0, 141, -13)  # ended by SIGPIPE, like `sed` and `cat`


def test_preprocessing_is_complete_though_nobody_reads_its_report(tmp_path):
    text = tmp_path / "numbers.txt"
    text.write_text("1 2 3\n\n4 5\n")
    prefix = tmp_path / "out"
    words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "10", "--workers", "1")
    files = ("--input", str(text), "--output-prefix", str(prefix))
    ended = forked("script/data/preprocess.py", *files, *words)
    assert ended.returncode == 0, ended.stderr
    assert "[ERROR]" not in ended.stderr
    made = f"{prefix}_text_document"
    assert Path(f"{made}.idx").exists()
    ended = forked("script/data/preprocess.py", "--check", made)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
