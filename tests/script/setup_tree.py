"""Copy the files that script/setup_env.sh needs; the only requirement is a wheel made here.

Most tests use a Python whose `ensurepip` links a pip that is installed once, because unpacking and
compiling pip takes seconds. At least one test of each file uses the real `ensurepip`.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.subprocesses import REPO, environment, run

# Programs besides Python that the script calls, for a PATH that contains nothing else.
TOOLS = ("bash", "cp", "dirname", "grep", "mkdir", "mv", "readlink", "rm", "sed", "tail")
TABLES = """
RUNTIME = {"lab-runtime": ">=1.0"}
TEST = {}
LINT = {"lab-lint": "==1.0"}
"""


def wheel(folder: Path, name: str, release: str) -> None:
    """Write the smallest wheel that pip installs."""
    module = name.replace("-", "_")
    info = f"{module}-{release}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{release}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}.py", f"release = {release!r}\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", f"{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")


class Tree:
    """A copy of the files that the script needs, in a folder whose name contains a space."""

    def __init__(self, folder: Path, name: str = "a tree"):
        self.root = folder / name
        self.venv_python = self.root / ".venv/bin/python"
        self.wheels = folder / "wheels"
        self.bin = folder / "bin"
        (self.root / "script").mkdir(parents=True)
        self.wheels.mkdir()
        self.bin.mkdir()
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None, name
            (self.bin / name).symlink_to(found)
        shutil.copy(REPO / "script/setup_env.sh", self.root / "script")
        source = (REPO / "setup.py").read_text()
        before, after = source.split("\nif __name__", 1)
        (self.root / "setup.py").write_text(f"{before}{TABLES}\nif __name__{after}")
        (self.root / "megatron/core").mkdir(parents=True)
        shutil.copy(REPO / "megatron/core/_overlay.py", self.root / "megatron/core")
        for release in ("1.0", "1.1"):
            wheel(self.wheels, "lab-runtime", release)
        wheel(self.wheels, "lab-lint", "1.0")
        self.pin("1.0")
        self.python("python3")

    def pin(self, release: str) -> None:
        """Pin the release of lab-runtime that .venv should have."""
        constraints = f"lab-runtime=={release}\nlab-lint==1.0\n"
        (self.root / "script/constraints.txt").write_text(constraints)

    def require_the_real_packages(self) -> None:
        for name in ("setup.py", "script/constraints.txt"):
            shutil.copy(REPO / name, self.root / name)

    def python(self, name: str, body: str | None = None) -> None:
        """Put a Python into PATH: the one that runs the tests, or the script `body`."""
        path = self.bin / name
        path.write_text("#!/bin/bash\n" + (body or f'exec "{sys.executable}" "$@"') + "\n")
        path.chmod(0o755)

    def environment(self, **changes: str) -> dict[str, str]:
        keep = {k: v for k, v in environment().items() if not k.startswith(("PIP_", "LAB_"))}
        keep["PATH"] = str(self.bin)
        offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"}
        return keep | offline | {"PIP_FIND_LINKS": str(self.wheels)} | changes

    def command(self, *options: str) -> list[str]:
        return [str(self.bin / "bash"), str(self.root / "script/setup_env.sh"), *options]

    def call(self, *options: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return run(self.command(*options), cwd=self.root.parent, env=self.environment(**changes))

    def installed(self) -> str:
        """Return the release of lab-runtime that .venv imports."""
        return run([self.venv_python, "-c", "print(__import__('lab_runtime').release)"]).stdout

    def check_made(self, result: subprocess.CompletedProcess[str]) -> None:
        assert result.returncode == 0, result.stderr
        assert result.stdout == f"{self.venv_python}\n"
        assert self.installed() == "1.0\n"


def check_error(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode != 0
    assert result.stdout == ""
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("[ERROR] "), result.stderr
    for part in parts:
        assert part in last


#: Program `ensurepip` of a stand-in: links the packages of a folder, such as pip, into the running
#: environment.
LINK_PIP = """
import os, sysconfig
source, target = {folder!r}, sysconfig.get_path("purelib")
os.makedirs(target, exist_ok=True)
for name in os.listdir(source):
    if not os.path.lexists(os.path.join(target, name)):
        os.symlink(os.path.join(source, name), os.path.join(target, name))
"""


def install_pip(folder: Path) -> None:
    """Make a virtual environment, whose pip comes from the real `ensurepip`."""
    run([sys._base_executable, "-m", "venv", folder])
    (packages,) = folder.glob("lib/python3*/site-packages")
    assert (packages / "pip").is_dir()


def separate_python(folder: Path, *, linked_pip: Path | None = None) -> Path:
    """Make a Python installation with its own packages, as a stand-in for the user's Python.

    A faulty pip call would install into its site-packages (on Debian, dist-packages). Its standard
    library is that of the running Python. The test is skipped if the copied interpreter does not
    use the new folder as its home, because a faulty pip call would then reach a real Python.

    Args:
        folder: folder in which to make the installation.
        linked_pip: folder of packages that its `ensurepip` links; None: the real `ensurepip`.
    """
    library = Path(sysconfig.get_path("stdlib"))
    home = folder / "user's python"
    copied = home / "lib" / library.name
    (home / "bin").mkdir(parents=True)
    (copied / "site-packages").mkdir(parents=True)
    for entry in library.iterdir():
        if entry.name not in ("site-packages", "dist-packages"):
            (copied / entry.name).symlink_to(entry)
    if linked_pip is not None:
        (copied / "ensurepip").unlink()
        (copied / "ensurepip").mkdir()
        (copied / "ensurepip/__init__.py").touch()
        (copied / "ensurepip/__main__.py").write_text(LINK_PIP.format(folder=str(linked_pip)))
    python = home / "bin" / "python3"
    shutil.copy(Path(sys._base_executable).resolve(), python)
    show = "import sys, sysconfig; print(sys.prefix, sysconfig.get_path('purelib'), sep='\\n')"
    said = run([python, "-I", "-c", show]).stdout.splitlines()
    if said[:1] != [str(home)] or not Path(said[1]).is_relative_to(home):
        pytest.skip(f"a copy of {sys._base_executable} installs elsewhere: {said}")
    return python
