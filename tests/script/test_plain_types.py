"""Test that the scripts name formats without torch exactly as training resolves them."""

from __future__ import annotations

import itertools
import json
import os

import pytest

from configs import run_names
from configs.quantizations import AS_SET, accepted, plain_type
from megatron.fake_quant import policy
from tests.subprocesses import REPO

RECIPE = str(REPO / "examples/recipes/hif8.yaml")
TYPES = (None, "", "none", "MXFP8", "linear_hifp8", "nvfp4", "mxfp9")
MISSING = "missing"  #: stands for a settings file that does not exist
SETTINGS = (
    MISSING,
    {},
    {"linear": "mxfp8", "qk": "none"},
    {"pv": "nvfp4"},
    {"lm": "mxfp8"},
    ["mxfp8"],
)


@pytest.mark.parametrize("name", [name for name in accepted() if name != AS_SET])
def test_plain_types_have_the_spelling_of_training(name):
    for given in (name, name.upper(), name.lower()):
        assert plain_type(given) == policy.canonical_type(given)


def test_other_types_are_left_to_training():
    for name in (AS_SET, "nvfp4", "mxfp9", "mx:e3m4:b16:rceil", "FA_none", " mxfp8", ""):
        assert plain_type(name) is None


def resolved(flags):
    """Return the type that training resolves, or None if it reports an error."""
    try:
        return policy.resolve(flags).quant_type
    except ValueError:
        return None


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_effective_type_is_that_of_training(monkeypatch, tmp_path, settings):
    path = tmp_path / "settings.json"
    if settings != MISSING:
        path.write_text(json.dumps(settings))
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(path))
    for operation in ("QK", "PV"):
        monkeypatch.delenv(f"{operation}_QUANT_TYPE", raising=False)
    known = 0
    for flag, variable, operation, recipe in itertools.product(
        TYPES, TYPES, (None, "mxfp4", "mxfp9"), (None, RECIPE)
    ):
        names = ("CUSTOM_QUANT_TYPE", "LINEAR_QUANT_TYPE", "QUANT_RECIPE")
        for name, value in zip(names, (variable, operation, recipe), strict=True):
            monkeypatch.delenv(name, raising=False)
            if value is not None:
                monkeypatch.setenv(name, value)
        flags = {} if flag is None else {"custom_quant_type": flag}
        if found := run_names._plain(flags):
            known += 1
            assert found == resolved(flags), (flags, {name: os.environ.get(name) for name in names})
    plain = settings in ({}, SETTINGS[2])
    assert (known > 0) == plain


def test_a_settings_file_that_is_no_json_is_left_to_training(monkeypatch, tmp_path):
    (tmp_path / "settings.json").write_text("{")
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(tmp_path / "settings.json"))
    assert run_names._plain({"custom_quant_type": "mxfp8"}) is None
