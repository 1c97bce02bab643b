#!/usr/bin/env python3
"""Run the tests and a driver at both ends of the version ranges, and print a table of the results.

  PATH=...:$PATH python3 script/check_versions.py            # all environments, about an hour each
  python3 script/check_versions.py lowest -- --quick         # one environment, the quick tests
  python3 script/check_versions.py --install-only newest     # make the environment and stop

Each environment is made once with pip in the folder of --folder, and takes 2 to 6 GB. Its Python,
such as python3.10, must be in PATH. An existing environment, such as one that was made by hand with
PyTorch's CPU build, is used as it is. In it, `bash tests/run_tests.sh` runs with the
options that follow `--`. Then `bash run_tensor_collection.sh single mxfp8` collects tensors, and
`python -m megatron.analysis verify` checks them. The table has the columns of docs/requirements.md.
The exit status is 1 if a test or the driver fails.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import runpy
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
TABLES = runpy.run_path(str(REPO / "setup.py"))
#: Packages whose installed releases are columns of the table.
SHOWN = ("torch", "megatron-core", "numpy", "numba", "pandas", "matplotlib", "transformers")
COLUMNS = ("environment", "Python", *SHOWN, "tests", "driver", "date")


@dataclass(frozen=True)
class Environment:
    """A Python installation with packages, in which the tests run."""

    name: str
    python: str  #: version of Python
    releases: str  #: releases of all packages: lowest, newest or pinned
    exact: tuple[str, ...] = ()  #: requirements that replace those of their package


ENVIRONMENTS = (
    Environment("lowest", "3.10", "lowest"),
    Environment("pins", "3.11", "pinned"),
    Environment("torch-2.11", "3.12", "newest", ("torch==2.11.0",)),
    Environment("newest", "3.13", "newest"),
)


def requirements(environment: Environment) -> list[str]:
    """Return the requirements that pip installs into an environment."""
    replaced = {line.partition("==")[0] for line in environment.exact}
    groups = TABLES["RUNTIME"] | TABLES["TEST"]
    # torch's CUDA builds install the triton that fits them; `install` adds one to CPU builds.
    kept = {name: groups[name] for name in groups if name not in (*replaced, "triton")}
    lines = TABLES["requirements"](kept)
    if environment.releases == "lowest":
        lines = [re.sub(r">=([\d.]+)[^;]*", r"==\1", line, count=1) for line in lines]
    return [*environment.exact, *lines]


def install(environment: Environment, folder: Path) -> Path:
    """Make an environment unless it exists, and return its interpreter.

    Raises:
        SystemExit: if Python is not in PATH, or Python or pip fails.
    """
    python = folder / environment.name / "bin" / "python"
    if python.is_file():
        return python
    base = shutil.which(f"python{environment.python}")
    if base is None:
        raise SystemExit(f"[ERROR] no python{environment.python} in PATH; add its folder to PATH")
    if subprocess.run([base, "-m", "venv", python.parents[1]], check=False).returncode:
        shutil.rmtree(python.parents[1], ignore_errors=True)
        raise SystemExit(
            f"[ERROR] {base} could not create a virtual environment; see the message above"
        )
    pip = [python, "-m", "pip", "install", "--quiet"]
    pinned = ["--constraint", str(REPO / "script/constraints.txt")]
    pinned = pinned if environment.releases == "pinned" else []
    packages = [*requirements(environment), *pinned]
    triton = [*TABLES["requirements"]({"triton": TABLES["TEST"]["triton"]}), *pinned]
    for arguments in (["--upgrade", "pip"], packages, triton):
        if subprocess.run([*pip, *arguments], check=False).returncode:
            shutil.rmtree(python.parents[1])
            raise SystemExit(f"[ERROR] pip failed in {environment.name}; its message is above")
    return python


def check(environment: Environment, python: Path) -> None:
    """Exit with an error unless the tests and the driver would accept the environment's Python.

    Raises:
        SystemExit: if its packages are not within the ranges of setup.py.
    """
    code = (
        "import importlib.metadata as m, runpy, sys\n"
        "def installed(name):\n"
        "    try:\n"
        "        return m.version(name)\n"
        "    except m.PackageNotFoundError:\n"
        "        return None\n"
        "tables = runpy.run_path(sys.argv[1])\n"
        "print(tables['misfits'](installed, tables['RUNTIME'], tables['TEST']))"
    )
    command = [python, "-c", code, REPO / "setup.py"]
    if misfits := subprocess.check_output(command, text=True).strip():
        raise SystemExit(
            f"[ERROR] the tests would not use {python}, because {misfits}; install the required "
            f"releases there, or delete {python.parents[1]} to make {environment.name} again"
        )


def collects(python: Path, folder: Path, settings: dict[str, str]) -> bool:
    """Collect tensors with the driver; return whether this succeeds and `verify` finds no error."""
    command = ["bash", "run_tensor_collection.sh", "single", "mxfp8"]
    command += ["--start-iterations", "0", "--tensor-path", str(folder)]
    driver = subprocess.run(command, cwd=REPO, env=settings, stdout=sys.stderr, check=False)
    verify = [python, "-m", "megatron.analysis", "verify", str(folder / "mxfp8"), "--run", "latest"]
    return (
        driver.returncode == 0
        and subprocess.run(verify, cwd=REPO, stdout=sys.stderr, check=False).returncode == 0
    )


def row(environment: Environment, python: Path, pytest: list[str]) -> tuple[list[str], bool]:
    """Run the tests and the driver in an environment; return its row, and whether all passed."""
    settings = os.environ | {"LAB_PYTHON": str(python)}
    code = f"import importlib.metadata as m; print(*map(m.version, {SHOWN}))"
    releases = subprocess.check_output([python, "-c", code], text=True).split()
    tests = subprocess.Popen(
        ["bash", "tests/run_tests.sh", *pytest],
        cwd=REPO,
        env=settings,
        stdout=subprocess.PIPE,
        text=True,
    )
    last = ""
    for line in tests.stdout or ():
        print(line, end="", file=sys.stderr)
        last = line if line.strip() else last
    failed = bool(tests.wait())
    counts = re.findall(r"\d+ (?:failed|passed|skipped|errors?)\b", last)
    collected = collects(python, python.parents[1] / "tensors", settings)
    date = datetime.date.today().isoformat()
    result = ", ".join(counts) or "did not run", "passed" if collected else "failed"
    cells = [environment.name, environment.python, *releases, *result, date]
    return cells, collected and not failed


def main() -> int:
    """Check the requested environments, and return the exit status."""
    names = [environment.name for environment in ENVIRONMENTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names) + " (all)")
    parser.add_argument(
        "--folder",
        type=Path,
        default=REPO / ".versions",
        help="folder of the environments (.versions)",
    )
    parser.add_argument("--install-only", action="store_true", help="make the environments only")
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    arguments, pytest = parser.parse_args(words[:cut]), words[cut + 1 :]
    if unknown := sorted(set(arguments.names) - set(names)):
        parser.error(f"no environment {unknown[0]!r}; choose from {', '.join(names)}")
    lines, passed = [COLUMNS, ["---"] * len(COLUMNS)], True
    for environment in ENVIRONMENTS:
        if arguments.names and environment.name not in arguments.names:
            continue
        python = install(environment, arguments.folder.resolve())
        check(environment, python)
        if not arguments.install_only:
            cells, success = row(environment, python, pytest)
            lines.append(cells)
            passed &= success
    if not arguments.install_only:
        print("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
