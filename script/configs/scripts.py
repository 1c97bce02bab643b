"""The generated scripts, one for each model, dataset and quantization."""

from __future__ import annotations

from pathlib import Path

from configs.datasets import DATASETS
from configs.lookup import ConfigError
from configs.models import MODELS
from configs.quantizations import QUANTIZATIONS, describe
from configs.resolve import REPO

FOLDER = REPO / "script"
#: A line of every generated script; no other file is ever removed.
MARK = "# Made by script/train_config.py --write-scripts from script/configs/; change it there."

TEXT = """\
#!/usr/bin/env bash
# Train {title} on {dataset_title}: {about}.
#
#   bash {path}
#   bash {path} --preset tiny --train-iters 2
#   bash {path} --nproc-per-node 8 -- --seed 7
#
# Options are those of script/train_config.py; what follows -- goes to pretrain_gpt.py.
{mark}
set -euo pipefail

# shellcheck source=script/driver.sh
source "$(dirname -- "${{BASH_SOURCE[0]}}")/../driver.sh"
train_config --model {model} --dataset {dataset} --quantization {quantization} "$@"
"""


def scripts() -> dict[Path, str]:
    """The text of each script, by its path."""
    found = {}
    for model, published in MODELS.items():
        for dataset, source in DATASETS.items():
            for quantization in QUANTIZATIONS:
                path = FOLDER / model / f"pretrain_{model}_{dataset}_{quantization}.sh"
                found[path] = TEXT.format(
                    title=published.title,
                    dataset_title=source.title,
                    about=describe(quantization),
                    path=path.relative_to(REPO),
                    mark=MARK,
                    model=model,
                    dataset=dataset,
                    quantization=quantization,
                )
    return found


def generated() -> list[Path]:
    """The scripts that are there."""
    return sorted(
        path
        for path in FOLDER.glob("*/pretrain_*.sh")
        if MARK in path.read_text(encoding="utf-8").splitlines()
    )


def write_scripts() -> str:
    """Write those that differ and remove those that the tables no longer have; says what was done.

    Raises:
        ConfigError: the tree cannot be written to.
    """
    wanted = scripts()
    stale = [path for path in generated() if path not in wanted]
    changed = [p for p, text in wanted.items() if not p.is_file() or p.read_text() != text]
    try:
        for path in changed:
            path.parent.mkdir(exist_ok=True)
            partial = path.with_suffix(".partial")
            partial.write_text(wanted[path], encoding="utf-8")
            partial.chmod(0o755)
            partial.replace(path)
        for path in stale:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to {FOLDER}: {error.strerror}; make it writable") from None
    return f"{len(wanted)} scripts: {len(changed)} written, {len(stale)} removed"
