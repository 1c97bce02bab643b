"""Test that a flag or a file is refused if its package is not installed."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron import optional_packages
from megatron.analysis.statistics_history import read_statistics
from megatron.collection.statistics.history import StatisticsSettings
from megatron.optional_packages import check_installed
from megatron.training.data.tokenizer import build_tokenizer
from megatron.training.errors import UserError


@pytest.fixture
def without(monkeypatch):
    """Return a function that hides an installed package and returns a pattern of the message."""

    def hide(package: str) -> str:
        def find(name: str):
            return None if name == package else find_spec(name)

        monkeypatch.setattr(optional_packages, "find_spec", find)
        return f"needs the {package} package.*run `{sys.executable} -m pip install {package}`"

    return hide


def test_a_package_that_is_installed_passes():
    check_installed("yaml", "a recipe")


def test_statistics_need_pyarrow(without, tmp_path: Path):
    message = without("pyarrow")
    with pytest.raises(ValueError, match=f"^--tensor-statistics {message}"):
        StatisticsSettings.parse(tensor_statistics=1)
    (tmp_path / "operands_1.parquet").touch()
    with pytest.raises(ValueError, match=message):
        read_statistics(tmp_path)


@pytest.mark.parametrize(
    ("package", "kind", "file"),
    [
        ("tiktoken", "TikTokenizer", "o200k.tiktoken"),
        ("transformers", "HuggingFaceTokenizer", "tokenizer.json"),
    ],
)
def test_some_tokenizers_need_a_package(without, tmp_path: Path, package, kind, file):
    (tmp_path / file).touch()
    with pytest.raises(UserError, match=f"^--tokenizer-type {kind} {without(package)}"):
        build_tokenizer(kind, tmp_path)
