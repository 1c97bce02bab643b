"""Helpers that start `pretrain_gpt.py` with injected faults and read the result of the run."""

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests import forks
from tests.subprocesses import REPO, environment, free_port
from tests.training.runs import MOCK_DATA, NO_DROPOUT

WORKER = Path(__file__).with_name("faulty_worker.py")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
PIPELINE = ("--pipeline-model-parallel-size", "2")
LAYOUTS = {"one": (1, ()), "tensor": (2, TENSOR), "pipeline": (2, PIPELINE)}
TENSORS = 4 * (4 * (4 * 6 + 8 - 4) + 4)  #: tensors per iteration of 4 layers and 4 micro-batches
STOPPED = "collection stopped after "


@dataclass
class Ended:
    """The result of a run that has ended."""

    statuses: list[int]  #: exit status of each rank
    output: str
    errors: str
    steps: list[dict[str, float]]  #: loss and gradient norm per iteration, unrounded
    cards: list[dict] = field(default_factory=list)  #: run cards in the dump
    memory: dict[str, int] = field(default_factory=dict)  #: bytes on the first rank: limit, peak

    def said(self, words: str) -> int:
        """Return the number of lines on stderr that contain the words, without final errors."""
        lines = self.errors.splitlines()
        return sum(words in line and "[ERROR]" not in line for line in lines)

    def reported(self, words: str) -> int:
        """Return the number of final errors that contain the words."""
        return sum(words in line and "[ERROR]" in line for line in self.errors.splitlines())


@dataclass
class Started:
    """The processes of a running training, one per rank.

    They are started without torchrun, which would end the other ranks when one fails.
    """

    processes: list[forks.Program]
    scratch: Path
    dump: Path

    def end(self) -> Ended:
        """Wait until all ranks have ended, and return the result of the run."""
        outputs = [process.communicate() for process in self.processes]
        steps, memory = self.scratch / "steps.json", self.scratch / "memory.json"
        cards = sorted(self.dump.glob("run_*.json"))
        return Ended(
            [process.returncode for process in self.processes],
            "".join(out for out, _ in outputs),
            "".join(err for _, err in outputs),
            json.loads(steps.read_text()) if steps.exists() else [],
            [json.loads(card.read_text()) for card in cards],
            json.loads(memory.read_text()) if memory.exists() else {},
        )


def start(
    scratch: Path,
    *options: str | Path,
    layout: str = "one",
    dump: Path | None = None,
    collect: bool = True,
    **faults: str | float | Path,
) -> Started:
    """Start a run of six iterations that collects everything, unless `options` limit it.

    Args:
        scratch: an empty folder for the files of the run.
        layout: one of LAYOUTS.
        dump: folder of the tensors.
        faults: faults to inject, see faulty_worker.py.
    """
    dump = scratch / "dump" if dump is None else dump
    ranks, flags = LAYOUTS[layout]
    words: list[str | Path] = [*MOCK_DATA, *NO_DROPOUT, *flags]
    if collect:
        words += ["--save-tensors", "--tensor-save-dir", dump, "--collect-micro-batches", "0"]
        words += ["--collect-keep-free-gib", "0"]
        if not {"--collect-ring", "--collect-iterations"} & set(options):
            words += ["--control-iter", "0"]
    scratch.mkdir(parents=True, exist_ok=True)
    env = environment(
        PYTHONPATH=REPO,
        STEPS_FILE=scratch / "steps.json",
        MEMORY_FILE=scratch / "memory.json",
        FAULTS=json.dumps({name: str(value) for name, value in faults.items()}),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
    )
    processes = [
        forks.start(
            *(WORKER, *words, *options), env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(ranks)
    ]
    return Started(processes, scratch, dump)


def losses(ended: Ended) -> list[tuple[float, float]]:
    """Return the loss and gradient norm of each iteration."""
    return [(step["loss"], step["norm"]) for step in ended.steps]


def verify(folder: Path, run_id: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m megatron.analysis verify` on one run of a folder."""
    command = ("-m", "megatron.analysis", "verify", folder, "--run", run_id)
    return forks.run(*command, env=environment(PYTHONPATH=REPO))
