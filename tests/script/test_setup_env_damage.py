"""Test that a damaged .venv is made again, and that pip never installs outside of .venv.

A fault would change a stand-in for the user's Python, which has its own folder for packages.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.script.setup_tree import Tree, check_error, separate_python
from tests.subprocesses import run


def tree_in(folder: Path, *, linked_pip: Path | None = None) -> Tree:
    """Create a tree whose python3 is the stand-in for the user's Python."""
    made = Tree(folder)
    made.user_python = separate_python(folder, linked_pip=linked_pip)
    made.python("python3", f'exec "{made.user_python}" "$@"')
    return made


@pytest.fixture
def tree(tmp_path: Path, linked_pip: Path) -> Tree:
    return tree_in(tmp_path, linked_pip=linked_pip)


@pytest.fixture
def tree_with_ensurepip(tmp_path: Path) -> Tree:
    """Return a tree whose python3 has the real `ensurepip`."""
    return tree_in(tmp_path)


@pytest.fixture(scope="module")
def complete(tmp_path_factory, linked_pip: Path) -> Tree:
    """Return a tree with a complete .venv, which each test of damage repairs."""
    made = tree_in(tmp_path_factory.mktemp("complete"), linked_pip=linked_pip)
    made.check_made(made.call())
    return made


def users_packages(tree: Tree) -> list[str]:
    """Return everything that is installed in the user's Python."""
    home = tree.user_python.parent.parent
    packages = home.rglob("*-packages/*")  # site-packages, or dist-packages under Debian
    programs = [path for path in home.rglob("bin/*") if path.name != "python3"]
    return [str(path) for path in (*packages, *programs)]


def lose_configuration(venv: Path) -> None:
    (venv / "pyvenv.cfg").unlink()


def empty_configuration(venv: Path) -> None:
    (venv / "pyvenv.cfg").write_text("")


def interrupted_removal(venv: Path) -> None:
    """An interrupted `rm -rf` has removed everything except bin and site-packages."""
    for entry in venv.iterdir():
        if entry.name not in ("bin", "lib"):
            entry.unlink() if entry.is_file() or entry.is_symlink() else shutil.rmtree(entry)


def lose_python(venv: Path) -> None:
    for path in (venv / "bin").glob("python*"):
        path.unlink()


def dangling_python(venv: Path) -> None:
    lose_python(venv)
    (venv / "bin/python").symlink_to("/nonexistent/python")


def python_is_a_folder(venv: Path) -> None:
    lose_python(venv)
    (venv / "bin/python").mkdir()


def foreign_home(venv: Path) -> None:
    text = (venv / "pyvenv.cfg").read_text()
    lines = ["home = /nonexistent" if "home" in line else line for line in text.splitlines()]
    (venv / "pyvenv.cfg").write_text("\n".join(lines))


def lose_packages(venv: Path) -> None:
    (packages,) = venv.glob("lib/python3*/site-packages")
    shutil.rmtree(packages)


def lose_library(venv: Path) -> None:
    shutil.rmtree(venv / "lib")


def packages_elsewhere(venv: Path) -> None:
    """The site-packages folder is a link to a folder outside of the environment."""
    (packages,) = venv.glob("lib/python3*/site-packages")
    packages.rename(venv.parent / "elsewhere")
    packages.symlink_to(venv.parent / "elsewhere")


RARE = (empty_configuration, lose_python, python_is_a_folder, lose_library)
DAMAGES = (
    lose_configuration,
    interrupted_removal,
    dangling_python,
    lose_packages,  # before foreign_home, after which .venv finds the real and slow ensurepip
    foreign_home,
    packages_elsewhere,
    *(pytest.param(damage, marks=pytest.mark.slow) for damage in RARE),
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_venv_never_reaches_the_users_python(complete, damage: Callable[[Path], None]):
    assert complete.call().stderr == "", "complete"
    before = users_packages(complete)
    damage(complete.root / ".venv")
    elsewhere = complete.root / "elsewhere"
    there = sorted(elsewhere.rglob("*"))
    complete.check_made(complete.call())
    assert users_packages(complete) == before == []
    prefix = run([complete.venv_python, "-c", "import sys; print(sys.prefix)"]).stdout
    assert prefix == f"{complete.root}/.venv\n"
    assert sorted(elsewhere.rglob("*")) == there
    assert complete.call().stderr == "", "the next call finds it complete"


def test_what_this_script_did_not_make_is_renamed_and_not_deleted(tree):
    """A user's own environment loses its configuration twice."""
    for number, aside in enumerate((".venv.damaged", ".venv.damaged.2")):
        venv = tree.root / ".venv"
        shutil.rmtree(venv, ignore_errors=True)
        run([tree.user_python, "-m", "venv", "--without-pip", venv])
        (venv / "mine").write_text(str(number))
        (venv / "pyvenv.cfg").unlink()
        result = tree.call()
        tree.check_made(result)
        assert f"It is now {tree.root}/{aside}: delete it unless you need it." in result.stderr
        assert (tree.root / aside / "mine").read_text() == str(number)
    assert users_packages(tree) == []


def test_a_python_installation_at_venv_is_refused(tree):
    """A .venv made by `conda create` is not a virtual environment, so pip is not run there."""
    home = tree.user_python.parent.parent
    (tree.root / ".venv").mkdir()
    for folder in ("bin", "lib"):
        shutil.copytree(home / folder, tree.root / ".venv" / folder, symlinks=True)
    (tree.root / ".venv/bin/python3").rename(tree.venv_python)
    before = sorted((tree.root / ".venv").rglob("*"))
    check_error(tree.call(), "not a virtual environment", "LAB_PYTHON")
    assert sorted((tree.root / ".venv").rglob("*")) == before


def test_a_file_in_place_of_venv(tree):
    (tree.root / ".venv").write_text("mine")
    check_error(tree.call(), ".venv is not a folder; rename or delete it")
    assert (tree.root / ".venv").read_text() == "mine"


def test_a_link_to_nothing(tree):
    (tree.root / ".venv").symlink_to(tree.root / "absent")
    check_error(tree.call(), ".venv is a link to", "absent", "delete the link")
    assert not (tree.root / "absent").exists()


def test_a_link_to_a_folder_of_the_user(tree):
    """A folder with unknown content is not modified."""
    (tree.root / "documents").mkdir()
    (tree.root / "documents/letter").write_text("dear")
    (tree.root / ".venv").symlink_to(tree.root / "documents")
    check_error(tree.call(), ".venv is a link to", "documents", "delete the link")
    assert [path.name for path in (tree.root / "documents").iterdir()] == ["letter"]


def test_a_link_to_an_empty_folder_on_another_disk(tree):
    (tree.root / "big disk").mkdir()
    (tree.root / ".venv").symlink_to(tree.root / "big disk")
    tree.check_made(tree.call())
    (tree.root / "big disk/pyvenv.cfg").unlink()
    tree.check_made(tree.call())
    assert (tree.root / ".venv").is_symlink()
    assert users_packages(tree) == []


def test_an_interruption_does_not_clear_an_environment_of_the_user(tree):
    """The environment was completed once, and the installation of new pins fails."""
    run([tree.user_python, "-m", "venv", "--without-pip", tree.root / ".venv"])
    (tree.root / ".venv/mine").touch()
    tree.check_made(tree.call())
    tree.pin("9.9")
    check_error(tree.call(), "cannot install the requirements")
    tree.pin("1.0")
    tree.check_made(tree.call())
    assert (tree.root / ".venv/mine").exists()


def test_a_failed_start_of_the_making_is_cleared_by_the_next_call(tree):
    """After `python -m venv` dies midway, the script deletes what it had made itself."""
    tree.python(
        "python3",
        'case " $* " in *" -m venv "*) echo "No space left" >&2; exit 1;; esac; '
        f'exec "{tree.user_python}" "$@"',
    )
    wrapper = tree.bin / "python3"
    (tree.root / "sitecustomize.py").write_text(
        f"import sys\nsys._base_executable = sys.executable = {str(wrapper)!r}\n"
    )
    check_error(tree.call(PYTHONPATH=str(tree.root)), "cannot make", "free the space")
    (tree.root / ".venv/bin").mkdir()
    tree.python("python3", f'exec "{tree.user_python}" "$@"')
    result = tree.call()
    tree.check_made(result)
    assert "damaged" not in result.stderr


@pytest.mark.parametrize("name", ["PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_PYTHON"])
def test_pip_settings_in_the_environment_do_not_lead_elsewhere(tree, name):
    place = tree.root.parent / "place"
    value = str(tree.user_python) if name == "PIP_PYTHON" else str(place)
    tree.check_made(tree.call(**{name: value}))
    assert users_packages(tree) == []
    assert not place.exists()


@pytest.mark.parametrize("line", ["target = {}", "prefix = {}", "python = {}"])
def test_a_pip_configuration_that_leads_elsewhere_is_refused(tree, line):
    place = tree.root.parent / "place"
    value = tree.user_python if line.startswith("python") else place
    section = "global" if line.startswith("python") else "install"
    configuration = tree.root.parent / "pip.conf"
    configuration.write_text(f"[{section}]\n{line.format(value)}\n")
    result = tree.call(PIP_CONFIG_FILE=str(configuration))
    check_error(result, f"{section}.{line.split()[0]}=", "would install elsewhere")
    assert users_packages(tree) == []
    assert not place.exists()
    tree.check_made(tree.call())


def test_pythonhome_is_refused(tree):
    """The variable PYTHONHOME would replace the home of the virtual environment."""
    home = str(tree.user_python.parent.parent)
    check_error(tree.call(PYTHONHOME=home), "PYTHONHOME is set to", "unset it")
    assert users_packages(tree) == []
    assert not (tree.root / ".venv").exists()


def test_modules_of_the_current_folder_do_not_take_pips_place(tree_with_ensurepip):
    tree = tree_with_ensurepip
    (tree.root.parent / "pip.py").write_text("raise SystemExit('not pip')\n")
    (tree.root.parent / "pip").mkdir()
    tree.check_made(tree.call(PYTHONPATH=str(tree.root.parent)))


def test_a_path_with_spaces_quotes_and_substitutions(tmp_path, linked_pip):
    tree = Tree(tmp_path, "a 'b' \"c\" $(touch PWN) `touch PWN` $HOME \\ é")
    python = separate_python(tmp_path, linked_pip=linked_pip)
    tree.python("python3", f'exec "{python}" "$@"')
    tree.check_made(tree.call())
    lose_configuration(tree.root / ".venv")
    tree.check_made(tree.call())
    assert not list(tmp_path.rglob("PWN"))
    assert not (Path.cwd() / "PWN").exists()
