"""Types and their precedence: flag, environment, settings file, default."""

import json

import pytest

from megatron.fake_quant import policy
from megatron.fake_quant.policy import __main__ as policy_command
from megatron.fake_quant.policy import resolve
from megatron.fake_quant.quant_type import OPERATIONS, parse_type
from tests.subprocesses import NO_SETTINGS


@pytest.fixture
def settings(tmp_path):
    """Return an environment with a settings file of its own, and a function that writes it."""
    path = tmp_path / "settings.json"
    path.write_text("{}")
    environ = {"QUANT_SETTINGS_FILE": str(path)}
    return environ, lambda content: path.write_text(json.dumps(content))


def names(resolved):
    return {op: resolved.choices[op].name for op in OPERATIONS}


@pytest.mark.parametrize(
    ("name", "linear", "qk", "pv"),
    [
        ("mxfp8", "mxfp8", "mxfp8", "mxfp8"),
        ("linear_mxfp4", "mxfp4", None, None),
        ("FA_hifp8", None, "hifp8", None),
        ("FA_linear_mxfp8", "mxfp8", "mxfp8", None),
        ("bf16", None, None, None),
        ("none", None, None, None),
        ("linear_bf16", None, None, None),
        ("hif8", "hifp8", "hifp8", "hifp8"),
    ],
)
def test_a_type_says_where(name, linear, qk, pv):
    found = parse_type(name)
    expected = {"linear": linear, "qk": qk, "pv": pv}
    assert {op: fmt and fmt.name for op, fmt in found.items()} == expected


@pytest.mark.parametrize("name", ["mxfp9", "linear_", "fa-mxfp8", "FA_linear_mx", "", "mx:e3m4"])
def test_an_unknown_type_is_refused_with_what_there_is(name):
    with pytest.raises(ValueError, match=r"unknown quantization type.*hifp8.*mxfp4.*mxfp8"):
        parse_type(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FA_mxfp4:rcel", "format 'mxfp4:rcel': mxfp4 does not take 'rcel'; it takes floor, rceil"),
        ("linear_nvfp4:head2/1", "format 'nvfp4:head2/1': a headroom of 2; choose a fraction"),
        ("x" * 300, "has 300 characters"),
    ],
)
def test_a_type_with_a_wrong_variant_is_refused_with_the_reason(name, message):
    with pytest.raises(ValueError, match=message):
        parse_type(name)


def test_the_default_quantizes_nothing(settings):
    environ, _ = settings
    resolved = resolve({}, environ)
    assert resolved.quant_type == "bf16"
    assert {resolved.choices[op].source for op in OPERATIONS} == {"default"}


def test_each_level_wins_over_the_next(settings):
    environ, write = settings
    write({"linear": "mxfp8_e5m2", "qk": "mxfp8_e5m2", "pv": "mxfp8_e5m2"})
    assert names(resolve({}, environ)) == dict.fromkeys(OPERATIONS, "mxfp8_e5m2")
    environ["CUSTOM_QUANT_TYPE"] = "mxfp4"
    assert names(resolve({}, environ)) == dict.fromkeys(OPERATIONS, "mxfp4")
    environ["PV_QUANT_TYPE"] = "fp16"
    assert names(resolve({}, environ)) == {"linear": "mxfp4", "qk": "mxfp4", "pv": "fp16"}
    flags = {"custom_quant_type": "linear_mxfp8"}
    assert names(resolve(flags, environ)) == {"linear": "mxfp8", "qk": "bf16", "pv": "bf16"}
    flags["qk"] = "hifp8"
    resolved = resolve(flags, environ)
    assert names(resolved) == {"linear": "mxfp8", "qk": "hifp8", "pv": "bf16"}
    assert resolved.describe() == [
        "linear: mxfp8 (flag --custom-quant-type)",
        "qk: hifp8 (flag --qk-quant)",
        "pv: bf16 (flag --custom-quant-type)",
    ]


def test_an_operation_can_be_switched_off_by_a_flag(settings):
    environ, _ = settings
    resolved = resolve({"pv": "none"}, environ | {"CUSTOM_QUANT_TYPE": "mxfp8"})
    assert names(resolved) == {"linear": "mxfp8", "qk": "mxfp8", "pv": "bf16"}


@pytest.mark.parametrize(
    ("flags", "quant_type"),
    [
        ({"custom_quant_type": "FA_linear_mxfp4"}, "FA_linear_mxfp4"),
        ({"linear": "mxfp8", "qk": "mxfp8", "pv": "mxfp8"}, "mxfp8"),
        ({"linear": "mxfp8"}, "linear_mxfp8"),
        ({"qk": "hif8"}, "FA_hifp8"),
        ({"pv": "mxfp8"}, "linear-bf16_qk-bf16_pv-mxfp8"),
        ({"linear": "mxfp8", "qk": "mxfp4"}, "linear-mxfp8_qk-mxfp4_pv-bf16"),
    ],
)
def test_the_type_of_a_run_is_the_shortest_that_says_the_same(settings, flags, quant_type):
    assert resolve(flags, settings[0]).quant_type == quant_type


@pytest.mark.parametrize(
    ("flags", "variables", "source"),
    [
        ({"qk": "fp7"}, {}, "flag --qk-quant: unknown"),
        ({"custom_quant_type": "fp7"}, {}, "flag --custom-quant-type: unknown"),
        ({}, {"CUSTOM_QUANT_TYPE": "fp7"}, "environment variable CUSTOM_QUANT_TYPE: unknown"),
        ({}, {"LINEAR_QUANT_TYPE": "fp7"}, "environment variable LINEAR_QUANT_TYPE: unknown"),
    ],
)
def test_an_error_names_who_said_it(settings, flags, variables, source):
    with pytest.raises(ValueError, match=source):
        resolve(flags, settings[0] | variables)


@pytest.mark.parametrize("content", ["[", '["mxfp8"]', '{"lin": "mxfp8"}', '{"qk": 8}'])
def test_a_bad_settings_file_is_an_error_not_a_default(tmp_path, content):
    path = tmp_path / "settings.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"settings file .*settings\.json.*fix or remove it"):
        resolve({}, {"QUANT_SETTINGS_FILE": str(path)})


def test_a_settings_file_that_is_named_and_missing_is_refused(tmp_path):
    path = tmp_path / "missing.json"
    message = "QUANT_SETTINGS_FILE names .*missing.json, which does not exist; write it with"
    with pytest.raises(ValueError, match=message):
        resolve({}, {"QUANT_SETTINGS_FILE": str(path)})
    assert resolve({}, {"QUANT_SETTINGS_FILE": ""}).quant_type == "bf16"


def test_without_configure_the_environment_speaks(monkeypatch):
    monkeypatch.setattr(policy, "_current", None)
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(NO_SETTINGS))
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "FA_mxfp4")
    assert policy.current().quant_type == "FA_mxfp4"
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp8")
    assert policy.current().quant_type == "FA_mxfp4", "the policy does not change during a run"


def test_the_check_for_shell_scripts(capsys):
    assert policy_command.main(["--check-type", "FA_mxfp8"]) == 0
    assert capsys.readouterr().out == "FA_mxfp8\n"
    assert policy_command.main(["--check-type", "mxfp9"]) == 2
    assert capsys.readouterr().err.startswith("[ERROR] unknown quantization type 'mxfp9'")


@pytest.mark.parametrize(
    ("given", "spelled"),
    [
        ("MXFP8", "mxfp8"),
        ("fa_LINEAR_HiF8", "FA_linear_hifp8"),
        ("Linear_mxfp8_E4M3", "linear_mxfp8"),
        ("NONE", "bf16"),
        ("linear_bf16", "bf16"),
        ("FA_MX:e3m4:b16:RCEIL", "FA_mx:e3m4:b16:rceil"),
    ],
)
def test_a_type_is_read_in_any_case_and_has_one_spelling(given, spelled):
    assert policy.canonical_type(given) == spelled


def test_an_unknown_type_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"unknown .* type 'FA_mxpf8', did you mean FA_mxfp8"):
        policy.canonical_type("FA_mxpf8")


def test_the_type_that_environment_and_settings_file_set(capsys, monkeypatch, tmp_path):
    path = tmp_path / "settings.json"
    for name in ("CUSTOM_QUANT_TYPE", "QUANT_RECIPE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(path))
    path.write_text("{}")
    assert policy_command.main(["--set-type"]) == 0
    assert capsys.readouterr().out == ""
    path.write_text('{"linear": "mxfp8", "qk": "MXFP8"}')
    assert policy_command.main(["--set-type"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "FA_linear_mxfp8",
        "linear: mxfp8 (settings file settings.json)",
        "qk: mxfp8 (settings file settings.json)",
        "pv: bf16 (default)",
    ]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("CUSTOM_QUANT_TYP", "CUSTOM_QUANT_TYPE"),
        ("QUANT_TYPE", "CUSTOM_QUANT_TYPE"),
        ("TENSOR_SAVE_DIRR", "TENSOR_SAVE_DIR"),
        ("TENSOR_SAVE_ENABLE", "TENSOR_SAVE_ENABLED"),
        ("QUANT_RECIPES", "QUANT_RECIPE"),
        ("PV_QUANT_TYPES", "PV_QUANT_TYPE"),
        ("custom_quant_type", "CUSTOM_QUANT_TYPE"),
        ("LINEAR_QUANT", "LINEAR_QUANT_TYPE"),
        ("QUANT_RECIPE_FILE", "QUANT_RECIPE"),
        ("TENSOR_SAVE", "TENSOR_SAVE_ENABLED"),
    ],
)
def test_a_misspelled_variable_is_refused(name, meant):
    with pytest.raises(ValueError, match=f"variable {name} is unknown; did you mean {meant}\\?"):
        resolve({}, {name: "mxfp8"})
    assert resolve({}, {name: "", "QUANTIZE": "1", "TENSORBOARD_DIR": "x"}).quant_type == "bf16"


def test_a_variable_with_the_beginning_of_ours_is_refused():
    with pytest.raises(ValueError, match="TENSOR_SAVE_EVERYTHING is unknown; choose from CUSTOM_"):
        resolve({}, {"TENSOR_SAVE_EVERYTHING": "1"})


@pytest.mark.parametrize(
    "name", ["custom_quant_type", "linear", "qk", "pv", "recipe", "accumulate"]
)
def test_an_empty_flag_is_refused(name):
    """An empty value usually comes from a shell variable that is not set."""
    with pytest.raises(ValueError, match="is empty; give a value, or leave the flag out"):
        resolve({name: " "}, {})
