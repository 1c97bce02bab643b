"""Test that every mistake of `mistakes.py` ends with a single `[ERROR]` that explains it."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests import forks
from tests.analysis.fake_dump import write_dump
from tests.script import mistakes
from tests.subprocesses import NO_SETTINGS, REPO, environment, run
from tests.training.runs import ENTRY

for _folder in ("script/data", "script/visualization"):
    sys.path.append(str(REPO / _folder))

#: Entry points that are bash scripts.
SCRIPTS = {
    "COLLECTION_DRIVER": "run_tensor_collection.sh",
    "DRAW_DRIVER": "run_tensor_draw.sh",
    "TRAINING_SCRIPT": "examples/llama/train_llama32_1b_h100_fp8.sh",
    "ONE_CLICK": "script/one_click_visualize.sh",
    "CELL_SCRIPT": "script/llama32-1b/pretrain_llama32-1b_wikipedia_bf16.sh",
    "DEEPSEEK": "examples/deepseek/train_deepseek2_lite.sh",
    "SLURM": "examples/slurm/pretrain.sh",
    "SLURM_COLLECT": "examples/slurm/collect.sh",
}
#: Entry points in Python whose `main` runs in this process.
MODULES = {
    "ANALYSIS": "megatron.analysis.__main__",
    "FAKE_QUANT": "megatron.fake_quant.__main__",
    "POLICY": "megatron.fake_quant.policy.__main__",
    "TRAIN_CONFIG": "train_config",
    "FLASH": "flash_attention_config",
    "MODIFIER": "quant_type_modifier",
    "VISUALIZE": "script.visualization.quick_visualize",
    "PREPARE": "prepare",
    "PREPROCESS": "preprocess",
    "CORPUS": "default_corpus",
    "COLLECT_RUN": "run",
}


def cases(names):
    """Return one test parameter per mistake in the named tables."""
    return [
        pytest.param(name, words, message, id=f"{name}-{words}")
        for name in names
        for words, message in getattr(mistakes, name)
    ]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Create the files that the placeholders of the tables stand for."""
    folder = tmp_path_factory.mktemp("places")
    write_dump(folder / "dump", layers=1)
    (folder / "empty").mkdir()
    for name in ("file", "tok.model", "d_text_document.bin", "d_text_document.idx"):
        (folder / name).touch()
    (folder / "text.txt").write_text("1 2\n")
    found = {name: str(folder / name) for name in ("dump", "empty", "file", "none")}
    files = {"tok": "tok.model", "data": "d_text_document", "text": "text.txt"}
    return found | {name: str(folder / file) for name, file in files.items()}


def filled(text, places):
    for name, path in places.items():
        text = text.replace(f"{{{name}}}", path)
    return text


def check(status, errors, message):
    """Check that the output has one error and no traceback."""
    assert status not in (0, None), errors
    assert "Traceback" not in errors
    assert errors.count("[ERROR]") == 1, errors
    assert message in errors.partition("[ERROR]")[2], errors


@pytest.mark.parametrize(("name", "words", "message"), cases(MODULES))
def test_a_mistake_in_a_python_program(places, tmp_path, monkeypatch, name, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAB_PYTHON", sys.executable)
    monkeypatch.setenv("QUANT_SETTINGS_FILE", str(NO_SETTINGS))
    for variable in ("DRY_RUN", "TENSOR_SAVE_DIR", "CUSTOM_QUANT_TYPE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(os, "execvpe", lambda *a: pytest.fail("training was started"))
    module = __import__(MODULES[name], fromlist=["main"])
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = module.main(shlex.split(filled(words, places)))
        except SystemExit as ended:
            status = ended.code
    check(status, err.getvalue(), filled(message, places))


@pytest.mark.parametrize(("name", "words", "message"), cases(SCRIPTS))
def test_a_mistake_in_a_shell_script(places, tmp_path, name, words, message):
    env = environment(LAB_PYTHON=forks.interpreter("analysis"))
    for variable in ("DRY_RUN", "NPROC", "SLURM_SUBMIT_DIR"):
        env.pop(variable, None)
    command = ["bash", REPO / SCRIPTS[name], *shlex.split(filled(words, places))]
    done = run(command, cwd=tmp_path, env=env)
    check(done.returncode, done.stderr, filled(message, places))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "words", "message"), cases(["PRETRAIN"]))
def test_a_mistake_in_pretrain_gpt(places, tmp_path, name, words, message):
    done = forks.run(
        ENTRY,
        *shlex.split(filled(words, places)),
        cwd=tmp_path,
        env=environment(PYTHONPATH=REPO),
    )
    check(done.returncode, done.stderr, filled(message, places))


def test_the_list_is_long():
    assert sum(len(cases([name])) for name in (*MODULES, *SCRIPTS, "PRETRAIN")) >= 80
    assert Path(ENTRY).is_file()
