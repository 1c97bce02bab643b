"""Runs of a small GPT in processes of their own, and the tensors that they collect."""

import json
from pathlib import Path

import torch

from megatron.tensor_record import read_index
from tests import forks
from tests.subprocesses import REPO, environment

WORKER = Path(__file__).with_name("gpt_worker.py")
PER_LAYER = 4 * 6 + 8  #: four linear layers of six tensors, attention's eight
WEIGHTS = 4  #: weights per layer, stored once per iteration
#: Start of a program with a small GPT's options; the code of a test follows.
PRELUDE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch, gpt_worker
options = gpt_worker.parse([])
gpt_worker.start(options)
from megatron.core import tensor_saver
from megatron.core.models.gpt import gpt_layer_specs
"""
BUILD = "model = gpt_worker.build(options)[0]\n"


def reports(folder: Path, env: dict[str, str], ranks: int, *options: str) -> list[dict]:
    """Train on some ranks; return the losses and gradients that each rank reports."""
    folder.mkdir(parents=True)
    result = forks.run(
        WORKER, *options, ranks=ranks, cwd=folder, env=env | {"REPORT_DIR": str(folder)}
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]


def collect(
    dump: Path, *options: str, ranks: int = 1, flags: dict | None = None, **variables: str
) -> list[dict]:
    """Run the worker with collection on; return the index lines of all ranks with their tensors.

    `flags` are further arguments of `configure`.
    """
    script = dump.parent / "collect_all.py"
    script.write_text(COLLECT_ALL.format(worker=str(WORKER), flags=flags or {}))
    env = environment(PYTHONPATH=REPO, TENSOR_SAVE_DIR=dump, **variables)
    result = forks.run(script, *options, ranks=ranks, cwd=dump.parent, env=env)
    assert result.returncode == 0, result.stderr[-3000:]
    return loaded(dump)


def loaded(dump: Path) -> list[dict]:
    """Return the records of a dump with their tensors, after comparing files and indexes."""
    records = [r for path in sorted(dump.glob("index_*.jsonl")) for r in read_index(path)]
    for record in records:
        payload = torch.load(dump / record["file"], weights_only=True, mmap=True)
        parts = {"tensor", "metadata", "scales"} if record["codes"] else {"tensor", "metadata"}
        assert payload.keys() == parts
        assert record == payload["metadata"] | {"file": record["file"], "bytes": record["bytes"]}
        record["tensor"] = payload["tensor"]
    return records


#: The worker under a trainer that configures collection: all iterations and micro-batches.
COLLECT_ALL = """
import runpy, sys
import torch
if not torch.cuda.is_available():
    import megatron.cpu_backend
    megatron.cpu_backend.activate()
from megatron.core import parallel_state, tensor_saver
initialize = parallel_state.initialize_model_parallel
def then_configure(*args, **kwargs):
    initialize(*args, **kwargs)
    everything = dict(save_tensors=True, control_iter=0, collect_micro_batches=0)
    tensor_saver.configure({{}}, **(everything | {flags!r}))
parallel_state.initialize_model_parallel = then_configure
sys.argv[0] = {worker!r}
runpy.run_path({worker!r}, run_name="__main__")
tensor_saver.close()
"""


def expected(layers: int, micro_batches: int, iterations: int = 1) -> int:
    """Return the number of tensors of some layers."""
    of_layer = (PER_LAYER - WEIGHTS) * micro_batches + WEIGHTS
    return layers * of_layer * iterations


def pick(records, **wanted):
    """Return the records with the given values."""
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def one(records, **wanted) -> torch.Tensor:
    """Return the tensor of the only record with the given values."""
    (record,) = pick(records, **wanted)
    return record["tensor"]
