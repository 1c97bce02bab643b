"""Tests of the names that `megatron.analysis` exports."""

from __future__ import annotations

import sys

import pytest

import megatron.analysis
from megatron.analysis.outputs.registry import OUTPUTS
from tests.subprocesses import REPO, run

SLOW = {"matplotlib", "numba", "numpy", "pandas", "torch"}


def test_listing_the_package_and_its_outputs_imports_nothing_slow():
    code = (
        "import sys, megatron.analysis, megatron.analysis.outputs.registry\n"
        f"print(sorted({SLOW} & sys.modules.keys()))"
    )
    result = run([sys.executable, "-c", code], cwd=REPO)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("name", megatron.analysis.__all__)
def test_every_public_name_is_what_its_module_defines(name):
    public = getattr(megatron.analysis, name)
    assert callable(public)
    assert public.__name__ == name
    assert public.__module__.startswith("megatron.analysis.")


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'drwa'"):
        megatron.analysis.drwa  # noqa: B018


def test_every_output_says_what_it_holds_in_a_line_of_help():
    assert all(output.contents and len(output.contents) <= 70 for output in OUTPUTS.values())
