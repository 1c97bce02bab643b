"""Train the model of `training_worker.py` and collect its tensors, for `collection.py`.

For each line of standard input, the worker trains one step and prints the measurements in `FIELDS`
as a line of JSON. For the line `disk`, it measures only the writer; see `writing_speed.py`. The
mode `msprobe` runs the plain megatron-core wheel without this repository.

    python benchmarks/collection_worker.py sparse --folder /tmp/dump --every 10 --host-gib 1 \\
        --disk-mib 100 --hidden-size 64 --layers 2 --seq-length 64 --dtype bf16
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import training_worker as training
import writing_speed

#: Names of a step's measurements. The first four are times in seconds: the duration of the step,
#: the time that the collection blocked training, the time for plain copies of the same tensors, and
#: the time after the step until everything is on disk. The next two are the number of tensors and
#: their total size in bytes. The last two are in MiB: the peak memory of the process and the peak
#: host memory of the collection.
FIELDS = ("step", "blocked", "copies", "rest", "tensors", "bytes", "peak", "host")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("plain", "idle", "sparse", "everything", "msprobe"))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--every", type=int, required=True)
    parser.add_argument("--host-gib", type=float, required=True)
    parser.add_argument("--disk-mib", type=int, required=True, help="MiB that `disk` writes")
    parser.add_argument("--async-dump", action="store_true", help="asynchronous dump of msprobe")
    for name in ("hidden-size", "layers", "seq-length"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), required=True)
    parser.set_defaults(sequences=training.SEQUENCES)
    return parser.parse_args()


class Ours:
    """Adapter between the training loop below and this project's tensor collector."""

    def __init__(self, options: argparse.Namespace, tensor_saver: ModuleType):
        self.tensor_saver = tensor_saver
        self.copies = self.before = 0.0
        chosen = {"idle": {"collect_start": 10**6}, "sparse": {"collect_every": options.every}}
        if options.mode != "plain":
            tensor_saver.configure(
                {},
                save_tensors=True,
                save_dir=str(options.folder),
                control_iter=0,
                collect_micro_batches=0,
                collect_keep_free_gib=0.0,
                collect_max_host_gib=options.host_gib,
                **chosen.get(options.mode, {}),
            )
        if options.mode == "everything":
            self._copy_beside()

    def _copy_beside(self) -> None:
        """Copy each collected tensor to the host once more with plain torch, and time these copies.

        The extra copy is made alternately before and after the collector's own copy, because the
        first copy fills the caches for the second. Weights are copied only in the first
        micro-batch.
        """
        saver = self.tensor_saver.current()
        save, turn = saver.save, [0]

        def copy(tensor: Any) -> None:
            started = time.perf_counter()
            tensor.detach().to("cpu", copy=True).contiguous()
            self.copies += time.perf_counter() - started

        def both(tensor: Any, **fields: Any) -> None:
            again = fields["tensor_name"] == "weight" and fields["micro_batch"] > 0
            turn[0] += 1
            if turn[0] % 2 and not again:
                copy(tensor)
            save(tensor, **fields)
            if not turn[0] % 2 and not again:
                copy(tensor)

        saver.save = both

    def begin(self) -> None:
        """Do nothing; this project's collector needs no preparation before a step."""

    def end(self) -> dict[str, float]:
        """Wait until all tensors of the step are on disk; return the measurements of the step."""
        saver = self.tensor_saver.current()
        if saver is None:
            return {}
        copies, self.copies = self.copies, 0.0
        blocked, self.before = saver.blocked - self.before, saver.blocked
        started = time.perf_counter()
        self.tensor_saver.flush()
        rest = time.perf_counter() - started
        if saver.error:
            raise SystemExit(f"[ERROR] {saver.error}")
        host = saver._writer.memory.peak / 2**20
        return {"blocked": blocked, "copies": copies, "rest": rest, "host": host}


class MsProbe:
    """Adapter between the training loop below and mindstudio-probe.

    mindstudio-probe dumps the inputs, outputs, weights and gradients of all modules.
    """

    def __init__(self, options: argparse.Namespace, model: Any):
        from msprobe.pytorch import PrecisionDebugger

        config = {
            "task": "tensor",
            "level": "L0",
            "dump_path": str(options.folder),
            "rank": [],
            "step": [],
            "async_dump": options.async_dump,
            # An asynchronous dump requires a list of strings that occur in the names of the
            # modules to dump. All names contain "Module".
            "tensor": {"scope": [], "list": ["Module"] * options.async_dump, "data_mode": ["all"]},
        }
        path = options.folder / "config.json"
        path.write_text(json.dumps(config))
        self.model = model
        self.debugger = PrecisionDebugger(config_path=str(path))

    def begin(self) -> None:
        """Let mindstudio-probe start to dump one step."""
        self.debugger.start(model=self.model)

    def end(self) -> dict[str, float]:
        """Let mindstudio-probe finish the dump of one step; return the seconds that this took."""
        started = time.perf_counter()
        self.debugger.stop()
        self.debugger.step()
        return {"rest": time.perf_counter() - started}


def dumped(folder: Path) -> tuple[int, int]:
    """Delete the tensor files below a folder; return their number and total size in bytes.

    The next step then finds the disk and the page cache in the same state.
    """
    files = list(folder.rglob("*.pt"))
    size = sum(path.stat().st_size for path in files)
    for path in files:
        path.unlink()
    return len(files), size


def main() -> None:
    options = parse()
    if options.mode == "msprobe":
        root = str(training.REPO)
        sys.path[:] = [p for p in sys.path if str(Path(p or ".").resolve()) != root]
    else:
        sys.path.insert(0, str(training.REPO))
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    training.load_cpu_backend()
    import torch

    from megatron.core.pipeline_parallel import get_forward_backward_func

    model = training.build(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = training.batches(options)
    tensor_saver: Any = None
    if options.mode == "msprobe":
        collector: Ours | MsProbe = MsProbe(options, model)
    else:
        from megatron.core import tensor_saver

        collector = Ours(options, tensor_saver)
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "disk":
            print(json.dumps(writing_speed.measure(options, tensor_saver)), flush=True)
            continue
        started = time.perf_counter()
        collector.begin()
        get_forward_backward_func()(
            forward_step_func=training.forward_step,
            data_iterator=data,
            model=model,
            num_microbatches=training.MICRO_BATCHES,
            seq_length=options.seq_length,
            micro_batch_size=training.SEQUENCES,
        )
        optimizer.step()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        numbers = {"step": time.perf_counter() - started} | collector.end()
        # The plain copies were made only for comparison, so subtract their time.
        numbers["step"] -= numbers.get("copies", 0.0)
        numbers["tensors"], numbers["bytes"] = dumped(options.folder)
        numbers["peak"] = training.peak()
        print(json.dumps(dict.fromkeys(FIELDS, 0.0) | numbers), flush=True)
    if tensor_saver is not None:
        tensor_saver.close()
    shutil.rmtree(options.folder, ignore_errors=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
