"""Test the settings file: effective formats and their sources, restoring, simultaneous changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import quant_type_modifier
from megatron.fake_quant import policy
from megatron.fake_quant.policy.settings import read_settings
from tests import forks
from tests.subprocesses import NO_SETTINGS, REPO, environment

VARIABLES = ("CUSTOM_QUANT_TYPE", "LINEAR_QUANT_TYPE", "QK_QUANT_TYPE", "PV_QUANT_TYPE")


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """Return the path of a settings file that does not exist, and unset all other sources."""
    for name in (*VARIABLES, "QUANT_RECIPE"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "settings.json"
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(path))
    return path


@pytest.fixture
def call(capsys):
    def main(*words, status=0):
        assert quant_type_modifier.main([*words]) == status
        return capsys.readouterr()

    return main


def test_check_names_each_value_and_its_source(settings, call, monkeypatch):
    assert "settings.json, which does not exist; write it with" in call("--check", status=1).err
    settings.write_text("{}")
    assert call("--check").out.startswith(
        "linear: bf16 (default)\nqk: bf16 (default)\npv: bf16 (default)\n"
    )
    settings.write_text('{"linear": "mxfp8"}')
    monkeypatch.setenv("PV_QUANT_TYPE", "hifp8")
    assert call("--check").out.startswith(
        "linear: mxfp8 (settings file settings.json)\nqk: bf16 (default)\n"
        "pv: hifp8 (environment variable PV_QUANT_TYPE)\n"
    )
    assert sorted(each.name for each in settings.parent.iterdir()) == ["settings.json"]


def test_training_reads_what_was_set(settings, call):
    call("--linear-quant", "mxfp8", "--qk-quant", "HiF8", "--pv-quant", "none")
    found = policy.resolve()
    assert [choice.name for choice in found.choices.values()] == ["mxfp8", "hifp8", "bf16"]
    assert {choice.source for choice in found.choices.values()} == {"settings file settings.json"}


def test_what_is_not_named_stays(settings, call):
    call("--linear-quant", "mxfp8")
    call("--qk-quant", "mxfp4")
    assert read_settings(settings) == {"linear": "mxfp8", "qk": "mxfp4"}


@pytest.mark.parametrize("before", [None, '{"pv":   "mxfp4"}\n'])
def test_restore_goes_back_to_before_the_first_change(settings, call, before):
    if before is not None:
        settings.write_text(before)
    for name in ("mxfp8", "hifp8", "mxint8"):
        call("--linear-quant", name)
    assert call("--restore").out.startswith("restored\n")
    assert (settings.read_text() if settings.exists() else None) == before
    assert call("--restore").out.startswith("nothing to restore: there was no change\n")
    # the next change makes a new backup
    settings.write_text('{"qk": "mxfp4"}')
    call("--linear-quant", "mxfp8")
    call("--restore")
    assert settings.read_text() == '{"qk": "mxfp4"}'


def test_a_value_that_something_else_overrules_is_warned_of(settings, call, monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxfp4")
    message = call("--linear-quant", "mxfp8").err
    assert message == (
        "[WARNING] linear is set to mxfp8, but environment variable CUSTOM_QUANT_TYPE "
        "overrides it; unset that\n"
    )


def test_a_wrong_environment_is_warned_of_and_changes_no_outcome(settings, call, monkeypatch):
    monkeypatch.setenv("CUSTOM_QUANT_TYPE", "mxpf8")
    wrong = "environment variable CUSTOM_QUANT_TYPE: unknown quantization type 'mxpf8'"
    message = call("--linear-quant", "mxfp8").err
    assert message.startswith(f"[WARNING] done, but a run would be refused: {wrong}")
    assert read_settings(settings) == {"linear": "mxfp8"}
    done = call("--restore")
    assert done.out == "restored\n"
    assert "[WARNING] done, but a run would be refused: " in done.err
    assert not settings.exists()
    settings.write_text("{}")
    assert call("--check", status=1).err.startswith(f"[ERROR] {wrong}")


def test_mistakes_change_nothing(settings, call):
    message = call("--linear-quant", "mxfp8", "--qk-quant", "mxpf8", status=2).err
    assert message.startswith("[ERROR] --qk-quant: unknown format 'mxpf8', did you mean mxfp8")
    assert list(settings.parent.iterdir()) == []
    for words, expected in (
        ((), "nothing to do; give --check, --restore, or formats to set"),
        (("--check", "--qk-quant", "mxfp8"), "--qk-quant and --check exclude each other; give one"),
        (("--check", "--restore"), "argument --restore: not allowed with argument --check"),
        (("--quant", "mxfp8"), "unrecognized arguments: --quant mxfp8, did you mean --"),
    ):
        assert call(*words, status=2).err.startswith(f"[ERROR] {expected}")


def test_a_file_that_is_no_settings_file_is_left_alone(settings, call):
    settings.write_text("{")
    error = call("--linear-quant", "mxfp8", status=1).err
    assert f"[ERROR] settings file {settings}: not usable JSON: " in error
    assert error.endswith("; fix or remove it\n")
    assert settings.read_text() == "{"
    settings.write_text("{}")
    call("--linear-quant", "mxfp8")
    backup = settings.with_name("settings.json.backup")
    backup.write_text("[]")
    assert "was not written by this script" in call("--restore", status=1).err
    assert read_settings(settings) == {"linear": "mxfp8"}


def test_a_folder_that_cannot_be_written(call, settings, monkeypatch):
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(settings.parent / "no" / "settings.json"))
    assert "[ERROR] " in call("--linear-quant", "mxfp8", status=1).err


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, "script")
from quant_type_modifier import SettingsFile
path, operation, times = sys.argv[1:]
file = SettingsFile(Path(path))
print("ready", flush=True)
for count in range(int(times)):
    file.change({operation: ("mxfp8", "mxfp4", "hifp8")[count % 3]})
"""


def writer(path, operation, times):
    command = [sys.executable, "-c", WRITER, path, operation, times]
    return subprocess.Popen(
        [str(word) for word in command],
        cwd=REPO,
        env=environment(PYTHONPATH=REPO),
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_that_write_at_once_lose_nothing(settings):
    """Each process sets a different operation; a reader always finds a complete file."""
    before = '{"pv": "mxint8"}'
    settings.write_text(before)
    processes = [writer(settings, operation, 100) for operation in ("linear", "qk")]
    seen = set()
    while any(process.poll() is None for process in processes):
        found = read_settings(settings)  # raises if the file is incomplete
        assert found["pv"] == "mxint8"
        seen.add(tuple(sorted(found.items())))
    assert [process.wait() for process in processes] == [0, 0]
    assert read_settings(settings) == {"linear": "mxfp8", "qk": "mxfp8", "pv": "mxint8"}
    assert len(seen) > 1, "the reader saw changes"
    assert json.loads(settings.with_name("settings.json.backup").read_text()) == {"before": before}
    names = {each.name for each in settings.parent.iterdir()}
    assert names == {"settings.json", "settings.json.backup", "settings.json.lock"}


def test_a_process_that_is_killed_leaves_a_whole_file_and_no_lock(settings, call):
    process = writer(settings, "linear", 10**9)
    assert process.stdout.readline() == "ready\n"
    end = time.monotonic() + 60
    while not settings.exists():
        assert time.monotonic() < end
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert read_settings(settings).keys() == {"linear"}
    call("--qk-quant", "mxfp4")
    assert read_settings(settings)["qk"] == "mxfp4"
    call("--restore")
    assert not settings.exists()


def test_it_runs_from_anywhere(tmp_path):
    script = REPO / "script" / "quant_type_modifier.py"
    variables = environment(QUANT_SETTINGS_FILE=NO_SETTINGS)
    done = forks.run(script, "--check", cwd=tmp_path, env=variables, libraries_only=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("linear: bf16 (default)")
    done = forks.run(script, "--help", cwd=tmp_path, env=variables, libraries_only=True)
    assert "--restore" in done.stdout
