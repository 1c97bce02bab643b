"""Test that every printed command can be copied into a shell, whatever the names of folders."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.script.stub_tree import stub_tree
from tests.subprocesses import REPO, environment, run

#: Name of a folder that a shell would run, expand or split if it is not quoted.
NAME = "x $(touch PWN) `touch PWN` 'y' \"z\" $HOME; touch PWN & *"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Create a folder with the name NAME that contains the drivers, a tokenizer and data."""
    folder = tmp_path_factory.mktemp("printed") / NAME
    stub_tree(folder / "tree", "ok")
    for name in ("tok.model", "text_document.bin", "text_document.idx"):
        (folder / name).touch()
    return folder


def drive(place: Path, script: str, *words: str | Path, **variables: str):
    """Run a driver of the tree from the folder above it."""
    done = run(
        ["bash", place / "tree" / script, *words],
        cwd=place,
        env=environment(LAB_PYTHON=sys.executable, **variables),
    )
    assert "Traceback" not in done.stderr
    return done


def words_of(command: str, scratch: Path) -> list[str]:
    """Return the words that a shell parses from a command, which must not run anything else."""
    scratch.mkdir(exist_ok=True)
    assert subprocess.run(["bash", "-n"], input=command, text=True, check=False).returncode == 0
    show = 'show() { printf "%s\\0" "$@"; }\nshow ' + command
    done = subprocess.run(
        ["bash", "-c", show], cwd=scratch, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    assert list(scratch.iterdir()) == []
    return done.stdout.split("\0")[:-1]


def check_no_substitution_ran(place: Path) -> None:
    assert not list(place.rglob("PWN"))
    assert not (REPO / "PWN").exists()


FILES = ("--tokenizer-path", "tok.model", "--data-path", "text_document", "--preset", "tiny")


@pytest.mark.parametrize("where", ["default", "named"])
def test_the_commands_of_a_collection(place, tmp_path, where):
    base = place / "tree/enhanced_tensor_logs" if where == "default" else place / NAME
    named = [] if where == "default" else ["--tensor-dir", base]
    done = drive(place, "run_tensor_collection.sh", "single", "mxfp8", *FILES, *named)
    assert done.returncode == 0, done.stderr
    training = words_of(done.stdout.splitlines()[1], tmp_path / "shell")
    assert training[:2] == ["bash", str(place / "tree/examples/llama" / training[1].split("/")[-1])]
    assert training[training.index("--tensor-save-dir") + 1] == str(base / "mxfp8")
    [following] = re.findall(r"^  next       (.*)$", done.stdout, re.M)
    expected = ["bash", str(place / "tree/run_tensor_draw.sh"), "visualize"]
    expected += [str(word) for word in named] + ["mxfp8"]
    assert words_of(following, tmp_path / "shell") == expected
    check_no_substitution_ran(place)

    # run the printed command, as a user does
    drawn = run(["bash", "-c", f"DRY_RUN=1 {following}"], cwd=place, env=environment())
    assert drawn.returncode == 0, drawn.stderr
    words = words_of(drawn.stdout.rstrip("\n"), tmp_path / "shell")
    assert words[words.index("--tensor_dir") + 1] == str(base / "mxfp8")
    check_no_substitution_ran(place)


def test_the_command_after_a_batch(place, tmp_path):
    base = place / "batch $(touch PWN)"
    done = drive(place, "run_tensor_collection.sh", "batch", *FILES, "--tensor-dir", base)
    assert done.returncode == 0, done.stderr
    [following] = re.findall(r"^  next       (.*)$", done.stdout, re.M)
    expected = ["bash", str(place / "tree/run_tensor_draw.sh"), "visualize", "--tensor-dir"]
    assert words_of(following, tmp_path / "shell") == [*expected, str(base)]
    check_no_substitution_ran(place)


def test_the_type_of_a_recipe_is_quoted(place, tmp_path):
    recipe = place / f"{NAME}.yaml"
    shutil.copy(REPO / "examples/recipes/ocp_mxfp8.yaml", recipe)
    done = drive(place, "run_tensor_collection.sh", "single", "--quant-recipe", recipe, *FILES)
    assert done.returncode == 0, done.stderr
    [following] = re.findall(r"^  next       (.*)$", done.stdout, re.M)
    words = words_of(following, tmp_path / "shell")
    assert words[:3] == ["bash", str(place / "tree/run_tensor_draw.sh"), "visualize"]
    assert words[3:] == [f"recipe_{NAME}"]
    check_no_substitution_ran(place)


def in_backquotes(text: str) -> str:
    """Return the command that a message recommends between backquotes."""
    programs = f"bash|{re.escape(sys.executable)}"
    [command] = re.findall(rf"(?:with|which) `((?:{programs}) .*)`", text)
    return command


def test_the_command_that_a_missing_folder_recommends(place, tmp_path):
    base = place / "empty $(touch PWN)"
    base.mkdir(exist_ok=True)
    for named in ([], ["--tensor-dir", base]):
        done = drive(place, "run_tensor_draw.sh", "visualize", "mxfp4", *named)
        assert done.returncode == 1
        expected = ["bash", str(place / "tree/run_tensor_collection.sh"), "single", "mxfp4"]
        expected += [str(word) for word in named]
        assert words_of(in_backquotes(done.stderr), tmp_path / "shell") == expected
    check_no_substitution_ran(place)


@pytest.mark.parametrize("dry", ["", "1"])
def test_the_command_that_makes_missing_data(place, tmp_path, dry):
    words = ("--tokenizer-path", "tok.model", "--data-path", place / "absent", "--preset", "tiny")
    done = drive(
        place,
        "run_tensor_collection.sh",
        "single",
        "mxfp8",
        *words,
        **({"DRY_RUN": dry} if dry else {}),
    )
    recommended = [line for line in done.stderr.splitlines() if "preprocess.py" in line]
    assert recommended, done.stderr
    command = words_of(in_backquotes(recommended[0]), tmp_path / "shell")
    assert command[command.index("--output-prefix") + 1] == str(place / "absent")
    assert command[1] == str(place / "tree/script/data/preprocess.py")
    check_no_substitution_ran(place)


def test_the_commands_of_a_dry_run(place, tmp_path):
    script = "run_tensor_draw.sh"
    base = place / "dry $(touch PWN)"
    named = ("--tensor-dir", base, "--output-dir", place / NAME)
    done = drive(place, script, "both", "mxfp8", *FILES, *named, DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    for line, flag, value in zip(
        done.stdout.splitlines(),
        ("--tensor-save-dir", "--output_dir"),
        (base / "mxfp8", place / NAME),
        strict=True,
    ):
        words = words_of(line, tmp_path / "shell")
        assert words[words.index(flag) + 1] == str(value)
    script = "script/visualization/one_click_visualize.sh"
    done = drive(place, script, base, place / NAME, DRY_RUN="1")
    words = words_of(done.stdout.rstrip("\n"), tmp_path / "shell")
    assert words[-3:] == [str(base), "--output-dir", str(place / NAME)]
    check_no_substitution_ran(place)


WORDS = (
    "",
    "a",
    "a b",
    "it's",
    '"',
    "$(touch PWN)",
    "`x`",
    "~",
    "\\",
    "*",
    "a\nb",
    "é",
    "-x=1",
    "!",
)


def test_the_shells_quoting_is_pythons():
    script = f'source {shlex.quote(str(REPO / "script/driver.sh"))}; quoted "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", *WORDS], capture_output=True, text=True, check=True
    )
    assert done.stdout == shlex.join(WORDS) + "\n"
    assert shlex.split(done.stdout) == list(WORDS)


def test_no_script_puts_a_command_together_without_quoting():
    """Every path in a printed command is passed through the shell function `quoted`."""
    pattern = re.compile(r"""["'`](?:bash|python3?|torchrun) [^"]*\$(?!\(quoted)""")
    for path in [*REPO.glob("*.sh"), *(REPO / "script").rglob("*.sh")]:
        found = [line for line in path.read_text().splitlines() if pattern.search(line)]
        assert not found, f"{path}: {found}"
