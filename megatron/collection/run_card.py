"""Build the content of the run card, a JSON file that describes the run.

Rank 0 writes the card when the run begins and replaces it when the run ends.
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.fake_quant import policy
from megatron.tensor_record import SCHEMA_VERSION, safe_name

RankOutcomes = list[dict[str, Any]]  #: results of `Collector.outcome` on all ranks

PACKAGES = ("torch", "megatron-core", "numpy", "transformer-engine")
DEFAULT_FOLDER = "enhanced_tensor_logs"
#: Prefixes of the environment variables that the run card lists.
VARIABLES = (
    *policy.VARIABLES,
    "TENSOR_SAVE",
    "CUDA",
    "CUBLAS",
    "NCCL",
    "NVIDIA_TF32",
    "NVTE",
    "OMP_NUM_THREADS",
    "LAB_FUSED",
)
#: Kinds of parallel groups: tensor, pipeline, data, context, expert and expert-tensor parallel.
GROUPS = ("tp", "pp", "dp", "cp", "ep", "etp")
ROOT = Path(__file__).resolve().parents[2]


def collection_folder(save_dir: str | None) -> Path:
    """Return the folder of the collection.

    It is `save_dir`, or TENSOR_SAVE_DIR if that is None, or `enhanced_tensor_logs/<type>`.
    """
    default = Path(DEFAULT_FOLDER, safe_name(policy.current().quant_type))
    return Path(save_dir or os.environ.get("TENSOR_SAVE_DIR") or default)


def rank_coordinates(groups: Mapping[str, tuple[int, int]] | None = None) -> dict[str, int]:
    """Return this process's rank in each of its parallel groups, and the sizes of the groups.

    Args:
        groups: rank in each parallel group and size of the group, by the names in `GROUPS`. A
            missing group counts as a group of one rank.
    """
    world, world_size = 0, 1
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        world, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    coordinates = {"world": world, "world_size": world_size}
    for group in GROUPS:
        coordinates[group], coordinates[f"{group}_size"] = (groups or {}).get(group, (0, 1))
    return coordinates


def collect_run_card(
    run_id: str, args: dict[str, Any], coordinates: Mapping[str, int]
) -> dict[str, Any]:
    """Return the entries of the run card that describe the run, as plain values.

    They include the arguments, formats, package versions, commit, topology and seed.
    """
    current = policy.current()
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "quant_type": current.quant_type,
        "formats": current.describe(),
        "recipe": None
        if current.recipe is None
        else {"path": str(current.recipe.path), "digest": current.recipe.digest},
        "arguments": {key: _plain(value) for key, value in sorted(args.items())},
        "seed": args.get("seed"),
        "topology": dict(coordinates),
        "versions": {"python": platform.python_version()} | _versions(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "git": _git(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
    }


def _plain(value: Any) -> Any:
    plain = (bool, int, float, str, list, tuple, type(None))
    return value if isinstance(value, plain) else str(value)


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git() -> dict[str, Any] | None:
    """Return the repository's commit, and whether tracked files differ from it.

    Return None if git is not installed or this is not a repository.
    """
    try:
        commit, status = (
            subprocess.run(
                ["git", "-C", str(ROOT), *command],
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            ).stdout.strip()
            for command in (
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "modified": bool(status)}


def run_status(ranks: RankOutcomes, aborted: str | None) -> str:
    """Return the status of the run: "failed", "limited", "aborted" or "finished".

    A failure of the collection, or a limit that was reached, takes precedence over how training
    ended.
    """
    if any(rank["error"] for rank in ranks):
        return "failed"
    if any(rank["limit"] for rank in ranks):
        return "limited"
    return "finished" if aborted is None else "aborted"


def run_outcome(ranks: RankOutcomes, status: str, reason: str | None) -> dict[str, Any]:
    """Return the entries of the run card that describe the current state of the run."""
    return {
        "status": status,
        "ranks": ranks,
        "reason": reason,
        "error": next((rank["error"] for rank in ranks if rank["error"]), None),
        "limit": next((rank["limit"] for rank in ranks if rank["limit"]), None),
    }


def failure_of(ranks: RankOutcomes) -> str | None:
    """Return the error of the lowest rank that failed, with the numbers of all failed ranks.

    Return None if no rank failed.
    """
    failed = [rank for rank in ranks if rank["error"]]
    if not failed:
        return None
    numbers = ", ".join(str(rank["rank"]) for rank in failed)
    return f"rank {numbers}: {failed[0]['error']}" if len(ranks) > 1 else failed[0]["error"]
