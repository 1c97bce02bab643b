"""Open hostile files in one process with the functions that training uses.

    hostile_checkpoints_worker.py CASES.json RESULTS.json CANARY OPTIONS...

CASES is a list of {"name", "kind", "folder"}; the options are those of pretrain_gpt.py. From the
first case on, the process may use 3 GiB more memory and 100 seconds of CPU time. RESULTS has the
error's message and type, the time in seconds, and whether the canary was touched, for each case.
"""

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from megatron.training import device

device.prepare()

from megatron.training import model  # noqa: E402
from megatron.training.arguments.parse_args import parse_args  # noqa: E402
from megatron.training.checkpointing import save_load  # noqa: E402
from megatron.training.data import datasets  # noqa: E402
from megatron.training.data.tokenizer import build_tokenizer, fingerprint  # noqa: E402
from megatron.training.errors import UserError  # noqa: E402
from megatron.training.hf.loading import check_weights  # noqa: E402
from megatron.training.initialize import initialize  # noqa: E402
from megatron.training.logging import TrainingProgress  # noqa: E402
from megatron.training.low_precision import configure_formats  # noqa: E402
from megatron.training.train_step import TrainingState  # noqa: E402

MEMORY = 3 << 30
CPU_SECONDS = 100


class Worker:
    """A training run that is initialized up to the point at which it opens files."""

    def __init__(self, options: list[str]):
        self.options = options
        self.run = parse_args(options)
        args = self.run.args
        configure_formats(args)
        self.timers = initialize(args)
        args.padded_vocab_size = model.padded_vocab_size(args, args.vocab_size + 1)
        self.tokenizer = build_tokenizer(args.tokenizer_type, None, args.vocab_size)

    def checkpoint(self, folder: str) -> None:
        """Resume from a folder with a new model."""
        run = self.run
        run.transformer.timers = run.optimizer.timers = self.timers
        chunks = model.build_model(run, run.args.padded_vocab_size)
        optimizer = model.build_optimizer(run, chunks)
        run.args.load = folder
        trained = TrainingState(chunks, optimizer, model.build_scheduler(run.args, optimizer))
        save_load.load_checkpoint(run, trained)

    def weights(self, folder: str) -> None:
        """Read a Hugging Face folder up to the point at which the model would be built."""
        words = ("--seq-length", "8", "--micro-batch-size", "1", "--lr", "1", "--train-iters", "1")
        null = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--mock-data")
        check_weights(parse_args([*words, *null, "--load-hf", folder]))

    def tokenizer_of(self, path: str) -> None:
        """Build a tokenizer and use it."""
        fingerprint(build_tokenizer(None, path))

    def cache(self, folder: str) -> None:
        """Build the data sets with the cached sample indices."""
        args = argparse.Namespace(**vars(self.run.args))
        args.data_cache_path = folder
        datasets.build_datasets(args, self.tokenizer, TrainingProgress())


def measured(work: Worker, case: dict[str, str], canary: Path) -> dict[str, Any]:
    """Open one case and return its error, its time and the state of the canary."""
    opened = {
        "checkpoint": work.checkpoint,
        "weights": work.weights,
        "tokenizer": work.tokenizer_of,
        "cache": work.cache,
    }[case["kind"]]
    start, error = time.monotonic(), None
    try:
        opened(case["folder"])
    except UserError as refusal:
        error = refusal
    except BaseException as failure:  # the test reports any other exception
        error = failure
    return {
        "name": case["name"],
        "type": None if error is None else type(error).__name__,
        "message": str(error),
        "seconds": time.monotonic() - start,
        "canary": canary.exists(),
    }


def limit() -> None:
    """Limit the memory and time that the process may use from here on."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (spent, spent))


def main() -> None:
    cases, results, canary = (Path(word) for word in sys.argv[1:4])
    work = Worker(sys.argv[4:])
    limit()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measurements = [measured(work, case, canary) for case in json.loads(cases.read_text())]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    results.write_text(json.dumps({"cases": measurements, "memory": grown}))


if __name__ == "__main__":
    main()
