"""Train one model repeatedly in one process, first without a collection and then with every kind.

test_non_interference.py runs it under torchrun. It writes the result of each training.

    torchrun interference_worker.py --folder DIR [--distributed-optimizer] [--ep 2]
        [--brief TYPE] [gpt_worker's]

Every training starts from the same seeds and takes two iterations with Adam in between, with
dropout, so that all random generators are in use.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepseek_worker
import gpt_worker
import numpy as np
import torch
from gpt_worker import digest

ITERATIONS = 2
DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1")
REQUESTED = ["all", "attention_scores", "attention_probs"]
BRIEF = ("everything", "ring")  #: kinds of collection for the type that `--brief` names


@dataclass(frozen=True)
class Way:
    """One kind of collection."""

    flags: dict[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = (1.0, 1.0)  #: losses that the trainer reports
    #: called before each iteration
    before: Callable[[int, Path], None] = lambda iteration, folder: None


def switch(iteration: int, folder: Path) -> None:
    """Create the flag file while the job runs."""
    (folder / "collect_now").unlink(missing_ok=True)
    if iteration == 2:
        (folder / "collect_now").touch()


def take_away(iteration: int, folder: Path) -> None:
    """Rename the folder `vanished` in iteration 2; unlike deleting it, this happens at once."""
    if iteration == 2:
        (folder / "vanished").rename(folder / "elsewhere")


def ways(folder: Path, quant_type: str) -> dict[str, Way]:
    """Return the kinds of collection that a run of this type supports."""
    everything = REQUESTED + ([] if quant_type == "none" else ["codes"])
    all_of_it = {"collect_tensors": everything, "collect_micro_batches": 0, "control_iter": 0}
    ring = {name: value for name, value in all_of_it.items() if name != "control_iter"}
    return {
        "everything": Way(all_of_it),
        "ring": Way(ring | {"collect_ring": 2}, losses=(1.0, float("nan"))),
        "flag": Way(all_of_it | {"collect_flag_file": str(folder / "collect_now")}, before=switch),
        "first_rank": Way(all_of_it | {"collect_ranks": "0"}),
        "limited": Way(all_of_it | {"collect_max_files": 50}),
        "little_memory": Way(all_of_it | {"collect_max_host_gib": 2**20 / 2**30}),
        "vanished": Way(all_of_it, before=take_away),
    }


def parse() -> tuple[argparse.Namespace, argparse.Namespace]:
    """Parse our options, and those of the worker that builds the model."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--types", nargs="+", default=["none", "mxfp8:sr"])
    parser.add_argument("--brief", metavar="TYPE", help="train TYPE with few kinds of collection")
    parser.add_argument("--distributed-optimizer", action="store_true")
    parser.add_argument("--ep", type=int, default=1)
    own, rest = parser.parse_known_args()
    if own.ep > 1:
        return own, deepseek_worker.parse(["--ep", str(own.ep), *DROPOUT[:2], *rest])
    return own, gpt_worker.parse([*DROPOUT, *rest])


def seed() -> None:
    from megatron.core import tensor_parallel

    random.seed(5)
    np.random.seed(5)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)


def random_states() -> dict[str, str]:
    """Return the state of every random generator of this process."""
    from megatron.core import tensor_parallel

    plain = {"python": random.getstate(), "numpy": str(np.random.get_state())}
    states = {
        name: hashlib.sha256(repr(state).encode()).hexdigest() for name, state in plain.items()
    }
    tracked = tensor_parallel.get_cuda_rng_tracker().get_states()
    states |= {f"tracker {name}": digest(state) for name, state in tracked.items()}
    return states | {"torch": digest(torch.get_rng_state())}


def build(own: argparse.Namespace, options: argparse.Namespace) -> list[torch.nn.Module]:
    """Return this rank's stages, wrapped as by a trainer."""
    if own.ep > 1:
        return [deepseek_worker.build(options)]
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    # overlap only changes when a bucket is reduced: as soon as its last gradient is computed
    distributed = own.distributed_optimizer
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=distributed,
        overlap_param_gather=distributed,
    )
    return [
        DistributedDataParallel(chunk.config, ddp, chunk) for chunk in gpt_worker.build(options)
    ]


def optimizer_of(own: argparse.Namespace, options: argparse.Namespace, model):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=options.dtype == "bf16",
        params_dtype=dtype,
        use_distributed_optimizer=own.distributed_optimizer,
        overlap_param_gather=own.distributed_optimizer,
    )
    for chunk in model:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        if own.distributed_optimizer:
            chunk.config.no_sync_func = chunk.no_sync
    return get_megatron_optimizer(config, model)


def train(own: argparse.Namespace, options: argparse.Namespace, way: Way) -> list[dict[str, Any]]:
    """Train two iterations; return losses, hashes of gradients and weights, random states."""
    from megatron.core import parallel_state, tensor_saver
    from megatron.core.pipeline_parallel import get_forward_backward_func

    seed()
    model = build(own, options)
    optimizer = optimizer_of(own, options, model)
    parameters = {
        f"{number}.{name}": parameter
        for number, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
    }
    data = [gpt_worker.batches(7 + parallel_state.get_data_parallel_rank()) for _ in model]
    steps = []
    for iteration in range(1, ITERATIONS + 1):
        if torch.distributed.get_rank() == 0:
            way.before(iteration, own.folder)
        torch.distributed.barrier()
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        results = get_forward_backward_func()(
            forward_step_func=gpt_worker.forward_step,
            data_iterator=data if len(model) > 1 else data[0],
            model=model if len(model) > 1 else model[0],
            num_microbatches=options.micro_batches,
            seq_length=gpt_worker.SEQ,
            micro_batch_size=gpt_worker.BATCH,
        )
        grads = {name: digest(parameter.main_grad) for name, parameter in parameters.items()}
        optimizer.step()
        tensor_saver.observe(way.losses[iteration - 1], None)
        steps.append(
            {
                "losses": [float(result["loss"]).hex() for result in results],
                "grads": grads,
                "weights": {n: digest(p.detach()) for n, p in parameters.items()},
                "random": random_states(),
            }
        )
    return steps


def main() -> None:
    own, options = parse()
    (deepseek_worker if own.ep > 1 else gpt_worker).start(options)
    from megatron.core import tensor_saver
    from megatron.fake_quant import policy

    found: dict[str, Any] = {}
    for quant_type in own.types:
        policy.configure(custom_quant_type=quant_type)
        tensor_saver.configure()
        of_type = found[quant_type] = {"off": {"steps": train(own, options, Way())}}
        for name, way in ways(own.folder, quant_type).items():
            if quant_type == own.brief and name not in BRIEF:
                continue
            dump = own.folder / name
            tensor_saver.configure(save_tensors=True, save_dir=str(dump), **way.flags)
            steps = train(own, options, way)
            error = tensor_saver.close()
            torch.distributed.barrier()
            of_type[name] = {
                "steps": steps,
                "error": error,
                "files": len(list(dump.glob("*.pt"))),
                "partial": len(list(dump.glob("*.partial"))),
            }
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                for path in (dump, own.folder / "elsewhere"):
                    shutil.rmtree(path, ignore_errors=True)
    rank = os.environ["RANK"]
    (own.folder / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()  # a rank that left first could abort the other
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
